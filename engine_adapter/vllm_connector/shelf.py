"""The tiers as the worker's side uses them: what is there, blocks copied down behind the engine, blocks loaded.

Three threads come here: vLLM's worker (`save`, `load`, `take_finished`), the lookup server (`find`, `reset`) and the
shelf's own, which moves bytes. `_lock` is held for calls to tiers and for counts, never while bytes are copied or
waited for. Tiers are asked through kvstore's Residency, whose device is vLLM's: a prefix of known length.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from allocator import FULL, GroupKind, TierError
from engine_adapter.vllm_connector.book import Found
from engine_adapter.vllm_connector.layout import GroupPages
from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder, Tables
from kvstore.executor import ThreadExecutor
from kvstore.residency import HitPlan, LowerCopy, Residency
from kvstore.staging import Staging
from kvstore.tier import CopyKey, ResultCode

if TYPE_CHECKING:
    from allocator import KVGeometry
    from kvstore.tier import ByteRow, Completion, Tier, Transfer

_LOG = logging.getLogger(__name__)
_CHUNK_BLOCKS = 32
_ROUNDS = 3  # a copy that was bad in one tier is looked for in the next
_CLOSE_SECONDS = 10.0


@dataclass(slots=True)
class LoadResult:
    """failed: positions of store blocks that are not there after all."""

    request_id: str
    loaded_tokens: int
    failed: list[int]


@dataclass(frozen=True, slots=True)
class _Save:
    key: CopyKey
    parent: bytes | None
    tables: Tables
    position: int


@dataclass(slots=True)
class _Chunk:
    """A staging buffer that tiers read from: given back when the last of them has ended."""

    row: ByteRow
    readers: int = 0


@dataclass(slots=True)
class _Engine:
    """vLLM's memory in place of a block pool: it has the first `blocks` of a prompt, and nothing else."""

    hashes: frozenset[bytes] = field(default_factory=frozenset)

    def index(self, group: int) -> _Engine:
        return self

    def match(self, hashes: Sequence[bytes], exact: bool) -> list[int]:
        ids: list[int] = []
        for one in hashes if exact else ():
            if one not in self.hashes:
                break
            ids.append(0)
        return ids

    def find(self, block_hash: bytes, exact: bool) -> int | None:
        return 0 if exact and block_hash in self.hashes else None

    def find_lossy(self, block_hash: bytes) -> int | None:
        return None


class _EngineResidency(Residency):
    """Windows begin at an engine block's first token: vLLM may hand the whole block to the next request."""

    blocks_per_page = 1

    def window_first(self, group: int, token_count: int) -> int:
        ratio = self.blocks_per_page
        return super().window_first(group, token_count) // ratio * ratio


class Shelf:
    """tiers: fast to slow, closed with the shelf. staging_bytes: most that waits to be written, half of it for one slow
    tier. deadline_seconds: a load that takes longer is given up.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        tiers: Sequence[Tier],
        *,
        epoch: int = 0,
        staging_bytes: int = 256 << 20,
        deadline_seconds: float = 1.0,
    ) -> None:
        self._geometry = geometry
        self._tiers = tuple(tiers)
        self._engine = _Engine()
        self._residency = _EngineResidency(geometry, cast(Any, self._engine), self._tiers, None)
        self._deadline_seconds = deadline_seconds
        self._groups: tuple[GroupPages, ...] = ()
        self._staging = Staging(staging_bytes)
        self._load_rows: dict[int, list[ByteRow]] = {}
        self._lock = threading.RLock()
        self._done = threading.Condition(self._lock)
        self._completions: dict[Transfer, Completion] = {}
        self._chunks: dict[Transfer, _Chunk] = {}
        self._under_way_bytes: Counter[str] = Counter()
        self._results: list[LoadResult] = []
        self._counts: Counter[str] = Counter()
        self._executor = ThreadExecutor("kvstore-vllm")
        self.epoch = self._agreed_epoch(epoch)
        for tier in self._tiers:
            tier.set_waker(self._drain)

    def attach(self, groups: Sequence[GroupPages]) -> None:
        """vLLM's memory is there: one GroupPages per cache group of the geometry."""
        self._groups = tuple(groups)
        self._residency.blocks_per_page = groups[0].blocks_per_page

    def counters(self) -> dict[str, int]:
        """Counts since start; those of a tier begin with its name."""
        with self._lock:
            found = dict(self._counts)
        for tier in self._tiers:
            found |= {f"{tier.name}_{name}": count for name, count in tier.counters().items()}
        return found

    # lookups ---------------------------------------------------------------------------------------------------------

    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found:
        """The leading blocks that can be had, vLLM's own `local_blocks` among them."""
        with self._lock:
            fresh = self._keep_up()
            if epoch != self.epoch:
                return Found(0, False, self.epoch)
            if not fresh:
                return Found(0, True, self.epoch)
            plan = self._plan(root, hashes, local_blocks)
            return Found(plan.blocks, plan.pending and plan.blocks < len(hashes), self.epoch)

    def _plan(self, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> HitPlan:
        self._engine.hashes = frozenset(hashes[:local_blocks])
        return self._residency.plan(root, hashes, True)

    # epochs ----------------------------------------------------------------------------------------------------------

    def _agreed_epoch(self, epoch: int) -> int:
        for tier in self._tiers:
            try:
                epoch = max(epoch, tier.read_epoch())
            except TierError:
                continue
        return epoch

    def _keep_up(self) -> bool:
        """Follow where another process has reset. False while a shared tier cannot say."""
        fresh = True
        for tier in self._tiers:
            seen = tier.seen_epoch()
            if seen is None:
                fresh = False
            elif seen > self.epoch:
                self.epoch = seen
                for one in self._tiers:
                    one.follow_epoch(seen)
        return fresh

    def reset(self) -> int:
        """A new epoch in every tier, and nothing of the old one in it; which. TierError where one was not reached."""
        with self._lock:
            epoch = self.epoch + 1
            problems = []
            for work in ("raise", "clear"):
                for tier in self._tiers:
                    try:
                        if work == "raise":
                            epoch = max(epoch, tier.raise_epoch(epoch))
                        else:
                            tier.clear()
                    except TierError as error:
                        problems.append(f"{tier.name}: {error}")
            self.epoch = epoch
            if problems:
                raise TierError("reset did not reach every tier: " + "; ".join(problems))
            return epoch

    # save ------------------------------------------------------------------------------------------------------------

    def save(self, orders: Sequence[SaveOrder]) -> None:
        """Copy blocks out of vLLM's pages now, and write them to the tiers behind it."""
        for group, pages in enumerate(self._groups):
            wanted = self._wanted(orders, group, pages)
            for at in range(0, len(wanted), _CHUNK_BLOCKS):
                self._save_chunk(pages, wanted[at : at + _CHUNK_BLOCKS])

    def _wanted(self, orders: Sequence[SaveOrder], group: int, pages: GroupPages) -> list[_Save]:
        """What some tier lacks, of what vLLM still has."""
        found: dict[CopyKey, _Save] = {}
        for order in orders:
            keys = self._residency.copy_key(order.root, group, order.hashes[0], FULL, True).with_hashes(order.hashes)
            with self._lock:
                flags = [tier.contains(keys) for tier in self._tiers]
            parents = [order.parent, *order.hashes]
            for index, key in enumerate(keys):
                position = order.start + index
                if not all(flag[index] for flag in flags) and pages.is_there(order.tables, position):
                    found.setdefault(key, _Save(key, parents[index], order.tables, position))
        return list(found.values())

    def _save_chunk(self, pages: GroupPages, saves: Sequence[_Save]) -> None:
        size = pages.block_bytes
        with self._lock:
            row = self._staging.take(_CHUNK_BLOCKS * size)
            if row is None:
                self._counts["saves_dropped_staging"] += len(saves)
                return
        chunk = _Chunk(row, 1)
        pages.gather([(one.tables, one.position) for one in saves], row)
        items = [(one.key, [row[index * size : (index + 1) * size]], one.parent) for index, one in enumerate(saves)]
        with self._lock:
            for tier in self._tiers:
                waiting = self._under_way_bytes[tier.name]
                if not tier.private_memory and waiting and waiting + row.nbytes > self._staging.limit_bytes // 2:
                    self._counts[f"saves_dropped_{tier.name}"] += len(items)
                    continue
                transfer = tier.submit_put(items)
                chunk.readers += 1
                self._chunks[transfer] = chunk
                self._under_way_bytes[tier.name] += row.nbytes
                if transfer in self._completions:  # it ran inside the call
                    self._end_put(tier, self._completions.pop(transfer))
            self._counts["saved_blocks"] += len(items)
            self._end(chunk)
        self._drain()

    def _end(self, chunk: _Chunk) -> None:
        chunk.readers -= 1
        if not chunk.readers:
            self._staging.give_back(chunk.row)

    def _end_put(self, tier: Tier, completion: Completion) -> None:
        chunk = self._chunks.pop(completion.transfer)
        self._under_way_bytes[tier.name] -= chunk.row.nbytes
        self._end(chunk)
        for result in completion.results:
            self._counts[f"put_{tier.name}_{result.value}"] += 1

    def _drain(self) -> None:
        """Take the tiers' completions; on any thread."""
        with self._done:
            for tier in self._tiers:
                for completion in tier.poll():
                    if completion.transfer in self._chunks:
                        self._end_put(tier, completion)
                    else:
                        self._completions[completion.transfer] = completion
            self._done.notify_all()

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way to a tier."""
        with self._lock:
            return not self._chunks

    # load ------------------------------------------------------------------------------------------------------------

    def load(self, order: LoadOrder) -> None:
        """Begin to load; the end comes by `take_finished`."""
        self._executor.submit(partial(self._load, order))

    def take_finished(self) -> list[LoadResult]:
        with self._lock:
            finished, self._results = self._results, []
            return finished

    def _load(self, order: LoadOrder) -> None:
        missing = {(-1, order.start)}
        try:
            missing = self._load_blocks(order, time.monotonic() + self._deadline_seconds)
        except Exception:  # counted: the blocks are computed instead
            _LOG.exception("kvstore: a load for vLLM failed")
        failed = sorted({position for _, position in missing})
        tokens = (len(order.hashes) - order.start) * self._geometry.block_tokens
        with self._lock:
            self._counts["loads_failed" if failed else "loads"] += 1
            self._counts["loaded_tokens"] += 0 if failed else tokens
            self._results.append(LoadResult(order.request_id, tokens, failed))

    def _load_blocks(self, order: LoadOrder, until: float) -> set[tuple[int, int]]:
        """Bring (group, position) of the hit to their pages; those that could not be brought."""
        loaded: set[tuple[int, int]] = set()
        for _ in range(_ROUNDS):
            with self._lock:
                plan = self._plan(order.root, order.hashes, order.start)
            missing = {
                (group, position)
                for group in range(len(plan.groups))
                for position in range(self._first(group, order), len(order.hashes))
                if (group, position) not in loaded
            }
            copies = [
                (group, position, copy)
                for group, one in enumerate(plan.groups)
                for position, copy in sorted(one.copies.items())
                if (group, position) in missing
            ]
            for group, tier, batch in _batches(copies):
                loaded |= self._load_batch(order, group, tier, batch, until)
            missing -= loaded
            if not missing or not copies or time.monotonic() >= until:
                break
        return missing

    def _first(self, group: int, order: LoadOrder) -> int:
        """The first block of the group that the hit needs."""
        if self._geometry.groups[group].kind is not GroupKind.SLIDING:
            return order.start
        end = len(order.hashes) * self._geometry.block_tokens
        return max(order.start, self._residency.window_first(group, end))

    def _load_batch(
        self, order: LoadOrder, group: int, tier: Tier, copies: Sequence[tuple[int, LowerCopy]], until: float
    ) -> set[tuple[int, int]]:
        """Chunk by chunk, the next one read while the last one is put in place."""
        pages, loaded = self._groups[group], set()
        chunks = [copies[at : at + _CHUNK_BLOCKS] for at in range(0, len(copies), _CHUNK_BLOCKS)]
        rows = self._rows(pages.block_bytes)
        under_way: list[tuple[Transfer, Sequence[tuple[int, LowerCopy]], ByteRow]] = []
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                row = rows[index % 2]
                with self._lock:
                    transfer = tier.submit_get(_gets(chunks[index], row, pages.block_bytes))
                under_way.append((transfer, chunks[index], row))
            if index:
                transfer, chunk, row = under_way.pop(0)
                results = self._wait(transfer, until)
                good = [place for place, result in enumerate(results) if result is ResultCode.OK]
                for start, stop in _runs(good):
                    places = [(order.tables, chunk[place][0]) for place in range(start, stop)]
                    pages.scatter(row[start * pages.block_bytes : stop * pages.block_bytes], places)
                loaded |= {(group, chunk[place][0]) for place in good}
                with self._lock:
                    self._counts[f"loaded_blocks_{tier.name}"] += len(good)
        return loaded

    def _rows(self, block_bytes: int) -> list[ByteRow]:
        if block_bytes not in self._load_rows:
            fresh = Staging(2 * _CHUNK_BLOCKS * block_bytes)
            rows = [fresh.take(_CHUNK_BLOCKS * block_bytes) for _ in range(2)]
            self._load_rows[block_bytes] = [row for row in rows if row is not None]
        return self._load_rows[block_bytes]

    def _wait(self, transfer: Transfer, until: float) -> tuple[ResultCode, ...]:
        self._drain()
        with self._done:
            while transfer not in self._completions:
                left = until - time.monotonic()
                if left <= 0:
                    transfer.cancel()
                self._done.wait(max(0.05, min(left, 0.25)))
                self._drain()
            return self._completions.pop(transfer).results

    # close -----------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """What is on its way is written, for a bounded time; then the tiers close."""
        until = time.monotonic() + _CLOSE_SECONDS
        while not self.is_idle and time.monotonic() < until:
            self._drain()
            time.sleep(0.005)
        self._executor.close()
        for tier in self._tiers:
            tier.close()


def _gets(chunk: Sequence[tuple[int, LowerCopy]], row: ByteRow, size: int) -> list[tuple[CopyKey, ByteRow]]:
    return [(copy.key, row[index * size : (index + 1) * size]) for index, (_, copy) in enumerate(chunk)]


def _batches(
    copies: Sequence[tuple[int, int, LowerCopy]],
) -> Iterator[tuple[int, Tier, list[tuple[int, LowerCopy]]]]:
    found: dict[tuple[int, str], list[tuple[int, LowerCopy]]] = {}
    tiers: dict[str, Tier] = {}
    for group, position, copy in copies:
        tiers[copy.tier.name] = copy.tier
        found.setdefault((group, copy.tier.name), []).append((position, copy))
    for (group, name), batch in found.items():
        yield group, tiers[name], batch


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """[0, 1, 2, 5] -> [(0, 3), (5, 6)]."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs
