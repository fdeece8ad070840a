"""What the scheduler's side knows of each request: its hash chain, what is stored, what is being asked and loaded.

No vLLM here: a request is anything with vLLM's attributes. One thread, vLLM's scheduler.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from allocator import UsageError
from engine_adapter.model_source import weights_digest
from engine_adapter.vllm_connector.orders import LoadOrder, Orders, SaveOrder, Tables
from kvstore import HashChain, Identity, Media


@dataclass(frozen=True, slots=True)
class Found:
    """Leading store blocks that are stored; pending: a tier is still looking; epoch: the tiers' own."""

    blocks: int
    pending: bool
    epoch: int


class Lookups(Protocol):
    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found: ...


@dataclass(slots=True)
class Tracked:
    """chain: None where nothing may be shared. stored_blocks: leading blocks that the tiers were given already."""

    request: Any
    chain: HashChain | None
    stored_blocks: int = 0
    asked_since: float | None = None
    is_started: bool = False
    may_load: bool = True


class Book:
    """identity: of the plain model; a request's LoRA and salt are put in. deadline_seconds: longest "ask again"."""

    def __init__(
        self,
        identity: Identity,
        block_tokens: int,
        lookups: Lookups,
        *,
        deadline_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._block_tokens = block_tokens
        self._lookups = lookups
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._requests: dict[str, Tracked] = {}
        self._loads: list[LoadOrder] = []

    @property
    def epoch(self) -> int:
        return self._identity.epoch

    # vLLM asks -------------------------------------------------------------------------------------------------------

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """Tokens beyond `computed_tokens` that can be loaded; None: ask again."""
        tracked = self._track(request)
        chain = tracked.chain
        if chain is None or not tracked.may_load:
            return 0
        chain.extend(request.all_token_ids[chain.token_count :])
        limit = (request.num_tokens - 1) // self._block_tokens
        local = computed_tokens // self._block_tokens
        if limit <= local:
            return 0
        found = self._lookups.find(self.epoch, chain.root, chain.hashes[:limit], local)
        if found.epoch != self.epoch:
            self.begin_epoch(found.epoch, request.request_id)
            return None
        now = self._clock()
        if found.pending:
            if tracked.asked_since is None:
                tracked.asked_since = now
            if now - tracked.asked_since < self._deadline_seconds:
                return None
        else:
            tracked.asked_since = None
        return max(0, found.blocks - local) * self._block_tokens

    def load(self, request: Any, tables: Tables, local_tokens: int, external_tokens: int) -> None:
        """Order that the tokens [local_tokens, local_tokens + external_tokens) are loaded into the request's blocks."""
        tracked = self._track(request)
        tracked.is_started = True
        chain = tracked.chain
        if chain is None or not external_tokens:
            return
        stop = (local_tokens + external_tokens) // self._block_tokens
        start = local_tokens // self._block_tokens
        self._loads.append(LoadOrder(request.request_id, chain.root, chain.hashes[:stop], start, tables))
        tracked.stored_blocks = 0 if start else stop

    def load_failed(self, request_ids: Iterable[str]) -> None:
        """What these were to load is computed after all; they ask no more."""
        for request_id in request_ids:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.may_load, tracked.stored_blocks = False, 0

    def step(self, scheduled: Iterable[tuple[str, int]], tables_of: Callable[[str], Tables]) -> Orders:
        """The orders of a step: (request, tokens whose KV is there after the step) each."""
        orders = Orders(loads=self._loads)
        self._loads = []
        for request_id, token_count in scheduled:
            tracked = self._requests.get(request_id)
            if tracked is None or tracked.chain is None:
                continue
            tracked.is_started = True
            order = self._save(tracked, token_count, tables_of)
            if order is not None:
                orders.saves.append(order)
        return orders

    def _save(self, tracked: Tracked, token_count: int, tables_of: Callable[[str], Tables]) -> SaveOrder | None:
        """Full blocks of committed tokens that are not stored yet; no drafts, and no partly filled block."""
        chain, request = tracked.chain, tracked.request
        assert chain is not None
        token_ids = request.all_token_ids
        stop = min(token_count, len(token_ids)) // self._block_tokens
        start = tracked.stored_blocks
        if stop <= start:
            return None
        if chain.token_count < len(token_ids):
            chain.extend(token_ids[chain.token_count :])
        tracked.stored_blocks = stop
        parent = chain.hashes[start - 1] if start else None
        tables = tables_of(request.request_id)
        return SaveOrder(chain.root, chain.hashes[start:stop], start, parent, tables)

    def finished(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._loads = [order for order in self._loads if order.request_id != request_id]

    # reset -----------------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int, asking: str | None = None) -> None:
        """Nothing stored before is a hit. What has begun goes on, but neither loads nor stores any more."""
        self._identity = replace(self._identity, epoch=epoch)
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
        """None for a request whose KV no tokens name."""
        if getattr(request, "prompt_embeds", None) is not None or getattr(request, "pooling_params", None) is not None:
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


@cache
def _adapter_digest(path: str) -> str | None:
    """None where the adapter's weights are in no folder here, so that its KV cannot be told from another's."""
    try:
        return weights_digest(Path(path))
    except OSError:
        return None


def _media(features: Iterable[Any]) -> list[Media]:
    found = [
        Media(hashlib.sha256(str(one.identifier).encode()).digest(), one.mm_position.offset, one.mm_position.length)
        for one in features
    ]
    return sorted(found, key=lambda one: one.start)
