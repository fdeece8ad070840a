"""Blocks out of the tiers into vLLM's pages: read, decoded where they are encoded, put in place.

`load` and `take_finished` come from vLLM's worker; the work runs on a thread of its own, a load after the other. On a
card it enqueues only: a buffer is read into anew when what was copied out of it has left, and a load that has ended
says by its fence when its pages may be read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from allocator import FULL, GroupKind, UsageError
from engine_adapter.vllm_connector.copier import DONE
from engine_adapter.vllm_connector.device_tier import DeviceTier
from engine_adapter.vllm_connector.shards import ShardCopy, keys_of
from kvstore.executor import ThreadExecutor
from kvstore.tier import ResultCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from allocator import KVGeometry
    from engine_adapter.tiers_below import TiersBelow
    from engine_adapter.vllm_connector.copier import Copier, Fence
    from engine_adapter.vllm_connector.forms import Forms
    from engine_adapter.vllm_connector.layout import PagesShape
    from engine_adapter.vllm_connector.orders import LoadOrder
    from engine_adapter.vllm_connector.shards import Heads, ShardResidency
    from kvstore.residency import HitPlan, LowerCopy
    from kvstore.tier import ByteRow, Tier, Transfer

_LOG = logging.getLogger(__name__)
_CHUNK_BLOCKS = 32
_ROUNDS = 3  # a copy that was bad in one tier is looked for in the next
_TURN_SECONDS = 0.01  # between two looks at whether a block that another engine computes is there
Place: TypeAlias = tuple[int, int]
Positioned: TypeAlias = "tuple[int, LowerCopy]"


@dataclass(slots=True)
class LoadResult:
    """failed: positions of store blocks that are not there after all. fence: of what was put into vLLM's pages last."""

    request_id: str
    loaded_tokens: int
    failed: list[int]
    fence: Fence = DONE


@dataclass(slots=True)
class _Buffer:
    """Where a tier reads to. fence: of the last copy out of it."""

    row: ByteRow
    fence: Fence = DONE


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that are read alike: of one cache group, tier and form, and of the same head ranges."""

    group: int
    tier: Tier
    form: int
    ranges: tuple[Heads, ...]


class Loader:
    """plan_of: what is to be had for an order, asked under the tiers' lock."""

    def __init__(
        self,
        geometry: KVGeometry,
        below: TiersBelow,
        residency: ShardResidency,
        forms: Forms,
        plan_of: Callable[[LoadOrder], HitPlan],
        deadline_seconds: float,
        copier: Copier,
    ) -> None:
        self._geometry = geometry
        self._below = below
        self._residency = residency
        self._forms = forms
        self._plan_of = plan_of
        self._deadline_seconds = deadline_seconds
        self._copier = copier
        self._device = next((tier for tier in below.tiers if isinstance(tier, DeviceTier)), None)
        self._buffers: dict[tuple[int, int], _Buffer] = {}
        self._scratch_row = torch.empty(0, dtype=torch.uint8)
        self._last_fence: Fence = DONE
        self._results: list[LoadResult] = []
        self._came: dict[str, dict[int, str]] = {}  # of loads under way: position -> tier
        self._executor = ThreadExecutor("kvstore-vllm-load")

    def load(self, order: LoadOrder, groups: Sequence[PagesShape]) -> None:
        """Begin to load; the end comes by `take_finished`."""
        self._copier.mark()  # vLLM may still be reading these pages for whom they were of before
        self._executor.submit(partial(self._load, order, groups, set(), time.monotonic()))

    def take_finished(self) -> list[LoadResult]:
        """What vLLM enqueues from now on finds their pages filled."""
        with self._below.lock:
            finished, self._results = self._results, []
        for result in finished:
            self._copier.hold(result.fence)
        return finished

    def close(self) -> None:
        self._executor.close()

    def _load(self, order: LoadOrder, groups: Sequence[PagesShape], loaded: set[Place], since: float) -> None:
        """loaded: by earlier turns of the same load; since: when one of them last loaded something."""
        missing = {(-1, order.start)}
        count = len(loaded)
        try:
            missing = self._load_blocks(order, groups, loaded, time.monotonic() + self._deadline_seconds)
        except Exception:  # counted: the blocks are computed instead
            _LOG.exception("kvstore: a load for vLLM failed")
        else:
            since = time.monotonic() if len(loaded) > count else since
            if missing and time.monotonic() - since < order.wait_seconds:
                time.sleep(0.0 if len(loaded) > count else _TURN_SECONDS)
                with suppress(UsageError):  # it closes meanwhile
                    self._executor.submit(partial(self._load, order, groups, loaded, since))  # behind the others
                    return
        failed = sorted({position for _, position in missing})
        tokens = (len(order.hashes) - order.start) * self._geometry.block_tokens
        came = self._came.pop(order.request_id, {})
        with self._below.lock:
            self._below.count("loads_failed" if failed else "loads")
            self._below.count("loaded_tokens", 0 if failed else tokens)
            self._results.append(LoadResult(order.request_id, tokens, failed, self._last_fence))
        if not failed:
            self._note_reuse(order, came)

    def _note_reuse(self, order: LoadOrder, came: Mapping[int, str]) -> None:
        """For tiers that say what use they are: the blocks need not be computed. One rank tells for all."""
        own = self._residency.shards[0]
        if own.heads[0] or not own.is_stored:
            return
        if came:
            by_tier, first = Counter(came.values()), min(came)
            by_tier[came[first]] += first - order.start  # that nothing reads those before is owed to what is read
            self._residency.note_reuse(order.root, order.hashes[0], by_tier)

    def _load_blocks(
        self, order: LoadOrder, groups: Sequence[PagesShape], loaded: set[Place], until: float
    ) -> set[Place]:
        """Bring (group, position) of the hit to their pages, noted in `loaded`; those that could not be brought."""
        missing: set[Place] = set()
        for _ in range(_ROUNDS):
            with self._below.lock:
                plan = self._plan_of(order)
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
                and not (copy.lossy and order.must_be_exact(position))
                and not self._below.is_stuck(copy.tier)
            ]
            for batch, positioned in self._batches(copies):
                loaded |= self._load_batch(order, groups[batch.group], batch, positioned, until)
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

    def _batches(self, copies: Sequence[tuple[int, int, LowerCopy]]) -> Iterator[tuple[_Batch, list[Positioned]]]:
        found: dict[tuple[int, str, int, tuple[Heads, ...]], list[Positioned]] = {}
        tiers: dict[str, Tier] = {}
        for group, position, copy in copies:
            ranges = copy.ranges if isinstance(copy, ShardCopy) else (copy.key.heads,)
            tiers[copy.tier.name] = copy.tier
            found.setdefault((group, copy.tier.name, copy.form, ranges), []).append((position, copy))
        # The device's first: what is promoted meanwhile takes the place of copies there.
        for (group, name, form, ranges), positioned in sorted(
            found.items(), key=lambda one: tiers[one[0][1]] is not self._device
        ):
            yield _Batch(group, tiers[name], form, ranges), positioned

    def _load_batch(
        self, order: LoadOrder, pages: PagesShape, batch: _Batch, copies: Sequence[Positioned], until: float
    ) -> set[Place]:
        """Chunk by chunk, the next one read while the last one is put in place.

        A tier that has not ended a chunk by `until` keeps that buffer, and nothing of it reaches vLLM's pages.
        """
        loaded: set[Place] = set()
        chunks = [copies[at : at + _CHUNK_BLOCKS] for at in range(0, len(copies), _CHUNK_BLOCKS)]
        if batch.tier is self._device:
            for chunk in chunks:
                loaded |= self._decode_chunk(order, pages, batch, self._device, chunk)
            return loaded
        under_way: deque[tuple[Transfer, Sequence[Positioned], _Buffer]] = deque()
        try:
            for index in range(len(chunks) + 1):
                if index < len(chunks):
                    buffer = self._buffer(index % 2, _CHUNK_BLOCKS * sum(self._part_bytes(batch)))
                    items = _gets(chunks[index], buffer.row, self._part_bytes(batch))
                    transfer = self._below.begin(partial(batch.tier.submit_get, items))
                    under_way.append((transfer, chunks[index], buffer))
                if index:
                    loaded |= self._end_chunk(order, pages, batch, *under_way.popleft(), until)
        finally:
            for transfer, _, buffer in under_way:  # after an error: nobody takes these bytes
                self._wait_or_leave(transfer, buffer, 0.0)
        return loaded

    def _wait_or_leave(self, transfer: Transfer, buffer: _Buffer, until: float) -> Sequence[ResultCode] | None:
        """Results, or None: then the tier may still write into the buffer, which is nobody else's any more."""
        results = self._below.wait_or_leave(transfer, until)
        if results is None:
            self._buffers = {key: one for key, one in self._buffers.items() if one is not buffer}
        return results

    def _end_chunk(
        self,
        order: LoadOrder,
        pages: PagesShape,
        batch: _Batch,
        transfer: Transfer,
        chunk: Sequence[Positioned],
        buffer: _Buffer,
        until: float,
    ) -> set[Place]:
        results = self._wait_or_leave(transfer, buffer, until)
        count = len(chunk)
        if results is None:
            self._below.count("blocks_left_to_a_stuck_tier", count)
            return set()
        good = [at for at in range(count) if all(one is ResultCode.OK for one in results[at::count])]
        self._place(order, pages, batch, buffer, [position for position, _ in chunk], good)
        self._promote(order, batch, buffer.row, [(at, *chunk[at]) for at in good], until)
        self._below.count(f"loaded_blocks_{batch.tier.name}", len(good))
        self._came.setdefault(order.request_id, {}).update((chunk[at][0], batch.tier.name) for at in good)
        return {(batch.group, chunk[at][0]) for at in good}

    def _decode_chunk(
        self, order: LoadOrder, pages: PagesShape, batch: _Batch, tier: DeviceTier, chunk: Sequence[Positioned]
    ) -> set[Place]:
        """Out of the memory beside vLLM's own, without leaving the device."""
        size = pages.block_bytes
        with tier.reading([copy.key for _, copy in chunk]) as places:
            found = {position: place for (position, _), place in zip(chunk, places, strict=True) if place is not None}
            if found:
                raw = self._scratch(_CHUNK_BLOCKS * size)[: len(found) * size]
                with self._copier.aside():
                    self._forms.read_places(batch.group, batch.form, tier.memory, list(found.values()), raw)
                self._last_fence = self._copier.scatter(raw, pages, [(order.tables, position) for position in found])
        self._below.count(f"loaded_blocks_{tier.name}", len(found))
        self._came.setdefault(order.request_id, {}).update((position, tier.name) for position in found)
        return {(batch.group, position) for position in found}

    def _place(
        self, order: LoadOrder, pages: PagesShape, batch: _Batch, buffer: _Buffer, positions: list[int], good: list[int]
    ) -> None:
        """The good ones of the copies in `buffer` to their pages."""
        if not good:
            return
        source: ByteRow | torch.Tensor = buffer.row
        size, count = pages.block_bytes, len(positions)
        if batch.form != FULL or batch.ranges != (self._forms.own[batch.group],):
            source = raw = self._scratch(_CHUNK_BLOCKS * size)
            with self._copier.aside():
                payloads = self._copier.upload(buffer.row[: count * sum(self._part_bytes(batch))])
                self._forms.assemble(batch.group, batch.form, batch.ranges, payloads, count, raw)
        for start, stop in _runs(good):
            places = [(order.tables, positions[at]) for at in range(start, stop)]
            buffer.fence = self._last_fence = self._copier.scatter(source[start * size : stop * size], pages, places)

    def _promote(
        self, order: LoadOrder, batch: _Batch, row: ByteRow, good: Sequence[tuple[int, int, LowerCopy]], until: float
    ) -> None:
        """Copies that came from below to the tier on vLLM's device, where there is one; they are not encoded again."""
        if self._device is None or not good or batch.ranges != (self._forms.own[batch.group],):
            return
        (size,) = self._part_bytes(batch)
        items = [
            (copy.key, [row[at * size : (at + 1) * size]], order.hashes[position - 1] if position else None)
            for at, position, copy in good
        ]
        self._below.wait(self._below.begin(partial(self._device.submit_put, items)), until)

    def _part_bytes(self, batch: _Batch) -> list[int]:
        return [self._forms.payload_bytes(batch.group, batch.form, heads) for heads in batch.ranges]

    def _buffer(self, number: int, size_bytes: int) -> _Buffer:
        """One of two of a size, when what was last copied out of it has left."""
        key = (number, size_bytes)
        if key not in self._buffers:
            self._buffers[key] = _Buffer(self._copier.row(size_bytes))
        self._buffers[key].fence.wait()
        return self._buffers[key]

    def _scratch(self, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes] on the device, for what is decoded: used again at once, in the order of the copies."""
        if self._scratch_row.nbytes < size_bytes:
            with self._copier.aside():  # so that torch gives it memory that no other stream still uses
                self._scratch_row = torch.empty(size_bytes, dtype=torch.uint8, device=self._copier.device)
        return self._scratch_row[:size_bytes]


def _gets(chunk: Sequence[Positioned], row: ByteRow, part_bytes: Sequence[int]) -> list[tuple[object, ByteRow]]:
    """Of the first head range all copies one behind the other, then of the next."""
    items: list[tuple[object, ByteRow]] = []
    keys = [keys_of(copy) for _, copy in chunk]
    at = 0
    for part, size in enumerate(part_bytes):
        for one in keys:
            items.append((one[part], row[at : at + size]))
            at += size
    return items


def _runs(places: Sequence[int]) -> list[tuple[int, int]]:
    """[0, 1, 2, 5] -> [(0, 3), (5, 6)]."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and runs[-1][1] == place:
            runs[-1] = (runs[-1][0], place + 1)
        else:
            runs.append((place, place + 1))
    return runs
