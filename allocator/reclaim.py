"""Where room comes from when a free list is too short, and how much there is: one order, told twice.

`available_blocks` and `make_room` must agree: what the first counts, the second can take, in this order:

1. extents without a class, except the spare one (`begin_cool` may take that too),
2. empty extents of another class,
3. idle blocks of the same class that are not held,
4. extents of another class in which every slot is free or idle and not held: their idle blocks are evicted.

Where blocks have priorities, a block above the usual one is spared in step 3 as long as step 4 finds others, and an
extent with such a block comes last in step 4.

While the spare extent is missing, one of the extents of steps 2 and 4 is left alone to become the spare again.
Internal to the pool; runs under the lock of the pool's caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allocator.errors import CapacityError, IntegrityError

if TYPE_CHECKING:
    from allocator.block_life import BlockLife


def available_blocks(life: BlockLife, class_index: int, use_spare: bool = False, enough: int | None = None) -> int:
    """Blocks that `make_room` can have ready. Stops counting early at `enough` (then a lower bound >= enough)."""
    ledger, layout = life.ledger, life.layout
    per_extent = layout.per_extent[class_index]
    spare = 0 if use_spare else layout.spare_count
    count = ledger.free[class_index].count + life.idle_counts[class_index] - life.held_idle_counts[class_index]
    count += max(0, len(ledger.unassigned) - spare) * per_extent
    if enough is not None and count >= enough:
        return count
    convertible = 0
    for other in range(layout.class_count):
        if other != class_index and _evictable(life, other) >= layout.per_extent[other] > 0:
            convertible += int(np.count_nonzero(ledger.census(other).busy == 0))
    return count + max(0, convertible - max(0, spare - len(ledger.unassigned))) * per_extent


def make_room(life: BlockLife, class_index: int, needed: int, use_spare: bool = False) -> None:
    """At least `needed` ids on the free list of the class, or CapacityError with nothing changed."""
    ledger, layout = life.ledger, life.layout
    free = ledger.free[class_index]
    if available_blocks(life, class_index, use_spare, needed) < needed:
        raise CapacityError(needed, available_blocks(life, class_index, use_spare))
    spare = 0 if use_spare else layout.spare_count
    while free.count < needed and len(ledger.unassigned) > spare:
        ledger.assign_extent(class_index)
    while free.count < needed and _take_empty(life, class_index, spare):
        pass
    if life.marks is not None and free.count < needed:
        _evict(life, class_index, needed, life.unwanted_idle_count(class_index))
        _convert_idle(life, class_index, needed, spare, spare_wanted=True)
    _evict(life, class_index, needed, life.idle_counts[class_index] - life.held_idle_counts[class_index])
    if free.count < needed:
        _convert_idle(life, class_index, needed, spare)
        if free.count < needed:
            raise IntegrityError(f"class {class_index}: {free.count} of {needed} blocks, although more was counted")


def _evict(life: BlockLife, class_index: int, needed: int, most: int) -> None:
    """Step 3: idle blocks of the class, at most so many."""
    missing = min(needed - life.ledger.free[class_index].count, most)
    if missing > 0:
        life.evict_idle(class_index, missing)


def restore_spare(life: BlockLife) -> bool:
    """Makes an empty extent of any class the spare one again, if it is missing. True when there is a spare now."""
    ledger, layout = life.ledger, life.layout
    while len(ledger.unassigned) < layout.spare_count:
        empty = next(
            (extent for index in range(layout.class_count) if (extent := ledger.empty_extent(index)) is not None), None
        )
        if empty is None:
            return False
        ledger.release_extent(empty)
    return True


def empty_out(life: BlockLife, extent: int) -> None:
    """Evicts the idle blocks of an extent whose slots are all free or idle, and takes it from its class."""
    ledger = life.ledger
    index = int(ledger.extent_class[extent])
    owners = ledger.slot_owners(extent)
    idle = owners[life.idle_mask(owners)]
    if len(idle):
        life.policies[index].forget(idle)
        life._drop_idle(index, idle.astype(np.intp))
    ledger.release_extent(extent)


def _evictable(life: BlockLife, class_index: int) -> int:
    free = life.ledger.free[class_index].count
    return free + life.idle_counts[class_index] - life.held_idle_counts[class_index]


def _take_empty(life: BlockLife, class_index: int, spare: int) -> bool:
    """Step 2: one empty extent of another class changes to this class. False when there is none to take."""
    ledger = life.ledger
    for other in range(life.layout.class_count):
        if other == class_index:
            continue
        extent = ledger.empty_extent(other)
        if extent is not None:
            ledger.release_extent(extent)
            if len(ledger.unassigned) > spare:
                ledger.assign_extent(class_index)
                life.converted_extents_count += 1
            return True
    return False


def _convert_idle(life: BlockLife, class_index: int, needed: int, spare: int, *, spare_wanted: bool = False) -> None:
    """Step 4: extents of other classes with the fewest idle blocks, the longest idle first, are emptied and taken.

    Those with blocks above the usual priority come last; `spare_wanted`: not at all.
    """
    ledger = life.ledger
    candidates: list[tuple[bool, int, int, int]] = []
    for other in range(life.layout.class_count):
        if other == class_index or not ledger.extents_in_use[other]:
            continue
        if _evictable(life, other) < life.layout.per_extent[other]:
            continue
        census = ledger.census(other)
        for place in np.flatnonzero(census.busy == 0).tolist():
            owners = ledger.slot_owners(int(census.extents[place]))
            mask = life.idle_mask(owners)
            is_wanted = bool(life.wanted_mask(owners[mask]).any())
            if is_wanted and spare_wanted:
                continue
            idle = owners[mask].tolist()
            newest = max((life.policies[other].since(block_id) for block_id in idle), default=0)
            candidates.append((is_wanted, len(idle), newest, int(census.extents[place])))
    free = ledger.free[class_index]
    for _, _, _, extent in sorted(candidates):
        if free.count >= needed:
            return
        empty_out(life, extent)
        if len(ledger.unassigned) > spare:
            ledger.assign_extent(class_index)
            life.converted_extents_count += 1
