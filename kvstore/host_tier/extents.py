"""Where the host tier's slots lie: extents that each hold slots of one size and change size when they are empty.

Pure bookkeeping, no bytes. Used by HostIndex only, under the host tier's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from allocator.block_marks import PRIORITY_DEFAULT

if TYPE_CHECKING:
    from kvstore.host_tier.index import HostEntry

ALIGN_BYTES = 64
_FEWEST_EXTENTS = 16  # wanted: fewer make changes of size coarse
_MOST_EXTENTS = 256  # each eviction looks at them all
_TRIED_SIZES = 64


def aligned(size_bytes: int) -> int:
    """Slot bytes for a copy of this size."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES or ALIGN_BYTES


class Extent:
    """A stretch of the arena that holds slots of one size (or, with its neighbours, one large slot)."""

    __slots__ = ("entries", "free_offsets", "index", "newest_rank", "slot_bytes")

    def __init__(self, index: int) -> None:
        self.index = index
        self.slot_bytes = 0  # 0: unassigned
        self.free_offsets: list[int] = []
        self.entries: set[HostEntry] = set()
        self.newest_rank = 0

    @property
    def may_be_emptied(self) -> bool:
        return all(entry.is_linked and not entry.is_fenced for entry in self.entries)

    def look_again(self) -> None:
        """What is highest here may be lower, or gone."""
        self.newest_rank = max((entry.rank for entry in self.entries), default=0)


class HostExtents:
    """The arena's extents. Their size is chosen from the slot sizes expected, or from the first one seen."""

    def __init__(self, capacity_bytes: int, slot_bytes: Sequence[int]) -> None:
        self.capacity_bytes = capacity_bytes
        self.extent_bytes = 0
        self.extents: list[Extent] = []
        self._open: dict[int, dict[int, Extent]] = {}  # slot size -> its extents with free slots
        self._unassigned: list[Extent] = []
        self._assigned: dict[int, dict[int, Extent]] = {}  # slot size -> its extents
        if slot_bytes:
            self._cut(slot_bytes)

    def fits(self, slot_bytes: int) -> bool:
        """Could a slot of this size ever be had?"""
        if not self.extents:
            self._cut([slot_bytes])
        return slot_bytes <= len(self.extents) * self.extent_bytes

    def take(self, slot_bytes: int) -> tuple[int, list[Extent]] | None:
        """A free slot of this size: its offset and extents. None: something has to go first."""
        count = -(-slot_bytes // self.extent_bytes)
        if count > 1:
            run = self._free_run(count)
            return None if run is None else (run[0].index * self.extent_bytes, self._assign(run, slot_bytes))
        extents = self._open.get(slot_bytes)
        if not extents:
            if not self._unassigned:
                return None
            extent = self._unassigned[-1]
            self._assign([extent], slot_bytes)
            start, slots = extent.index * self.extent_bytes, self.extent_bytes // slot_bytes
            extent.free_offsets = [start + i * slot_bytes for i in reversed(range(slots))]
            extents = self._open.setdefault(slot_bytes, {})
            extents[extent.index] = extent
        extent = next(iter(extents.values()))
        offset = extent.free_offsets.pop()
        if not extent.free_offsets:
            del extents[extent.index]
        return offset, [extent]

    def give_back(self, entry: HostEntry) -> None:
        """The slot of an entry that is in its extents' sets."""
        for extent in entry.extents:
            extent.entries.remove(entry)
            if extent.entries:
                if entry.priority > PRIORITY_DEFAULT:
                    extent.look_again()
                extent.free_offsets.append(entry.offset)
                self._open.setdefault(extent.slot_bytes, {})[extent.index] = extent
            else:
                self._open.get(extent.slot_bytes, {}).pop(extent.index, None)
                del self._assigned[extent.slot_bytes][extent.index]
                if not self._assigned[extent.slot_bytes]:
                    del self._assigned[extent.slot_bytes]
                extent.slot_bytes, extent.free_offsets, extent.newest_rank = 0, [], 0
                self._unassigned.append(extent)

    def look_again(self, entry: HostEntry) -> None:
        """A copy is worth less than it was."""
        for extent in entry.extents:
            extent.look_again()

    def coldest_run(self, slot_bytes: int, before_rank: int | None) -> list[Extent] | None:
        """Neighbouring extents to empty for a slot of this size: nothing fenced in them, of the lowest rank.

        Extents of just this size are left out, unless the slot needs several. before_rank: only if lower than that.
        """
        count = -(-slot_bytes // self.extent_bytes)
        best: list[Extent] | None = None
        best_rank = before_rank
        if count == 1:
            for size, extents in self._assigned.items():
                if size == slot_bytes:
                    continue
                for extent in extents.values():
                    if (best_rank is None or extent.newest_rank < best_rank) and extent.may_be_emptied:
                        best, best_rank = [extent], extent.newest_rank
            return best
        for first in range(len(self.extents) - count + 1):
            run = self.extents[first : first + count]
            newest = max(extent.newest_rank for extent in run)
            if best_rank is not None and newest >= best_rank:
                continue
            if all(extent.may_be_emptied for extent in run):
                best, best_rank = run, newest
        return best

    def broken_rules(self) -> list[str]:
        """Names of the rules that do not hold."""
        held = {entry for extent in self.extents for entry in extent.entries}
        spans = sorted((entry.offset, entry.offset + entry.slot_bytes) for entry in held)
        taken = {entry.offset for entry in held}
        rules = (
            ("slots do not overlap", all(one[1] <= two[0] for one, two in pairwise(spans))),
            ("slots lie in the arena", not spans or spans[-1][1] <= self.capacity_bytes),
            (
                "assigned extents are known by size",
                {(size, index) for size, extents in self._assigned.items() for index in extents}
                == {(e.slot_bytes, e.index) for e in self.extents if e.slot_bytes},
            ),
            ("a free slot is free once", all(len(set(e.free_offsets)) == len(e.free_offsets) for e in self.extents)),
            ("a free slot is not taken", not any(taken.intersection(e.free_offsets) for e in self.extents)),
            (
                "extents with free slots are open",
                all(bool(e.free_offsets) == (e.index in self._open.get(e.slot_bytes, {})) for e in self.extents),
            ),
            (
                "empty extents are unassigned",
                {e.index for e in self.extents if not e.entries} == {e.index for e in self._unassigned}
                and len(self._unassigned) == len({e.index for e in self._unassigned}),
            ),
        )
        return [name for name, holds in rules if not holds]

    def _assign(self, run: list[Extent], slot_bytes: int) -> list[Extent]:
        for extent in run:
            extent.slot_bytes = slot_bytes
            self._assigned.setdefault(slot_bytes, {})[extent.index] = extent
            self._unassigned.remove(extent)
        return run

    def _free_run(self, count: int) -> list[Extent] | None:
        for first in range(len(self.extents) - count + 1):
            run = self.extents[first : first + count]
            if all(extent.slot_bytes == 0 for extent in run):
                return run
        return None

    def _cut(self, slot_bytes: Sequence[int]) -> None:
        """A multiple of the largest slot that wastes little for every size and leaves enough extents."""
        sizes = sorted({aligned(size) for size in slot_bytes})
        best_score, best_bytes = float("inf"), 0
        least = max(1, -(-self.capacity_bytes // (sizes[-1] * _MOST_EXTENTS)))
        for slots in range(least, least + _TRIED_SIZES):
            extent_bytes = sizes[-1] * slots
            count = self.capacity_bytes // extent_bytes
            if count == 0:
                break
            remainder = max(extent_bytes % size / extent_bytes for size in sizes)
            tail = 1 - count * extent_bytes / self.capacity_bytes
            few = 0.0 if count >= _FEWEST_EXTENTS or slots == least else 1.0 / count
            if remainder + tail + few < best_score - 1e-9:
                best_score, best_bytes = remainder + tail + few, extent_bytes
        if not best_bytes:  # the largest slot does not fit at all: cut for the others
            fitting = [size for size in sizes if size <= self.capacity_bytes]
            best_bytes = fitting[-1] if fitting else max(ALIGN_BYTES, self.capacity_bytes // ALIGN_BYTES * ALIGN_BYTES)
        self.extent_bytes = best_bytes
        self.extents = [Extent(index) for index in range(self.capacity_bytes // best_bytes)]
        self._unassigned = self.extents[::-1]
