"""A full-precision block becomes an INT4 block in place of itself: same id, another slot.

    begin_cool(block)            an INT4 slot is set aside; both are in flight; the caller encodes full slot -> INT4
    slot
    finish_cool(block, target)   the two ids swap slots: every table that holds the block now reads INT4; the full slot
                                 belongs to the target id, which becomes FREE
    cancel_cool(block, target)   nothing happened

Part of the pool, under its caller's lock; the encoding itself runs outside the lock between the two calls.

Invariants (checked by `allocator.invariants`):
- A cooling block has the full form, no exact holder at the start, and exactly the one transfer that cooling is.
- After finish, exact readers cannot find the block: its index entry is in the lossy map, whatever it was computed from.
"""

from __future__ import annotations

import numpy as np

from allocator.block_holds import BlockHolds
from allocator.block_state import EXACT_HELD, HELD, IDLE, SEALED, STATE, UNINDEXED
from allocator.errors import CapacityError
from allocator.extents import COLD, FULL
from allocator.reclaim import make_room, restore_spare


class Cooling(BlockHolds):
    """`BlockHolds` with the change of form."""

    def begin_cool(self, block_id: int) -> int | None:
        """The id whose INT4 slot receives the block (`entries` tells the slot), or None when it cannot cool now.

        Cannot: not sealed or idle, INT4 already, pinned, in flight, demanded exact, or no INT4 slot to be had, where
        idle INT4 blocks may be evicted and the spare extent may be used.
        """
        word = self._words[self._checked(block_id)]
        index = self._classes[block_id]
        if word & STATE not in (SEALED, IDLE) or word & (HELD | EXACT_HELD) or index & 1 != FULL:
            return None
        cold = index | COLD
        if not self.layout.has_class(cold):
            return None
        self.transfers[block_id] += 1
        self._hold(block_id)  # before making room, so that the block is not a victim itself
        free = self._free[cold]
        if not free.count:
            try:
                make_room(self, cold, 1, use_spare=True)
            except CapacityError:
                self.transfers[block_id] -= 1
                self._unhold(block_id)
                return None
        free.count -= 1
        target: int = free.view[free.count]
        self._begin_change(block_id, target)
        return target

    def finish_cool(self, block_id: int, target: int, fence: bool = False) -> bool:
        """The INT4 slot holds the encoded block: swap. False (and cancelled) when the block may not change any more.

        That is: it was pinned or demanded exact meanwhile, or lost its last reference without a name.
        `fence`: a step that runs may still read the full slot; the target stays in flight until
        `end_transfer([target])`.
        """
        self._check_change(block_id, target)
        word = self._words[block_id]
        if not self._may_change(block_id) or word & EXACT_HELD:
            self._end_change(block_id, target)
            return False
        full = self._classes[block_id]
        cold = full | COLD
        idle = word & STATE == IDLE
        since = self.policies[full].since(block_id) if idle else 0
        if idle:
            self._leave_idle(np.array([block_id], dtype=np.int32), busy=False)
        self.ledger.exchange_slots(block_id, target)
        self.fenced_counts[cold] -= 1
        self.fenced_counts[full] += 1
        named = self._rename_lossy(block_id)
        if idle and named:
            self.idle_counts[cold] += 1
            self.held_idle_counts[cold] += 1
            self.policies[cold].idle([block_id], since)
        elif idle:
            self._to_free(block_id)
        self._end_change(block_id, target, fence)
        if not fence:
            restore_spare(self)
        return True

    def cancel_cool(self, block_id: int, target: int) -> None:
        """The block stays as it is; the INT4 slot is FREE again."""
        self._check_change(block_id, target)
        self._end_change(block_id, target)

    def _rename_lossy(self, block_id: int) -> bool:
        """Moves the name of a block that has just become INT4 to the lossy map. False when another block keeps it.

        An INT4 copy of an exactly computed block is better than what was computed after lossy reads, and replaces it.
        """
        word = self._words[block_id]
        if word & UNINDEXED:
            return False
        if not self.computed[block_id]:
            return True  # was lossy before: its entry stays
        index = self.indexes[self._classes[block_id] >> 1]
        block_hash = self.hashes[block_id]
        index.remove(block_hash, exact=True)
        other = index.find_lossy(block_hash)
        if other is not None:
            if self.computed[other]:
                self._words[block_id] = word | UNINDEXED
                return False
            self._unindex(other)
        index.insert(block_hash, block_id, exact=False)
        return True

    def _unindex(self, block_id: int) -> None:
        """A block loses its name to a better one: no hit any more; FREE when nobody refers to it."""
        word = self._words[block_id]
        index = self.indexes[self._classes[block_id] >> 1]
        index.remove(self.hashes[block_id], exact=False)
        if word & STATE == IDLE:
            self._leave_idle(np.array([block_id], dtype=np.int32), busy=False)
            self._to_free(block_id)
        else:
            self._words[block_id] = word | UNINDEXED
