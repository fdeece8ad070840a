"""Scattered slots are moved together, so that a class that starves gets a whole extent from one that has room.

    plan_compaction(group, form)   moves that empty one extent of another class; sources and targets are in flight
    apply_move(move)               the caller has copied the bytes: the block owns the target slot
    cancel_move(move)              it has not: nothing happened

Part of the pool, under its caller's lock; copying runs outside the lock. Tables hold ids, so they need no repair.

Invariants (checked by `allocator.invariants`): a moving block is in flight, its target is FENCED; a move never crosses
classes; when the last move of a plan is applied, the extent has no class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from allocator.block_state import FREE, HELD, STATE
from allocator.cooling import Cooling
from allocator.extents import FULL
from allocator.reclaim import empty_out


class Move(NamedTuple):
    """One block copied from `source_slot` to `target_slot` of the same class."""

    block_id: int
    target_id: int
    source_slot: int
    target_slot: int
    class_index: int


class Compaction(Cooling):
    """`Cooling` with moves inside a class."""

    def plan_compaction(self, group: int, form: int = FULL) -> list[Move]:
        """Moves that empty one extent of a class other than (group, form); empty list when none can be emptied.

        Chosen is the extent with the fewest live blocks that has none held and whose live blocks fit into the free
        slots
        of other extents of its class. Its idle blocks are not moved: they go when the extent changes class.
        """
        wanted = self._class_index(group, form)
        best: tuple[bool, int, int, int] | None = None
        for index in range(self.layout.class_count):
            per_extent = self.layout.per_extent[index]
            if index == wanted or not per_extent or self.ledger.extents_in_use[index] < 2:
                continue
            census = self.ledger.census(index)
            room = self._free[index].count - census.free
            for place in np.flatnonzero((census.busy > 0) & (census.busy <= room)).tolist():
                extent = int(census.extents[place])
                owners = self.ledger.slot_owners(extent)
                if bool((self._life[owners] & HELD).any()):
                    continue
                is_wanted = bool(self.wanted_mask(owners[self.idle_mask(owners)]).any())
                candidate = (is_wanted, int(census.busy[place]), int(census.idle[place]), extent)
                best = candidate if best is None else min(best, candidate)
        return [] if best is None else self._plan_moves(best[3])

    def _plan_moves(self, extent: int) -> list[Move]:
        index = int(self.ledger.extent_class[extent])
        per_extent = self.layout.per_extent[index]
        owners = self.ledger.slot_owners(extent)
        words = self._life[owners]
        live = owners[(words & STATE != FREE) & ~self.idle_mask(owners)].tolist()
        free = self._free[index]
        held = free.held()
        outside = np.flatnonzero((self.ledger.entry[held] >> 1) // per_extent != extent)
        chosen = outside[-len(live) :]
        targets = held[chosen].tolist()
        rest = np.delete(held, chosen)
        free.count = 0
        free.push(rest)
        moves = []
        for block_id, target in zip(live, targets, strict=True):
            self.transfers[block_id] += 1
            self._hold(block_id)
            self._begin_change(block_id, target)
            entry = self.ledger.entry_view
            moves.append(Move(block_id, target, entry[block_id] >> 1, entry[target] >> 1, index))
        return moves

    def apply_move(self, move: Move) -> bool:
        """The bytes are in the target slot: the ids swap slots. Gives the extent away with the last move of its plan.

        False (and cancelled) when the block was pinned meanwhile or nobody refers to it any more.
        """
        self._check_change(move.block_id, move.target_id)
        if not self._may_change(move.block_id):
            self._end_change(move.block_id, move.target_id)
            return False
        self.ledger.exchange_slots(move.block_id, move.target_id)
        self._end_change(move.block_id, move.target_id)
        extent = move.source_slot // self.layout.per_extent[move.class_index]
        owners = self.ledger.slot_owners(extent)
        free = self._life[owners] & STATE == FREE
        if bool((free | self.idle_mask(owners)).all()):
            empty_out(self, extent)
        return True

    def cancel_move(self, move: Move) -> None:
        """The block stays in its slot; the target is FREE again."""
        self._check_change(move.block_id, move.target_id)
        self._end_change(move.block_id, move.target_id)
