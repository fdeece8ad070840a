"""What the scheduler's side knows of each request: its hash chain, what is stored, what is being asked and loaded.

No vLLM here: a request is anything with vLLM's attributes. One thread, vLLM's scheduler.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from allocator import UsageError
from engine_adapter.model_source import weights_digest
from engine_adapter.vllm_connector.orders import LoadOrder, Orders, SaveOrder, Tables
from kvstore import HashChain, Identity, Media

_LOSSY_LIMIT = 1 << 18  # beyond it all of vLLM's own cache counts as lossy


@dataclass(frozen=True, slots=True)
class Found:
    """Leading store blocks that are stored; pending: a tier is still looking; epoch: the tiers' own.

    lossy_at: the first of the blocks that only has a lossy copy.
    """

    blocks: int
    pending: bool
    epoch: int
    lossy_at: int | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """A request goes by what was found. Of its blocks the first asked_blocks could have been used again.

    prefill_tokens_per_second: of this engine, 0 while it is not known."""

    asked_blocks: int
    tokens: int
    prefill_tokens_per_second: float = 0.0


class Lookups(Protocol):
    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found: ...

    def note(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int, note: Note) -> None: ...


@dataclass(slots=True)
class Tracked:
    """chain: None where nothing may be shared. stored_blocks: leading blocks that the tiers were given already.

    lossy_at: the first block that was read lossy, so that all behind it is lossy; computed_from: the first block that
    the request computes itself. written_tokens: leading tokens whose KV is in vLLM's pages after the last step.
    """

    request: Any
    chain: HashChain | None
    stored_blocks: int = 0
    asked_since: float | None = None
    is_started: bool = False
    may_load: bool = True
    is_asked: bool = False
    local_blocks: int = 0
    found_lossy_at: int | None = None
    lossy_at: int | None = None
    computed_from: int = 0
    written_tokens: int = 0
    load_tables: Tables = ()
    is_prompt_kept: bool = False
    wait_seconds: float = 0.0


class Book:
    """identity: of the plain model; a request's LoRA and salt are put in. deadline_seconds: longest "ask again".

    raw_tail_tokens: with encoded copies, so many of a prompt's and of an answer's last tokens are stored raw too, since
    the next hit reads them as its recent past; 0: all copies are raw anyhow. tells: some tier says what use it is, and
    is told what became of each lookup; prefill_tokens_per_second: beside that, see Note.
    """

    def __init__(
        self,
        identity: Identity,
        block_tokens: int,
        lookups: Lookups,
        *,
        deadline_seconds: float,
        raw_tail_tokens: int = 0,
        tells: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._block_tokens = block_tokens
        self._lookups = lookups
        self._deadline_seconds = deadline_seconds
        self._raw_tail_tokens = raw_tail_tokens
        self._tells = tells
        self.prefill_tokens_per_second = 0.0
        self._clock = clock
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadOrder] = []
        self._ended: list[SaveOrder] = []
        self._lossy_ends: set[bytes] = set()  # chains through one of these were read lossy, here, since the last reset
        self._is_all_lossy = False

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    # vLLM asks -------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: ask again."""
        tracked = self._track(request)
        tracked.is_asked, tracked.written_tokens, tracked.found_lossy_at, tracked.load_tables = True, 0, None, ()
        tracked.local_blocks = local = computed_tokens // self._block_tokens
        chain = tracked.chain
        if chain is None or not tracked.may_load:
            return 0
        chain.extend(request.all_token_ids[chain.token_count :])
        limit = (request.num_tokens - 1) // self._block_tokens
        if limit <= local:
            return 0
        found = self._lookups.find(self.epoch, chain.root, chain.hashes[:limit], local)
        if found.epoch != self.epoch:
            self.begin_epoch(found.epoch, request.request_id)
            return None
        wait = tracked.wait_seconds = 0.0 if self._raw_tail_tokens else wait_seconds(request)
        is_coming = bool(wait) and found.blocks <= local
        now = self._clock()
        if found.pending or is_coming:
            if tracked.asked_since is None:
                tracked.asked_since = now
            if now - tracked.asked_since < (wait if is_coming else self._deadline_seconds):
                return None
        else:
            tracked.asked_since = None
        tracked.found_lossy_at = found.lossy_at
        blocks = limit if wait and not is_coming else found.blocks
        return max(0, blocks - local) * self._block_tokens

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        """vLLM has given the request its blocks, of which the last `external_tokens` asked for are to be loaded.

        It says so again when they are loaded; then there is nothing more to do.
        """
        tracked = self._requests.get(request.request_id)
        if tracked is None or not tracked.is_asked or tracked.request is not request:
            return
        tracked.is_asked, tracked.is_started = False, True
        chain, start = tracked.chain, tracked.local_blocks
        if chain is None:
            return
        stop = start + external_tokens // self._block_tokens
        tracked.lossy_at = self._lossy_at(chain.hashes[:start])
        tracked.computed_from = stop
        if self._tells and tracked.may_load:  # after a load that failed vLLM says so once more
            asked = max(0, request.num_tokens - 1) // self._block_tokens
            note = Note(asked, chain.token_count, self.prefill_tokens_per_second)
            self._lookups.note(self.epoch, chain.root, chain.hashes, start, note)
        if not external_tokens:
            return
        lossy_at = tracked.found_lossy_at
        if lossy_at is not None and lossy_at < stop:
            self._note_lossy(chain.hashes[lossy_at])
            tracked.lossy_at = lossy_at if tracked.lossy_at is None else min(lossy_at, tracked.lossy_at)
        wait, lossy_at = tracked.wait_seconds, tracked.lossy_at
        order = LoadOrder(request.request_id, chain.root, chain.hashes[:stop], start, tables, lossy_at, wait)
        self._loads.append(order)
        tracked.load_tables = tables
        tracked.stored_blocks = 0 if start else stop

    def loading_into(self, block_ids: Iterable[int]) -> list[str]:
        """The requests whose last load was to fill one of these vLLM blocks."""
        wanted = set(block_ids)
        return [
            name
            for name, tracked in self._requests.items()
            if wanted and any(wanted.intersection(table) for table in tracked.load_tables)
        ]

    def load_failed(self, request_ids: Iterable[str]) -> None:
        """What these were to load is computed after all; they ask no more."""
        for request_id in request_ids:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.may_load, tracked.stored_blocks = False, 0

    def step(self, scheduled: Iterable[tuple[str, int]], tables_of: Callable[[str], Tables]) -> Orders:
        """The orders of a step: (request, tokens whose KV is there after the step) each."""
        orders = Orders(loads=self._loads, ended=self._ended)
        self._loads, self._ended = [], []
        for request_id, token_count in scheduled:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.chain is None:
                continue
            tracked.is_started = True
            tracked.written_tokens = token_count
            orders.saves += self._save(tracked, token_count, tables_of)
        return orders

    def _save(self, tracked: Tracked, token_count: int, tables_of: Callable[[str], Tables]) -> list[SaveOrder]:
        """Full blocks of committed tokens that are not stored yet; no drafts, and no partly filled block."""
        chain, request = tracked.chain, tracked.request
        assert chain is not None
        token_ids = request.all_token_ids
        committed = min(token_count, len(token_ids))
        start, stop = tracked.stored_blocks, committed // self._block_tokens
        is_prompt_done = not tracked.is_prompt_kept and committed >= request.num_prompt_tokens
        if stop <= start and not (is_prompt_done and self._raw_tail_tokens):
            return []
        if chain.token_count < len(token_ids):
            chain.extend(token_ids[chain.token_count :])
        tables = tables_of(request.request_id)
        orders = self._orders(tracked, start, stop, tables)
        tracked.stored_blocks = max(start, stop)
        if is_prompt_done:
            tracked.is_prompt_kept = True
            orders += self._tail(tracked, request.num_prompt_tokens, tables)
        return orders

    def _tail(self, tracked: Tracked, token_count: int, tables: Tables) -> list[SaveOrder]:
        """Raw copies of the newest tokens."""
        if not self._raw_tail_tokens:
            return []
        start = max(0, token_count - self._raw_tail_tokens) // self._block_tokens
        return self._orders(tracked, start, token_count // self._block_tokens, tables, is_raw=True)

    def _orders(
        self, tracked: Tracked, start: int, stop: int, tables: Tables, *, is_raw: bool = False
    ) -> list[SaveOrder]:
        """The blocks [start, stop) but those that were read lossy: these have their copies, and no better ones."""
        chain = tracked.chain
        assert chain is not None
        lossy = stop if tracked.lossy_at is None else tracked.lossy_at
        spans = [(start, min(stop, lossy), True), (max(start, lossy, tracked.computed_from), stop, False)]
        return [
            SaveOrder(
                chain.root,
                chain.hashes[first:last],
                first,
                chain.hashes[first - 1] if first else None,
                tables,
                is_exact,
                is_raw,
            )
            for first, last, is_exact in spans
            if first < last
        ]

    def chain_of(self, request: Any) -> HashChain | None:
        """The names of a request's blocks; None where it has none, or was never asked about."""
        tracked = self._requests.get(request.request_id)
        return None if tracked is None or tracked.request is not request else tracked.chain

    def finished(self, request_id: str, tables: Tables = ()) -> None:
        """It is over, and these were its blocks."""
        tracked = self._requests.pop(request_id, None)
        self._loads = [order for order in self._loads if order.request_id != request_id]
        if tracked is None or tracked.chain is None or not tables:
            return
        # What was sampled last has no KV, and where drafts were, a rejected one's.
        token_ids = tracked.request.all_token_ids
        written = min(tracked.written_tokens, len(token_ids) - 1)
        tracked.chain.extend(token_ids[tracked.chain.token_count :])
        self._ended += self._tail(tracked, written, tables)

    # what was read lossy ---------------------------------------------------------------------------------------------

    def _lossy_at(self, hashes: Sequence[bytes]) -> int | None:
        """The first of the blocks in vLLM's own cache that may hold what an encoded copy gave."""
        if self._is_all_lossy:
            return 0 if hashes else None
        if not self._lossy_ends:
            return None
        return next((at for at, one in enumerate(hashes) if one in self._lossy_ends), None)

    def _note_lossy(self, block_hash: bytes) -> None:
        """vLLM may keep the block in its own cache, and all that is computed behind it."""
        self._lossy_ends.add(block_hash)
        if len(self._lossy_ends) > _LOSSY_LIMIT:
            self._lossy_ends.clear()
            self._is_all_lossy = True

    # reset -----------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, asking: str | None = None) -> None:
        """Nothing stored before is a hit. What has begun goes on, but neither loads nor stores any more."""
        self._identity = replace(self._identity, epoch=epoch)
        # Hashes are others from now on, while vLLM's own cache may still hold what was read lossy.
        self._is_all_lossy = self._is_all_lossy or bool(self._lossy_ends)
        self._lossy_ends.clear()
        self._ended = []
        for request_id, tracked in self._requests.items():
            if tracked.is_started and request_id != asking:
                tracked.chain = None
            else:
                tracked.chain = self._chain(tracked.request)

    # inside ----------------------------------------------------------------------------------------------------------

    def _track(self, request: Any) -> Tracked:
        tracked = self._requests.get(request.request_id)
        if tracked is None or tracked.request is not request:
            tracked = self._requests[request.request_id] = Tracked(request, self._chain(request))
        return tracked

    def _chain(self, request: Any) -> HashChain | None:
        """None for a request whose KV no tokens name, and for a session, which takes tokens back."""
        if any(getattr(request, name, None) is not None for name in ("prompt_embeds", "pooling_params")):
            return None
        if getattr(request, "resumable", False):
            return None
        identity = self._identity
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            digest = _adapter_digest(lora.lora_path)
            if digest is None:
                return None
            identity = replace(identity, adapter=(lora.lora_name, lora.lora_int_id, digest))
        salt = getattr(request, "cache_salt", None)
        if salt is not None:
            identity = replace(identity, extra=("cache_salt", salt))
        chain = HashChain(identity.root(), self._block_tokens)
        try:
            chain.extend(list(request.all_token_ids), _media(getattr(request, "mm_features", None) or ()))
        except UsageError:
            return None
        return chain


def _adapter_digest(path: str) -> str | None:
    """None where the adapter's weights are in no folder here, so that its KV cannot be told from another's."""
    try:
        marks = tuple(
            (file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(Path(path).iterdir())
        )
        return _digest_of(path, marks)
    except OSError:
        return None


@lru_cache(maxsize=1024)
def _digest_of(path: str, marks: tuple[tuple[str, int, int], ...]) -> str:
    """Of the weights and of how they are applied. marks: the files' sizes and times, since adapters are replaced."""
    config = Path(path) / "adapter_config.json"
    applied = hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else ""
    return f"{weights_digest(Path(path))} {applied}"


def _media(features: Iterable[Any]) -> list[Media]:
    found = [
        Media(hashlib.sha256(str(one.identifier).encode()).digest(), one.mm_position.offset, one.mm_position.length)
        for one in features
    ]
    return sorted(found, key=lambda one: one.start)


def wait_seconds(request: Any) -> float:
    """The request's `kv_transfer_params: {"prefill_wait_seconds": n}`: another engine computes its prompt right now.

    0 where there is none; what is not a number in (0, 3600] is none.
    """
    found = (getattr(request, "kv_transfer_params", None) or {}).get("prefill_wait_seconds", 0)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return float(found) if is_number and 0 < found <= 3600 else 0.0
