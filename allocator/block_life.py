"""The life of blocks: their states, who counts them, and how idle ones are evicted.

    FREE -> OPEN (one owner writes) -> SEALED (named, shared) -> IDLE (no reference) -> evicted, FREE

A FENCED block has no reference but a transfer or pin still touches its slot; it becomes FREE when the last one ends.
Bottom room of the pool, under its caller's lock; nothing here blocks, copies or calls out, except `on_evict`.

Invariants (checked by `allocator.invariants`):
- Every id is in exactly one state: RETIRED, FREE (in the free list), IDLE (in its class's policy), or live/fenced.
- A HELD block (pinned, in flight) is never FREE and never a victim.
- `idle_counts`, `held_idle_counts` and `fenced_counts` are the numbers of such blocks, a class each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.block_marks import PRIORITY_DEFAULT, BlockMarks
from allocator.block_state import (
    FENCED,
    FREE,
    HELD,
    IDLE,
    OPEN_ONCE,
    SEALED_ONCE,
    STATE,
    BlockState,
)
from allocator.errors import CapacityError, UsageError
from allocator.eviction import LRU, EvictionPolicy
from allocator.extent_ledger import PLACE_TYPE, ExtentLedger, Ids, Places
from allocator.extents import COLD, FULL, ExtentLayout
from allocator.prefix_index import PrefixIndex

IdBatch: TypeAlias = "Sequence[int] | Ids"
OnEvict: TypeAlias = Callable[[int, list[int], list[bytes], list[bool], int], None]
SMALL_BATCH = 32
_BATCH_MAX = 4096
_FIRST_TICK = 1 << 20  # ages may be set back by a few


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
        # The map that names a block of a class, by how it was computed: an INT4 block is never in the exact one.
        self._lossy_names = [self.indexes[index >> 1].lossy for index in range(layout.class_count)]
        self._exact_names = [
            names if index & 1 else self.indexes[index >> 1].exact for index, names in enumerate(self._lossy_names)
        ]
        # Both are written by seal and count while a block is SEALED or IDLE only; what stands there otherwise is stale.
        self.hashes: list[bytes] = [b""] * (capacity + 1)
        self.computed = bytearray(capacity + 1)
        self._computed: npt.NDArray[np.uint8] = np.frombuffer(self.computed, dtype=np.uint8)
        self.pins: npt.NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        self.transfers: npt.NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        self.exact_holders: npt.NDArray[np.int32] = np.zeros(capacity + 1, dtype=np.int32)
        self.idle_counts = [0] * layout.class_count
        self.held_idle_counts = [0] * layout.class_count
        self.fenced_counts = [0] * layout.class_count
        self.changing: dict[int, int] = {}  # cooling or moving block -> target id
        self.targets: set[int] = set()
        self.tick = _FIRST_TICK
        self.marks: BlockMarks | None = None  # None: no block ever had another priority than the usual one
        self.evicted_count = 0
        self.converted_extents_count = 0
        self._life = ledger.life
        self._words = ledger.life_view
        self._classes = ledger.class_view
        self._free = ledger.free
        self._order = np.zeros(capacity + 1, dtype=np.int32)
        self._numbers = np.arange(max(capacity, _BATCH_MAX), dtype=np.int32)
        self._raw_numbers = self._numbers.tobytes()
        self._open_once = np.full(max(capacity, _BATCH_MAX), OPEN_ONCE, dtype=np.int32).tobytes()
        self._sealed_once = np.full(max(capacity, _BATCH_MAX), SEALED_ONCE, dtype=np.int32).tobytes()

    def _class_index(self, group: int, form: int) -> int:
        if not 0 <= group < self.layout.group_count:
            raise UsageError(f"expected a group in 0..{self.layout.group_count - 1}, got {group}")
        if form not in (FULL, COLD):
            raise UsageError(f"expected form {FULL} (full) or {COLD} (cold), got {form}")
        if not self.layout.has_class(2 * group + form):
            raise CapacityError(1, 0, f"blocks of group {group} in a form that this device has no slots for")
        return 2 * group + form

    def _to_free(self, block_id: int) -> None:
        """A block that nobody refers to and no index names: FREE, or FENCED while it is held."""
        index = self._classes[block_id]
        if self._words[block_id] & HELD:
            self._words[block_id] = FENCED | HELD
            self.fenced_counts[index] += 1
        else:
            self._words[block_id] = FREE
            self._push_free([block_id])

    def _push_free(self, ids: list[int]) -> None:
        """Puts ids whose word is FREE on the free list of their class."""
        classes, lists, frees = self._classes, self._free, self.ledger.frees
        index = classes[ids[0]]
        free = lists[index]
        view, count = free.view, free.count
        for block_id in ids:
            if classes[block_id] != index:
                frees[index] += count - free.count
                free.count = count
                index = classes[block_id]
                free = lists[index]
                view, count = free.view, free.count
            view[count] = block_id
            count += 1
        frees[index] += count - free.count
        free.count = count

    def _become_idle_few(self, ids: list[int], run: bool) -> None:
        """`_become_idle` for a small batch in plain Python."""
        classes, words = self._classes, self._words
        index = classes[ids[0]]
        held = 0
        for block_id in ids:
            if classes[block_id] != index:
                self._become_idle(np.array(ids, dtype=np.intp), run)
                return
            held += words[block_id] & HELD
        self.held_idle_counts[index] += held // HELD
        self.idle_counts[index] += len(ids)
        self.tick += 1
        self.policies[index].idle(ids, self.tick, run)

    def _become_idle(self, places: Places, run: bool, any_held: bool = True) -> None:
        """Counts blocks whose word is IDLE and hands them to the policy of their class, in order.

        The array belongs to the policy afterwards. `any_held` False: none of them is held.
        """
        self.tick += 1
        for index, part in self._by_class(places):
            self.idle_counts[index] += len(part)
            if any_held:
                self.held_idle_counts[index] += int(np.count_nonzero(self._life[part] & HELD))
            self.policies[index].idle(part, self.tick, run)

    def _by_class(self, places: Places) -> list[tuple[int, Places]]:
        """The blocks of a batch by class; in one piece, uncopied, when that is one class."""
        if not len(places):
            return []
        index = self.ledger.only_class
        if index >= 0:
            return [(index, places)]
        classes = self.ledger.class_of[places]
        raw = classes.tobytes()
        if raw == raw[: classes.itemsize] * len(places):
            return [(int(classes[0]), places)]
        return [(index, places[classes == index]) for index in np.unique(classes).tolist()]

    def _push_free_many(self, places: Places) -> None:
        """`_push_free` for a large batch."""
        for index, part in self._by_class(places):
            self._free[index].push(part)
            self.ledger.frees[index] += len(part)

    def _distinct_words(self, ids: Ids, verb: str) -> tuple[Places, npt.NDArray[np.int32]]:
        """A batch as places for indexing, and its life words; UsageError when an id does not exist or comes twice."""
        count = len(ids)
        if count > len(self._numbers):
            raise UsageError(f"expected distinct blocks to {verb}, got {count} of {self.ledger.id_capacity}")
        places = ids.view(np.uint32).astype(PLACE_TYPE)  # so that a negative id is out of range too
        try:
            self._order[places] = self._numbers[:count]
        except IndexError:
            raise UsageError(f"expected block ids in 0..{self.ledger.id_capacity - 1} to {verb}, got {ids}") from None
        if self._order[places].tobytes() != self._raw_numbers[: 4 * count]:
            raise UsageError(f"expected distinct blocks to {verb}, got {ids}")
        return places, self._life[places]

    def _leave_idle(self, ids: Ids | Places, busy: bool) -> None:
        """Takes idle blocks from their policies and counts; the caller sets their words afterwards."""
        for index, part in self._by_class(ids.astype(PLACE_TYPE)):
            self.idle_counts[index] -= len(part)
            if self.held_idle_counts[index]:
                self.held_idle_counts[index] -= int(np.count_nonzero(self._life[part] & HELD))
            (self.policies[index].busy if busy else self.policies[index].forget)(part)

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
        usable = self._not_held if self.held_idle_counts[class_index] else None
        victims = self.policies[class_index].victims(count, usable)
        self._drop_idle(class_index, np.asarray(victims, dtype=np.intp))
        return len(victims)

    def unwanted_idle_count(self, class_index: int) -> int:
        """Idle blocks of a class that are not held and not above the usual priority."""
        count = self.idle_counts[class_index] - self.held_idle_counts[class_index]
        return min(count, self.policies[class_index].count_up_to(PRIORITY_DEFAULT))

    def wanted_mask(self, ids: Ids | Places) -> npt.NDArray[np.bool_]:
        """Which of the blocks have a higher priority than the usual one: bool[len(ids)]."""
        marks = self.marks
        if marks is None:
            return np.zeros(len(ids), dtype=bool)
        return np.array([marks.step(block_id)[0] > PRIORITY_DEFAULT for block_id in ids.tolist()], dtype=bool)

    def idle_mask(self, ids: Ids | Places) -> npt.NDArray[np.bool_]:
        """Which of the blocks are idle and not held: bool[len(ids)]."""
        mask: npt.NDArray[np.bool_] = self._life[ids] & (STATE | HELD) == IDLE
        return mask

    def _not_held(self, ids: Ids | Places) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = self._life[ids] & HELD == 0
        return mask

    def _drop_idle(self, class_index: int, places: Places) -> None:
        """Evicts idle, unheld blocks of one class that their policy has given up already: names go, slots are FREE."""
        if not len(places):
            return
        self._unname(class_index, places.tolist())
        self._life[places] = FREE
        self._free[class_index].push(places)
        self.ledger.frees[class_index] += len(places)

    def _unname(self, class_index: int, ids: list[int]) -> None:
        """Idle blocks of one class that are evicted lose their names; who asked to be told hears of it first."""
        hashes, computed = self.hashes, self.computed
        if self.on_evict is not None:
            named = [hashes[block_id] for block_id in ids]
            exactly = [bool(computed[block_id]) for block_id in ids]
            self.on_evict(class_index >> 1, list(ids), named, exactly, class_index & 1)
        exact, lossy = self._exact_names[class_index], self._lossy_names[class_index]
        if not self._has_two_maps(class_index):
            for block_id in ids:
                del exact[hashes[block_id]]
        else:
            for block_id in ids:
                del (exact if computed[block_id] else lossy)[hashes[block_id]]
        self.idle_counts[class_index] -= len(ids)
        self.evicted_count += len(ids)

    def _has_two_maps(self, class_index: int) -> bool:
        """Whether a name of the class may stand in either of two maps."""
        lossy = self._lossy_names[class_index]
        return bool(lossy) and lossy is not self._exact_names[class_index]

    def _reuse_idle(self, class_index: int) -> int:
        """Evicts one idle block without a detour over the free list; the caller hands it out.

        -1 when that is not the simple case: held blocks to skip, or a sliding run next.
        """
        if self.held_idle_counts[class_index]:
            return -1
        block_id = self.policies[class_index].victim_one()
        if block_id >= 0:
            if self.on_evict is not None:
                exact = bool(self.computed[block_id])
                self.on_evict(class_index >> 1, [block_id], [self.hashes[block_id]], [exact], class_index & 1)
            if self.computed[block_id]:
                del self._exact_names[class_index][self.hashes[block_id]]
            else:
                del self._lossy_names[class_index][self.hashes[block_id]]
            self.idle_counts[class_index] -= 1
            self.evicted_count += 1
        return block_id

    def _evict_few(self, class_index: int, count: int) -> list[int]:
        """`evict_idle` for a small batch in plain Python; the caller hands the blocks out or frees them."""
        usable = self._not_held if self.held_idle_counts[class_index] else None
        victims = self.policies[class_index].victims(count, usable)
        ids: list[int] = victims if isinstance(victims, list) else victims.tolist()
        self._unname(class_index, ids)
        return ids
