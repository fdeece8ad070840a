"""What keeps a block where it is: pins, transfers under way, and readers who demand full precision.

Part of the pool, under its caller's lock. Holds are counted per block, apart from references: a reference says that a
table
names the block, a hold that something touches its slot or promised its content.

Invariants (checked by `allocator.invariants`):
- HELD is set exactly while pins + transfers > 0; a held block is never FREE, evicted, moved or cooled.
- Exact holders never outnumber references, and a block with exact holders has the full form.
- A block that loses its last reference while held is IDLE (named) or FENCED (not), and FREE only after the last hold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from allocator.block_life import IdBatch
from allocator.block_references import BlockReferences
from allocator.block_state import (
    EXACT_HELD,
    FENCED,
    FREE,
    HELD,
    IDLE,
    ONE_REFERENCE,
    OPEN,
    REFERENCE_SHIFT,
    SEALED,
    STATE,
    BlockState,
)
from allocator.errors import UsageError
from allocator.extent_ledger import Ids
from allocator.extents import FULL


class BlockHolds(BlockReferences):
    """`BlockReferences` with pins, transfers and exact holders."""

    def pin(self, ids: IdBatch) -> None:
        """Blocks (open, sealed or idle) that must neither go nor move until `unpin`. Counted; -1 ignored."""
        batch = self._holdable(ids, "pin")
        for block_id in batch:
            self.pins[block_id] += 1
            self._hold(block_id)

    def unpin(self, ids: IdBatch) -> None:
        """Undoes `pin`. UsageError, with nothing changed, for a block that is not pinned that often."""
        batch = self._counted(ids, self.pins, "pinned")
        for block_id in batch:
            self.pins[block_id] -= 1
            self._unhold(block_id)

    def begin_transfer(self, ids: IdBatch) -> None:
        """Something starts to read or write the slots of these blocks (open, sealed or idle). Counted; -1 ignored.

        UsageError for a block that is cooling or moving: its slot is about to change hands (`is_changing` tells).
        """
        batch = self._holdable(ids, "transfer")
        self._refuse_changing(batch)
        for block_id in batch:
            self.transfers[block_id] += 1
            self._hold(block_id)

    def end_transfer(self, ids: IdBatch) -> None:
        """Undoes `begin_transfer`, also for a block that was released meanwhile: it becomes FREE here."""
        batch = self._counted(ids, self.transfers, "in flight")
        self._refuse_changing(batch)
        for block_id in batch:
            self.transfers[block_id] -= 1
            self._unhold(block_id)

    def hold_exact(self, ids: IdBatch) -> None:
        """Readers who demand full precision: `begin_cool` refuses the block. One holder is one of its references."""
        batch = [block_id for block_id in map(int, ids) if block_id >= 0]
        demand = {block_id: batch.count(block_id) for block_id in batch} if len(set(batch)) < len(batch) else None
        for block_id in batch:
            word = self._words[self._checked(block_id)]
            wanted = int(self.exact_holders[block_id]) + (demand[block_id] if demand else 1)
            if wanted > word >> REFERENCE_SHIFT or self._classes[block_id] & 1 != FULL:
                raise UsageError(
                    f"block {block_id}: expected a full-precision block with a reference for each exact holder, got "
                    f"{word >> REFERENCE_SHIFT} references for {wanted} holders"
                )
        for block_id in batch:
            self.exact_holders[block_id] += 1
            self._words[block_id] |= EXACT_HELD

    def drop_exact(self, ids: IdBatch) -> None:
        """Undoes `hold_exact`; to be called before the reference is released."""
        for block_id in self._counted(ids, self.exact_holders, "held as exact"):
            self.exact_holders[block_id] -= 1
            if not self.exact_holders[block_id]:
                self._words[block_id] &= ~EXACT_HELD

    def is_changing(self, block_id: int) -> bool:
        """Whether the block is about to change its slot (cooling, compaction), or is the target of such a change."""
        return block_id in self.changing or block_id in self.targets

    # -- questions ----------------------------------------------------------------------------------------------

    def in_flight(self, block_id: int) -> bool:
        """Whether a transfer (or cooling) of the block is under way."""
        return bool(self.transfers[self._checked(block_id)])

    def is_pinned(self, block_id: int) -> bool:
        """Whether the block is pinned."""
        return bool(self.pins[self._checked(block_id)])

    def is_idle(self, block_id: int) -> bool:
        """Whether the block is sealed and without references: still a hit, next to be evicted."""
        return self._words[self._checked(block_id)] & STATE == IDLE

    def idle_since(self, block_id: int) -> int:
        """When the block became idle, on the pool's own count; 0 while it is not idle."""
        if not self.is_idle(block_id):
            return 0
        return self.policies[self._classes[block_id]].since(block_id)

    def idle_ticks(self, ids: Ids) -> npt.NDArray[np.int64]:
        """`idle_since` of each, int64[n]."""
        ticks = np.zeros(len(ids), dtype=np.int64)
        places = np.flatnonzero(self._life[ids] & STATE == IDLE)
        classes = self.ledger.class_of[ids[places]]
        for index in np.unique(classes).tolist():
            own = places[classes == index]
            ticks[own] = self.policies[index].since_many(ids[own])
        return ticks

    def ref_count(self, block_id: int) -> int:
        """References to the block."""
        return self._words[self._checked(block_id)] >> REFERENCE_SHIFT

    # -- inside -------------------------------------------------------------------------------------------------

    def _holdable(self, ids: IdBatch, verb: str) -> list[int]:
        batch = [block_id for block_id in map(int, ids) if block_id >= 0]
        for block_id in batch:
            state = self._words[self._checked(block_id)] & STATE
            if state not in (OPEN, SEALED, IDLE):
                raise UsageError(
                    f"expected blocks that are open, sealed or idle to {verb}, got block {block_id} "
                    f"({BlockState(state).name})"
                )
        return batch

    def _refuse_changing(self, batch: list[int]) -> None:
        if not self.changing:
            return
        for block_id in batch:
            if block_id in self.changing or block_id in self.targets:
                raise UsageError(
                    f"block {block_id} is cooling or moving: expected no other transfer until that has ended"
                )

    def _begin_change(self, block_id: int, target: int) -> None:
        """`target`, just taken from the free list, is set aside as the place that the (held) block goes to."""
        self._words[target] = FENCED | HELD
        self.fenced_counts[self._classes[target]] += 1
        self.transfers[target] += 1
        self.changing[block_id] = target
        self.targets.add(target)

    def _check_change(self, block_id: int, target: int) -> None:
        if self.changing.get(block_id) != target:
            raise UsageError(
                f"expected a block that is cooling or moving and its target, got {block_id} and {target} "
                f"(target of {block_id}: {self.changing.get(block_id)})"
            )

    def _end_change(self, block_id: int, target: int, fence: bool = False) -> None:
        """Both are let go; the target is FREE unless it is to stay fenced."""
        del self.changing[block_id]
        self.targets.discard(target)
        for held in (block_id,) if fence else (block_id, target):
            self.transfers[held] -= 1
            self._unhold(held)

    def _may_change(self, block_id: int) -> bool:
        """Whether a change of slot that began may still be finished."""
        word = self._words[block_id]
        return not self.pins[block_id] and word & STATE != FENCED

    def _counted(self, ids: IdBatch, counts: np.ndarray[tuple[int, ...], np.dtype[np.int32]], what: str) -> list[int]:
        batch = [block_id for block_id in map(int, ids) if block_id >= 0]
        repeated = len(set(batch)) < len(batch)
        for block_id in batch:
            if counts[self._checked(block_id)] < (batch.count(block_id) if repeated else 1):
                raise UsageError(f"expected blocks that are {what}, got block {block_id} ({counts[block_id]} times)")
        return batch

    def _hold(self, block_id: int) -> None:
        word = self._words[block_id]
        if not word & HELD:
            self._words[block_id] = word | HELD
            if word & STATE == IDLE:
                self.held_idle_counts[self._classes[block_id]] += 1

    def _unhold(self, block_id: int) -> None:
        if self.pins[block_id] or self.transfers[block_id]:
            return
        word = self._words[block_id] & ~HELD
        self._words[block_id] = word
        state = word & STATE
        index = self._classes[block_id]
        if state == IDLE:
            self.held_idle_counts[index] -= 1
        elif state == FENCED:
            self.fenced_counts[index] -= 1
            self._words[block_id] = FREE
            self._push_free([block_id])

    def _take_reference(self, block_id: int) -> None:
        """`share` for one block that is known to be sealed or idle."""
        word = self._words[block_id]
        if word & STATE == IDLE:
            self._leave_idle(np.array([block_id], dtype=np.int32), busy=True)
            word += SEALED - IDLE
        self._words[block_id] = word + ONE_REFERENCE
