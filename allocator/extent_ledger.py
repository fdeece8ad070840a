"""Who owns which slot: block ids, their slots, the free lists and the class of every extent.

Used by the pool and its rooms (block_life, reclaim, cooling, compaction) only, under the pool's caller's lock.

Invariants (checked by `allocator.invariants`):
- An id owns a slot from the moment its extent gets a class until the extent loses it; RETIRED ids own nothing.
- `owner[extent, place]` and `entry[id]` are inverse to each other; the slots of all ids are unique.
- A free list holds each FREE id of its class once, and nothing else.
- Ids in use + retired ids = all ids; extents with a class + unassigned extents = all extents.

Ids never move between groups. Swapping the slots of two ids (cooling, compaction) is how a block changes form or place
while every table that holds its id sees the new slot at once.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.block_state import FREE, HELD, IDLE, RETIRED, STATE
from allocator.extents import ExtentLayout

Ids: TypeAlias = npt.NDArray[np.int32]
Places: TypeAlias = npt.NDArray[np.intp]  # ids inside the pool: numpy converts an index of any other type on each use
ID_TYPE = np.dtype(np.int32)  # handed to numpy as they are, which saves it a lookup in each small call
PLACE_TYPE = np.dtype(np.intp)


class FreeList:
    """Stack of FREE ids of one class: an array, and a memoryview of it for scalars."""

    __slots__ = ("count", "ids", "view")

    def __init__(self, capacity: int) -> None:
        self.ids: Places = np.zeros(max(1, capacity), dtype=np.intp)
        self.view = self.ids.data
        self.count = 0

    def push(self, ids: Ids | Places | list[int]) -> None:
        """Puts ids on top; the last one is handed out first."""
        end = self.count + len(ids)
        self.ids[self.count : end] = ids
        self.count = end

    def take(self, count: int) -> Places:
        """The `count` topmost ids, as an array that owns its memory."""
        self.count -= count
        return self.ids[self.count : self.count + count].copy()

    def held(self) -> Places:
        """View of all ids in the list; for checks and filters, not to be kept."""
        return self.ids[: self.count]


class ExtentCensus:
    """Counts for each extent of one class: how many of its slots are free, idle and evictable, or neither."""

    __slots__ = ("busy", "extents", "free", "idle")

    def __init__(
        self, extents: npt.NDArray[np.int64], free: npt.NDArray[np.int64], idle: npt.NDArray[np.int64], slots: int
    ) -> None:
        self.extents = extents
        self.free = free
        self.idle = idle
        self.busy = slots - free - idle


class ExtentLedger:
    """Ids, slots, free lists and extent classes of one device span."""

    def __init__(self, layout: ExtentLayout) -> None:
        self.layout = layout
        self.id_capacity = layout.extent_count * max(layout.per_extent)
        # Behind the words of all ids lie as many RETIRED ones: a negative id is never mistaken for a block.
        self.life: npt.NDArray[np.int32] = np.full(2 * self.id_capacity + 1, RETIRED, dtype=np.int32)
        # One more element than ids: index -1 (a dropped table position) reads the last one.
        self.entry: npt.NDArray[np.int64] = np.full(self.id_capacity + 1, -1, dtype=np.int64)
        self.class_of: npt.NDArray[np.int16] = np.full(self.id_capacity + 1, -1, dtype=np.int16)
        self.life_view = self.life.data
        self.entry_view = self.entry.data
        self.class_view = self.class_of.data
        self.owner: Ids = np.full((layout.extent_count, max(layout.per_extent)), -1, dtype=np.int32)
        self.extent_class: npt.NDArray[np.int16] = np.full(layout.extent_count, -1, dtype=np.int16)
        self.unassigned: list[int] = list(range(layout.extent_count - 1, -1, -1))
        self.retired = FreeList(self.id_capacity)
        self.retired.push(np.arange(self.id_capacity - 1, -1, -1, dtype=np.int32))
        self.free = [FreeList(layout.slot_count(index)) for index in range(layout.class_count)]
        self.slots_in_use = [0] * layout.class_count
        self.extents_in_use = [0] * layout.class_count
        self.only_class = -1  # the class of every id that owns a slot, -1 when there are several such classes or none
        self._mark: npt.NDArray[np.bool_] = np.zeros(self.id_capacity + 1, dtype=bool)
        # Free-list pushes are counted by their callers in this list; an extent can have become empty only after one.
        self.frees = [0] * layout.class_count
        self._others = [
            tuple(other for other in range(layout.class_count) if other != index and layout.has_class(other))
            for index in range(layout.class_count)
        ]
        self._no_empty_at = [-1] * layout.class_count

    def assign_extent(self, class_index: int) -> int:
        """Gives the lowest unassigned extent to a class: new FREE ids for all its slots. Returns the extent."""
        extent = self.unassigned.pop()
        per_extent = self.layout.per_extent[class_index]
        ids = self.retired.take(per_extent)[::-1]
        places = np.arange(per_extent, dtype=np.int64)
        self.entry[ids] = (extent * per_extent + places) << 1 | (class_index & 1)
        self.class_of[ids] = class_index
        self.life[ids] = FREE
        self.owner[extent, :per_extent] = ids
        self.extent_class[extent] = class_index
        self.slots_in_use[class_index] += per_extent
        self.extents_in_use[class_index] += 1
        self._note_classes()
        self.free[class_index].push(ids)
        self.frees[class_index] += 1
        return extent

    def release_extent(self, extent: int) -> None:
        """Takes an extent of FREE slots from its class; its ids retire."""
        class_index = int(self.extent_class[extent])
        per_extent = self.layout.per_extent[class_index]
        ids = self.owner[extent, :per_extent].copy()
        free = self.free[class_index]
        self._mark[ids] = True
        rest = free.held()[~self._mark[free.held()]]
        self._mark[ids] = False
        free.count = 0
        free.push(rest)
        self.life[ids] = RETIRED
        self.entry[ids] = -1
        self.class_of[ids] = -1
        self.owner[extent] = -1
        self.extent_class[extent] = -1
        self.slots_in_use[class_index] -= per_extent
        self.extents_in_use[class_index] -= 1
        self._note_classes()
        self.retired.push(ids)
        self.unassigned.append(extent)

    def _note_classes(self) -> None:
        used = [index for index, extents in enumerate(self.extents_in_use) if extents]
        self.only_class = used[0] if len(used) == 1 else -1

    def exchange_slots(self, first: int, second: int) -> None:
        """Exchanges the slots (and with them the forms) of two ids of one group. Life words stay with the ids."""
        entry, class_of = self.entry_view, self.class_view
        first_class, second_class = class_of[first], class_of[second]
        first_entry, second_entry = entry[first], entry[second]
        self._set_owner(first_class, first_entry >> 1, second)
        self._set_owner(second_class, second_entry >> 1, first)
        entry[first], entry[second] = second_entry, first_entry
        class_of[first], class_of[second] = second_class, first_class

    def _set_owner(self, class_index: int, slot: int, block_id: int) -> None:
        extent, place = divmod(slot, self.layout.per_extent[class_index])
        self.owner[extent, place] = block_id

    def extent_of_block(self, block_id: int) -> int:
        """The extent that a block's slot lies in."""
        return (self.entry_view[block_id] >> 1) // self.layout.per_extent[self.class_view[block_id]]

    def slot_owners(self, extent: int) -> Ids:
        """Ids that own the slots of an extent, in slot order."""
        return self.owner[extent, : self.layout.per_extent[int(self.extent_class[extent])]].copy()

    def census(self, class_index: int) -> ExtentCensus:
        """Counts over the extents of one class."""
        per_extent = self.layout.per_extent[class_index]
        extents = np.flatnonzero(self.extent_class == class_index)
        words = self.life[self.owner[extents, :per_extent]]
        free = np.count_nonzero(words & STATE == FREE, axis=1)
        idle = np.count_nonzero(words & (STATE | HELD) == IDLE, axis=1)
        return ExtentCensus(extents, free, idle, per_extent)

    def may_have_empty(self, class_index: int) -> bool:
        """Whether another class than this may have an empty extent (a no is certain)."""
        for other in self._others[class_index]:
            if (
                self.free[other].count >= self.layout.per_extent[other]
                and self._no_empty_at[other] != self.frees[other]
            ):
                return True
        return False

    def empty_extent(self, class_index: int) -> int | None:
        """An extent of the class whose slots are all FREE, if there is one. Remembers a no until something is freed."""
        per_extent = self.layout.per_extent[class_index]
        if not per_extent or self.free[class_index].count < per_extent:
            return None
        if self._no_empty_at[class_index] == self.frees[class_index]:
            return None
        census = self.census(class_index)
        empty = np.flatnonzero(census.free == per_extent)
        if len(empty):
            return int(census.extents[empty[-1]])
        self._no_empty_at[class_index] = self.frees[class_index]
        return None
