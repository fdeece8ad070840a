"""References: allocate, share, release, touch. The calls that every admission, decode step and finish make.

Part of the pool, under its caller's lock. Batches up to `SMALL_BATCH` ids run in plain Python over memoryviews, larger
ones in numpy over the same memory; the commonest small ones in C (allocator.pool_core) where that was built. All forms
of a call do the same, which tests compare.

Invariants (checked by `allocator.invariants`):
- Only FREE blocks are handed out, each to one owner.
- The sum of the references that tables hold is each block's count.
- A call that raises UsageError or CapacityError has changed nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from allocator.block_life import SMALL_BATCH, BlockLife, IdBatch
from allocator.block_state import (
    EXACT_HELD,
    FREE,
    HELD,
    IDLE,
    ONE_REFERENCE,
    OPEN,
    OPEN_ONCE,
    REFERENCE_SHIFT,
    SEALED,
    SEALED_ONCE,
    STATE,
    UNINDEXED,
    BlockState,
)
from allocator.errors import UsageError
from allocator.extent_ledger import ID_TYPE, Ids
from allocator.extents import FULL
from allocator.pool_core import core
from allocator.reclaim import available_blocks, make_room


class BlockReferences(BlockLife):
    """`BlockLife` with references."""

    _core: Any = core  # None: plain Python and numpy

    # -- room ---------------------------------------------------------------------------------------------------

    def available(self, group: int, form: int = FULL) -> int:
        """Blocks that `allocate` could hand out now: free, evictable, and of extents that can change class."""
        return available_blocks(self, self._class_index(group, form))

    def allocate_one(self, group: int, form: int = FULL) -> int:
        """`allocate(group, 1, form)` as a plain int."""
        index = 2 * group + form
        if not 0 <= index < len(self._free) or form >> 1:
            self._class_index(group, form)
        free = self._free[index]
        if not free.count:
            if self._eviction_is_next(index):
                block_id = self._reuse_idle(index)
                if block_id >= 0:
                    self._words[block_id] = OPEN_ONCE
                    return block_id
            make_room(self, index, 1)
        free.count = top = free.count - 1
        block_id = free.view[top]
        self._words[block_id] = OPEN_ONCE
        return block_id

    def allocate(self, group: int, count: int, form: int = FULL) -> Ids:
        """`count` OPEN blocks with one reference each, int32[count]; all or nothing.

        Takes free slots first, then extents without a class (one stays in reserve for cooling), then empty extents of
        another class, then evicts idle blocks of this class, then empties extents of another class that hold only idle
        blocks. CapacityError(needed, available) when all that is not enough; then nothing was evicted either.
        """
        index = 2 * group + form
        if not 0 <= index < len(self._free) or form >> 1 or count < 0:
            self._class_index(group, form)
            raise UsageError(f"expected a block count >= 0, got {count}")
        free = self._free[index]
        start = free.count - count
        if start < 0:
            if count <= SMALL_BATCH and self._eviction_is_next(index):
                evictable = self.idle_counts[index] - self.held_idle_counts[index]
                if -start <= evictable:
                    return self._allocate_evicting(index, count)
            make_room(self, index, count)
            start = free.count - count
        if self._core is not None:
            ids = np.empty(count, ID_TYPE)
            self._core.take(self._words, free.view, start, count, ids)
            free.count = start
            return ids
        free.count = start
        places = free.ids[start : start + count]
        self._life[places] = OPEN_ONCE
        return places.astype(ID_TYPE)

    def _allocate_evicting(self, index: int, count: int) -> Ids:
        """A small batch from what is free and, for the rest, idle blocks of the class, without a detour."""
        free, words = self._free[index], self._words
        need = count - free.count
        if self.held_idle_counts[index] or self.on_evict is not None or self._has_two_maps(index):
            ids = self._evict_few(index, need)
            for block_id in ids:
                words[block_id] = OPEN_ONCE
        else:  # `_evict_few` for the common case, one pass over the victims
            victims = self.policies[index].victims(need)
            ids = victims if isinstance(victims, list) else victims.tolist()
            if self._core is not None and len(ids) == need:
                return self._hand_out(index, count, ids)
            names, hashes = self._exact_names[index], self.hashes
            for block_id in ids:
                del names[hashes[block_id]]
                words[block_id] = OPEN_ONCE
            self.idle_counts[index] -= len(ids)
            self.evicted_count += len(ids)
        if free.count:
            taken = free.view[: free.count].tolist()
            free.count = 0
            for block_id in taken:
                words[block_id] = OPEN_ONCE
            ids = taken + ids
        if len(ids) > count:  # the last of them was part of a run
            surplus = ids[count:]
            del ids[count:]
            for block_id in surplus:
                words[block_id] = FREE
            self._push_free(surplus)
        return np.array(ids, ID_TYPE)

    def _hand_out(self, index: int, count: int, victims: list[int]) -> Ids:
        """The C form of what `_allocate_evicting` does with victims that are just as many as are missing."""
        free, ids = self._free[index], np.empty(count, ID_TYPE)
        self._core.evict(self._words, victims, self._exact_names[index], self.hashes, ids)
        self.idle_counts[index] -= len(victims)
        self.evicted_count += len(victims)
        if free.count:
            self._core.take(self._words, free.view, 0, free.count, ids)
            free.count = 0
        return ids

    def _eviction_is_next(self, index: int) -> bool:
        """Whether `make_room` would find nothing before its third step, eviction inside the class."""
        ledger = self.ledger
        if len(ledger.unassigned) > self.layout.spare_count or self.marks is not None:
            return False
        return ledger.only_class == index or not ledger.may_have_empty(index)

    # -- references ---------------------------------------------------------------------------------------------

    def release(self, ids: IdBatch, run: bool = False) -> None:
        """Gives back one reference to each block; -1 (a dropped position) is ignored.

        Tables pass their blocks tail first, so that leaves are evicted first. A sealed block without references is
        IDLE,
        still a hit; an open or unnamed one is FREE (FENCED while held). `run`: the blocks that become idle are one
        hit point of a sliding group, kept or dropped as one.
        UsageError, with nothing changed, for a block without references or one that is given twice.
        """
        count = len(ids)
        if count > SMALL_BATCH:
            self._release_many(np.asarray(ids, dtype=np.int32), run)
            return
        if count == 1 and not run:
            self.release_one(int(ids[0]))
            return
        if not count or (self._core is not None and self._release_in_c(ids, run)):
            return
        batch: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if self._core is None and self._release_plain(batch, run):
            return
        batch = [block_id for block_id in batch if block_id != -1]
        self._check_release_few(batch)
        idle: list[int] = []
        for block_id in batch:
            self._drop_reference(block_id, idle)
        if idle:
            self._become_idle_few(idle, run)

    def _release_plain(self, batch: list[int], run: bool) -> bool:
        """The common small release: blocks of one class that one table alone refers to, without marks.

        False, with nothing changed, when it is anything else.
        """
        words = self._words
        index = self.ledger.only_class
        idle: list[int] = []
        start = top = 0
        try:
            if index < 0:
                classes = self._classes
                index = classes[batch[0]]
                for block_id in batch:
                    if classes[block_id] != index:
                        return False
            free = self._free[index]
            view = free.view
            start = top = free.count
            # Words change while the batch is read, so that a block given twice is found by its second word.
            for block_id in batch:
                word = words[block_id]
                if word == SEALED_ONCE:
                    words[block_id] = IDLE
                    idle.append(block_id)
                elif word == OPEN_ONCE:
                    words[block_id] = FREE
                    view[top] = block_id
                    top += 1
                else:
                    break
            else:
                if top > start:
                    free.count = top
                    self.ledger.frees[index] += top - start
                if idle:
                    self.idle_counts[index] += len(idle)
                    self.tick = tick = self.tick + 1
                    self.policies[index].idle(idle, tick, run)
                return True
        except (IndexError, TypeError):
            pass  # what is no id of a block: the caller tells
        for block_id in batch[: len(idle) + top - start]:
            words[block_id] = SEALED_ONCE if words[block_id] == IDLE else OPEN_ONCE
        return False

    def _release_in_c(self, ids: IdBatch, run: bool) -> bool:
        """The C form of `_release_plain`; False, with nothing changed, also for what it cannot read."""
        index, classes = self.ledger.only_class, None
        if index < 0:
            classes = self._classes
            try:
                index = classes[ids[0]]
            except IndexError:
                return False
        free = self._free[index]
        idle = self._core.release(self._words, classes, index, free.view, free.count, ids)
        if idle is None:
            return False
        opened_count = len(ids) - len(idle)
        if opened_count:
            free.count += opened_count
            self.ledger.frees[index] += opened_count
        if idle:
            self.idle_counts[index] += len(idle)
            self.tick = tick = self.tick + 1
            self.policies[index].idle(idle, tick, run)
        return True

    def _check_release_few(self, ids: list[int]) -> None:
        if len(set(ids)) < len(ids):
            raise UsageError(f"expected distinct blocks to release, got {ids}")
        for block_id in ids:
            self._check_release(block_id, self._words[self._checked(block_id)])

    def release_one(self, block_id: int) -> None:
        """`release([block_id])`."""
        words = self._words
        try:
            word = words[block_id]
        except IndexError:
            self._checked(block_id)
            raise
        if word == OPEN_ONCE:
            words[block_id] = FREE
            index = self._classes[block_id]
            free = self._free[index]
            free.view[free.count] = block_id
            free.count += 1
            self.ledger.frees[index] += 1
        elif word == SEALED_ONCE:
            words[block_id] = IDLE
            index = self._classes[block_id]
            self.idle_counts[index] += 1
            self.tick = tick = self.tick + 1
            self.policies[index].idle_one(block_id, tick)
        elif block_id != -1:
            self._check_release(self._checked(block_id), word)
            idle: list[int] = []
            self._drop_reference(block_id, idle)
            if idle:
                self._become_idle_few(idle, False)

    def _check_release(self, block_id: int, word: int) -> None:
        if word < ONE_REFERENCE:
            raise UsageError(
                f"expected a block with a reference to release, got block {block_id} ({BlockState(word & STATE).name})"
            )
        if word & EXACT_HELD and (word >> REFERENCE_SHIFT) <= self.exact_holders[block_id]:
            raise UsageError(f"block {block_id}: expected drop_exact before the release of its last exact holder")

    def _drop_reference(self, block_id: int, idle: list[int]) -> None:
        """One reference less; a block that is now without goes to FREE or FENCED, or is IDLE and in `idle`."""
        word = self._words[block_id] - ONE_REFERENCE
        self._words[block_id] = word
        if word < ONE_REFERENCE:
            if word & (STATE | UNINDEXED) == SEALED:
                self._words[block_id] = IDLE | word & HELD
                idle.append(block_id)
            else:
                self._to_free(block_id)

    def _release_many(self, ids: Ids, run: bool) -> None:
        if ids.ndim != 1:
            raise UsageError(f"expected a flat batch of block ids, got shape {ids.shape}")
        if int(ids.min()) == -1:
            ids = ids[ids >= 0]
            if len(ids) <= SMALL_BATCH:
                return self.release(ids, run)
        places, words = self._distinct_words(ids, "release")
        raw = words.tobytes()
        if raw == self._open_once[: len(raw)]:
            self._life[places] = FREE
            self._push_free_many(places)
            return None
        if raw == self._sealed_once[: len(raw)]:
            self._life[places] = IDLE
            self._become_idle(places, run, any_held=False)
            return None
        idle, opened = places[words == SEALED_ONCE], places[words == OPEN_ONCE]
        if len(idle) + len(opened) == len(places):
            self._life[opened] = FREE
            self._push_free_many(opened)
            self._life[idle] = IDLE
            self._become_idle(idle, run, any_held=False)
            return None
        if int(words.min()) < ONE_REFERENCE or bool((words & EXACT_HELD).any()):
            for block_id, word in zip(ids.tolist(), words.tolist(), strict=True):
                self._check_release(block_id, word)
        words -= ONE_REFERENCE
        self._life[places] = words
        gone = words < ONE_REFERENCE
        named = gone & (words & (STATE | UNINDEXED) == SEALED)
        for block_id in places[gone & ~named & (words != OPEN)].tolist():
            self._to_free(block_id)
        plain = places[gone & (words == OPEN)]
        self._life[plain] = FREE
        self._push_free_many(plain)
        idle = places[named]
        if len(idle):
            self._life[idle] = IDLE | words[named] & HELD
            self._become_idle(idle, run)
        return None

    def share(self, ids: IdBatch) -> None:
        """One more reference to each block (-1 ignored); an IDLE one is SEALED again.

        UsageError, with nothing changed, for a block that is not OPEN, SEALED or IDLE, or that is given twice.
        """
        array = np.asarray(ids, dtype=np.int32)
        if len(array) and int(array.min()) == -1:
            array = array[array >= 0]
        if not len(array):
            return
        places, words = self._distinct_words(array, "share")
        states = words & STATE
        idle = states == IDLE
        if not bool((idle | (states == SEALED) | (states == OPEN)).all()):
            wrong = int(array[~(idle | (states == SEALED) | (states == OPEN))][0])
            raise UsageError(
                f"expected blocks that are open, sealed or idle to share, got block {wrong} "
                f"({self.state_of(wrong).name})"
            )
        words += ONE_REFERENCE
        if bool(idle.any()):
            words[idle] += SEALED - IDLE
            self._leave_idle(places[idle], busy=True)
        self._life[places] = words

    def touch(self, ids: IdBatch) -> None:
        """Makes idle blocks of a chain (given head first) the most recently used; leaves still go first."""
        array = np.asarray(ids, dtype=np.int32)[::-1]
        array = array[array >= 0]
        places = array[self._life[array] & STATE == IDLE].astype(np.intp)
        if len(places):
            self._leave_idle(places, busy=True)
            self._become_idle(places, False)
