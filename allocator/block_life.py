"""The life of blocks: allocate, share, release, hold, evict. The hot half of the pool (`BlockPool` adds names and
forms).

    FREE -> OPEN (one owner writes) -> SEALED (named, shared) -> IDLE (no reference) -> evicted, FREE

A FENCED block has no reference but a transfer or pin still touches its slot; it becomes FREE when the last one ends.
Under the lock of the pool's caller; nothing here blocks, copies or calls out, except `on_evict`.

Invariants (checked by `allocator.invariants`):
- Every id is in exactly one state: RETIRED, FREE (in the free list), IDLE (in its class's policy), or live/fenced.
- Only FREE blocks are handed out; a HELD block (pinned, in flight) is never FREE and never a victim.
- A call that raises UsageError or CapacityError has changed nothing.

Batches up to `_SMALL` ids run in plain Python over memoryviews, larger ones in numpy over the same memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.block_state import (
    EXACT_HELD,
    FENCED,
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
from allocator.errors import CapacityError, UsageError
from allocator.eviction import LRU, EvictionPolicy
from allocator.extent_ledger import ExtentLedger, Ids
from allocator.extents import COLD, FULL, ExtentLayout
from allocator.prefix_index import PrefixIndex
from allocator.reclaim import available_blocks, make_room

IdBatch: TypeAlias = "Sequence[int] | Ids"
OnEvict: TypeAlias = Callable[[int, list[int], list[bytes], list[bool], int], None]
_SMALL = 32
_BATCH_MAX = 4096


class BlockLife:
    """States, references and holds of all blocks of one device span."""

    def __init__(
        self,
        layout: ExtentLayout,
        policy: Callable[[int], EvictionPolicy] = LRU,
        on_evict: OnEvict | None = None,
    ) -> None:
        self.layout = layout
        self.on_evict = on_evict
        self.ledger = ledger = ExtentLedger(layout)
        capacity = ledger.id_capacity
        self.policies = [policy(capacity) for _ in range(layout.class_count)]
        self.indexes = [PrefixIndex() for _ in range(layout.group_count)]
        self.hashes: npt.NDArray[Any] = np.full(capacity + 1, None, dtype=object)
        self.computed: npt.NDArray[np.uint8] = np.zeros(capacity + 1, dtype=np.uint8)
        self.pins: npt.NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        self.transfers: npt.NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        self.exact_holders: npt.NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        self.idle_counts = [0] * layout.class_count
        self.held_idle_counts = [0] * layout.class_count
        self.fenced_counts = [0] * layout.class_count
        self.changing: dict[int, int] = {}  # cooling or moving block -> target id
        self.targets: set[int] = set()
        self.tick = 0
        self.evicted_count = 0
        self.converted_extents_count = 0
        self._life = ledger.life
        self._words = ledger.life_view
        self._classes = ledger.class_view
        self._free = ledger.free
        self._order = np.zeros(capacity + 1, dtype=np.int32)
        self._numbers = np.arange(max(capacity, _BATCH_MAX), dtype=np.int32)
        self._open_once = np.full(max(capacity, _BATCH_MAX), OPEN_ONCE, dtype=np.int32).tobytes()
        self._sealed_once = np.full(max(capacity, _BATCH_MAX), SEALED_ONCE, dtype=np.int32).tobytes()

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
        if free.count < count:
            make_room(self, index, count)
        free.count = start = free.count - count
        if count == 1:
            self._words[free.view[start]] = OPEN_ONCE
            return free.ids[start : start + 1].copy()
        ids = free.ids[start : start + count].copy()
        self._life[ids] = OPEN_ONCE
        return ids

    def _class_index(self, group: int, form: int) -> int:
        if not 0 <= group < self.layout.group_count:
            raise UsageError(f"expected a group in 0..{self.layout.group_count - 1}, got {group}")
        if form not in (FULL, COLD):
            raise UsageError(f"expected form {FULL} (full) or {COLD} (cold), got {form}")
        if not self.layout.has_class(2 * group + form):
            raise CapacityError(1, 0, f"blocks of group {group} in a form that this device has no slots for")
        return 2 * group + form

    # -- references ---------------------------------------------------------------------------------------------

    def release(self, ids: IdBatch, run: bool = False) -> None:
        """Gives back one reference to each block; -1 (a dropped position) is ignored.

        Tables pass their blocks tail first, so that leaves are evicted first. A sealed block without references is
        IDLE,
        still a hit; an open or unnamed one is FREE (FENCED while held). `run`: the blocks that become idle are one
        hit point of a sliding group, kept or dropped as one.
        UsageError, with nothing changed, for a block without references or one that is given twice.
        """
        if len(ids) > _SMALL:
            self._release_many(np.asarray(ids, dtype=np.int32), run)
            return
        batch: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        if len(batch) == 1 and not run:
            self.release_one(batch[0])
            return
        words, freed, idle, other = self._words, [], [], []
        for block_id in batch:
            if block_id < 0:
                continue
            word = words[block_id] if block_id < len(words) else 0
            if word == OPEN_ONCE:
                freed.append(block_id)
            elif word == SEALED_ONCE:
                idle.append(block_id)
            else:
                self._check_release(block_id, word)
                other.append(block_id)
        if len(freed) + len(idle) + len(other) != len(set(freed).union(idle, other)):
            raise UsageError(f"expected distinct blocks to release, got {batch}")
        for block_id in freed:
            words[block_id] = FREE
        if freed:
            self._push_free(freed)
        for block_id in other:
            self._drop_reference(block_id, idle)
        for block_id in idle:
            words[block_id] = IDLE | words[block_id] & HELD
        if idle:
            self._become_idle(idle, run)

    def release_one(self, block_id: int) -> None:
        """`release([block_id])`."""
        if block_id < 0:
            return
        words = self._words
        word = words[block_id] if block_id < len(words) else 0
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
        else:
            self._check_release(block_id, word)
            idle: list[int] = []
            self._drop_reference(block_id, idle)
            if idle:
                words[block_id] = IDLE | words[block_id] & HELD
                self._become_idle(idle, False)

    def _check_release(self, block_id: int, word: int) -> None:
        if word < ONE_REFERENCE:
            state = BlockState(word & STATE).name if 0 <= block_id < self.ledger.id_capacity else "no such id"
            raise UsageError(f"expected a block with a reference to release, got block {block_id} ({state})")
        if word & EXACT_HELD and (word >> REFERENCE_SHIFT) <= self.exact_holders[block_id]:
            raise UsageError(f"block {block_id}: expected drop_exact before the release of its last exact holder")

    def _drop_reference(self, block_id: int, idle: list[int]) -> None:
        """One reference less; a block that is now without goes to FREE or FENCED, or into `idle`."""
        word = self._words[block_id] - ONE_REFERENCE
        self._words[block_id] = word
        if word < ONE_REFERENCE:
            if word & (STATE | UNINDEXED) == SEALED:
                idle.append(block_id)
            else:
                self._to_free(block_id)

    def _to_free(self, block_id: int) -> None:
        """A block that nobody refers to and no index names: FREE, or FENCED while it is held."""
        index = self._classes[block_id]
        self.hashes[block_id] = None
        self.computed[block_id] = 0
        if self._words[block_id] & HELD:
            self._words[block_id] = FENCED | HELD
            self.fenced_counts[index] += 1
        else:
            self._words[block_id] = FREE
            self._push_free([block_id])

    def _push_free(self, ids: list[int]) -> None:
        """Puts ids whose word is FREE on the free list of their class."""
        classes, lists, frees = self._classes, self._free, self.ledger.frees
        for block_id in ids:
            index = classes[block_id]
            free = lists[index]
            free.view[free.count] = block_id
            free.count += 1
            frees[index] += 1

    def _become_idle(self, ids: list[int] | Ids, run: bool) -> None:
        """Counts blocks whose word is IDLE and hands them to the policy of their class, in order."""
        self.tick += 1
        classes = self.ledger.class_of[ids]
        held = self._life[ids] & HELD != 0
        any_held = bool(held.any())
        first = int(classes[0])
        same = len(ids) == 1 or bool((classes == first).all())
        for index in (first,) if same else np.unique(classes).tolist():
            mine = slice(None) if same else classes == index
            part = ids if same else np.asarray(ids, dtype=np.int32)[mine]
            self.idle_counts[index] += len(part)
            if any_held:
                self.held_idle_counts[index] += int(np.count_nonzero(held[mine]))
            self.policies[index].idle(part, self.tick, run)

    def _release_many(self, ids: Ids, run: bool) -> None:
        if ids.ndim != 1:
            raise UsageError(f"expected a flat batch of block ids, got shape {ids.shape}")
        if int(ids.min()) < 0:
            ids = ids[ids >= 0]
            if len(ids) <= _SMALL:
                return self.release(ids, run)
        words = self._distinct_words(ids, "release")
        raw = words.tobytes()
        if raw == self._open_once[: len(raw)]:
            self._life[ids] = FREE
            self._push_free_many(ids)
            return None
        if raw == self._sealed_once[: len(raw)]:
            self._life[ids] = IDLE
            self._become_idle(ids.copy(), run)
            return None
        if int(words.min()) < ONE_REFERENCE or bool((words & EXACT_HELD).any()):
            for block_id, word in zip(ids.tolist(), words.tolist(), strict=True):
                self._check_release(block_id, word)
        words -= ONE_REFERENCE
        self._life[ids] = words
        gone = words < ONE_REFERENCE
        named = gone & (words & (STATE | UNINDEXED) == SEALED)
        for block_id in ids[gone & ~named & (words != OPEN)].tolist():
            self._to_free(block_id)
        plain = ids[gone & (words == OPEN)]
        self._life[plain] = FREE
        self._push_free_many(plain)
        idle = ids[named]
        if len(idle):
            self._life[idle] = IDLE | words[named] & HELD
            self._become_idle(idle, run)
        return None

    def _push_free_many(self, ids: Ids) -> None:
        """`_push_free` for a large batch."""
        if not len(ids):
            return
        classes = self.ledger.class_of[ids]
        first = int(classes[0])
        same = bool((classes == first).all())
        for index in (first,) if same else np.unique(classes).tolist():
            part = ids if same else ids[classes == index]
            self._free[index].push(part)
            self.ledger.frees[index] += len(part)

    def _distinct_words(self, ids: Ids, verb: str) -> npt.NDArray[np.int32]:
        """Life words of a batch; UsageError when an id does not exist or comes twice."""
        if int(ids.min()) < 0 or int(ids.max()) >= self.ledger.id_capacity:
            raise UsageError(f"expected block ids in 0..{self.ledger.id_capacity - 1} to {verb}, got {ids}")
        numbers = self._numbers[: len(ids)]
        if len(ids) > len(self._numbers):
            raise UsageError(f"expected distinct blocks to {verb}, got {len(ids)} of {self.ledger.id_capacity}")
        self._order[ids] = numbers
        if not np.array_equal(self._order[ids], numbers):
            raise UsageError(f"expected distinct blocks to {verb}, got {ids}")
        return self._life[ids]

    def share(self, ids: IdBatch) -> None:
        """One more reference to each block (-1 ignored); an IDLE one is SEALED again.

        UsageError, with nothing changed, for a block that is not OPEN, SEALED or IDLE, or that is given twice.
        """
        array = np.asarray(ids, dtype=np.int32)
        if len(array) and int(array.min()) < 0:
            array = array[array >= 0]
        if not len(array):
            return
        words = self._distinct_words(array, "share")
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
            self._leave_idle(array[idle], busy=True)
        self._life[array] = words

    def _leave_idle(self, ids: Ids, busy: bool) -> None:
        """Takes idle blocks from their policies and counts; the caller sets their words afterwards."""
        classes = self.ledger.class_of[ids]
        held = self._life[ids] & HELD != 0
        for index in np.unique(classes).tolist():
            mine = classes == index
            part = ids[mine]
            self.idle_counts[index] -= len(part)
            self.held_idle_counts[index] -= int(np.count_nonzero(held[mine]))
            (self.policies[index].busy if busy else self.policies[index].forget)(part)

    def touch(self, ids: IdBatch) -> None:
        """Makes idle blocks of a chain (given head first) the most recently used; leaves still go first."""
        array = np.asarray(ids, dtype=np.int32)[::-1]
        array = array[array >= 0]
        array = array[self._life[array] & STATE == IDLE]
        if len(array):
            self._leave_idle(array, busy=True)
            self._become_idle(array.copy(), False)

    def state_of(self, block_id: int) -> BlockState:
        """State of one block."""
        return BlockState(self._words[self._checked(block_id)] & STATE)

    def _checked(self, block_id: int) -> int:
        if not 0 <= block_id < self.ledger.id_capacity:
            raise UsageError(f"expected a block id in 0..{self.ledger.id_capacity - 1}, got {block_id}")
        return block_id

    # -- eviction -----------------------------------------------------------------------------------------------

    def evict_idle(self, class_index: int, count: int) -> int:
        """Evicts at least `count` idle blocks that are not held (a sliding run goes as one). Returns how many."""
        policy = self.policies[class_index]
        if count == 1 and not self.held_idle_counts[class_index]:
            block_id = policy.victim_one()
            if block_id >= 0:
                self._drop_idle(class_index, np.array([block_id], dtype=np.int32))
                return 1
        usable = self._not_held if self.held_idle_counts[class_index] else None
        victims = policy.victims(count, usable)
        self._drop_idle(class_index, victims)
        return len(victims)

    def idle_mask(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Which of the blocks are idle and not held: bool[len(ids)]."""
        mask: npt.NDArray[np.bool_] = self._life[ids] & (STATE | HELD) == IDLE
        return mask

    def _not_held(self, ids: Ids) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = self._life[ids] & HELD == 0
        return mask

    def _drop_idle(self, class_index: int, ids: Ids) -> None:
        """Evicts idle, unheld blocks of one class that their policy has given up already: names go, slots are FREE."""
        if not len(ids):
            return
        hashes = self.hashes[ids].tolist()
        computed = self.computed[ids]
        group, form = divmod(class_index, 2)
        if self.on_evict is not None:
            self.on_evict(group, ids.tolist(), hashes, (computed != 0).tolist(), form)
        index = self.indexes[group]
        exact_count = int(np.count_nonzero(computed)) if form == FULL else 0
        if exact_count == len(ids):
            deque(map(index.exact.__delitem__, hashes), maxlen=0)
        elif not exact_count:
            deque(map(index.lossy.__delitem__, hashes), maxlen=0)
        else:
            for block_hash, exact in zip(hashes, computed.tolist(), strict=True):
                del (index.exact if exact else index.lossy)[block_hash]
        self.hashes[ids] = None
        self.computed[ids] = 0
        self._life[ids] = FREE
        self._free[class_index].push(ids)
        self.ledger.frees[class_index] += len(ids)
        self.idle_counts[class_index] -= len(ids)
        self.evicted_count += len(ids)
