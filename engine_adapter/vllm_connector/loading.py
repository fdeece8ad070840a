"""Blocks out of the tiers into vLLM's pages: read, decoded where they are encoded, put in place.

`load` and `take_finished` come from vLLM's worker; the work runs on a thread of its own, a load after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from allocator import FULL, GroupKind, UsageError
from engine_adapter.vllm_connector.shards import ShardCopy, keys_of
from kvstore.executor import ThreadExecutor
from kvstore.tier import ResultCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from allocator import KVGeometry
    from engine_adapter.tiers_below import TiersBelow
    from engine_adapter.vllm_connector.forms import Forms
    from engine_adapter.vllm_connector.layout import GroupPages
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
    """failed: positions of store blocks that are not there after all."""

    request_id: str
    loaded_tokens: int
    failed: list[int]


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
    ) -> None:
        self._geometry = geometry
        self._below = below
        self._residency = residency
        self._forms = forms
        self._plan_of = plan_of
        self._deadline_seconds = deadline_seconds
        self._rows: dict[tuple[int, int], ByteRow] = {}
        self._results: list[LoadResult] = []
        self._executor = ThreadExecutor("kvstore-vllm-load")

    def load(self, order: LoadOrder, groups: Sequence[GroupPages]) -> None:
        """Begin to load; the end comes by `take_finished`."""
        self._executor.submit(partial(self._load, order, groups, set(), time.monotonic()))

    def take_finished(self) -> list[LoadResult]:
        with self._below.lock:
            finished, self._results = self._results, []
            return finished

    def close(self) -> None:
        self._executor.close()

    def _load(self, order: LoadOrder, groups: Sequence[GroupPages], loaded: set[Place], since: float) -> None:
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
        with self._below.lock:
            self._below.count("loads_failed" if failed else "loads")
            self._below.count("loaded_tokens", 0 if failed else tokens)
            self._results.append(LoadResult(order.request_id, tokens, failed))

    def _load_blocks(
        self, order: LoadOrder, groups: Sequence[GroupPages], loaded: set[Place], until: float
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
        for (group, name, form, ranges), positioned in found.items():
            yield _Batch(group, tiers[name], form, ranges), positioned

    def _load_batch(
        self, order: LoadOrder, pages: GroupPages, batch: _Batch, copies: Sequence[Positioned], until: float
    ) -> set[tuple[int, int]]:
        """Chunk by chunk, the next one read while the last one is put in place.

        A tier that has not ended a chunk by `until` keeps that buffer, and nothing of it reaches vLLM's pages.
        """
        loaded: set[tuple[int, int]] = set()
        chunks = [copies[at : at + _CHUNK_BLOCKS] for at in range(0, len(copies), _CHUNK_BLOCKS)]
        under_way: list[tuple[Transfer, Sequence[Positioned], ByteRow]] = []
        for index in range(len(chunks) + 1):
            if index < len(chunks):
                row = self._row(index % 2, _CHUNK_BLOCKS * sum(self._part_bytes(batch)))
                items = _gets(chunks[index], row, self._part_bytes(batch))
                transfer = self._below.begin(partial(batch.tier.submit_get, items))
                under_way.append((transfer, chunks[index], row))
            if index:
                transfer, chunk, row = under_way.pop(0)
                results = self._below.wait_or_leave(transfer, until, lambda _: None)
                if results is None:
                    self._below.count("blocks_left_to_a_stuck_tier", len(chunk))
                    self._rows = {key: one for key, one in self._rows.items() if one is not row}
                    continue
                count = len(chunk)
                good = [at for at in range(count) if all(one is ResultCode.OK for one in results[at::count])]
                self._place(order, pages, batch, row, [chunk[at][0] for at in range(count)], good)
                loaded |= {(batch.group, chunk[at][0]) for at in good}
                self._below.count(f"loaded_blocks_{batch.tier.name}", len(good))
        return loaded

    def _place(
        self, order: LoadOrder, pages: GroupPages, batch: _Batch, row: ByteRow, positions: list[int], good: list[int]
    ) -> None:
        """The good ones of the copies in `row` to their pages."""
        if not good:
            return
        raw, size = row, pages.block_bytes
        if batch.form != FULL or batch.ranges != (self._forms.own[batch.group],):
            raw = self._row(2, _CHUNK_BLOCKS * size)
            self._forms.assemble(batch.group, batch.form, batch.ranges, row, len(positions), raw)
        for start, stop in _runs(good):
            places = [(order.tables, positions[at]) for at in range(start, stop)]
            pages.scatter(raw[start * size : stop * size], places)

    def _part_bytes(self, batch: _Batch) -> list[int]:
        return [self._forms.payload_bytes(batch.group, batch.form, heads) for heads in batch.ranges]

    def _row(self, number: int, size_bytes: int) -> ByteRow:
        """One of three buffers of a size: two to read into, one to decode into."""
        key = (number, size_bytes)
        if key not in self._rows:
            self._rows[key] = np.empty(size_bytes, np.uint8)
        return self._rows[key]


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
