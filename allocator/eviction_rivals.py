"""Well-known policies to compare with, made leaves first: LRU-2, S3-FIFO, ARC, W-TinyLFU. For the simulator.

Called like every policy, under the pool's lock; `observe` must be told of every request. They follow their papers, one
block at a time in plain Python, and are not meant for a live pool. A block that its policy would evict while it has a
resident child (or is in use) goes to the young end of its queue instead.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from allocator.eviction import EvictionPolicy, Ids, Keys, Prices, Usable

_Queue = OrderedDict[int, None]


class _Leafy(EvictionPolicy):
    """Parents, children and idleness of blocks; the order is the subclass's."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._idle: dict[int, int] = {}  # block -> tick
        self._keys: dict[int, int] = {}
        self._parent: dict[int, int] = {}
        self._children: dict[int, int] = {}

    @abstractmethod
    def _enter(self, block_id: int, key: int) -> None:
        """A block is new."""

    @abstractmethod
    def _hit(self, block_id: int) -> None:
        """A resident block was used again."""

    @abstractmethod
    def _choose(self) -> int:
        """The block that would go next, still in its queue; -1: none."""

    @abstractmethod
    def _put_back(self, block_id: int) -> None:
        """The block chosen may not go: it takes the young end of its queue."""

    @abstractmethod
    def _leave(self, block_id: int, key: int, evicted: bool) -> None:
        """The block goes."""

    def __len__(self) -> int:
        return len(self._idle)

    def beside(self) -> EvictionPolicy:
        return type(self)(self.capacity)

    def since(self, block_id: int) -> int:
        return self._idle.get(block_id, 0)

    def observe(
        self, keys: Keys, tables: Sequence[Ids | list[int]], prices: Prices | None = None, owner: int = 0
    ) -> None:
        del prices
        (ids,) = tables
        chain = ids if isinstance(ids, list) else ids.tolist()
        names = keys.tolist()
        for place in range(len(chain) - 1, -1, -1):  # tail first: a parent is younger than its child
            block_id = chain[place]
            if block_id in self._keys:
                self._hit(block_id)
                continue
            self._keys[block_id] = names[place]
            if place:
                parent = chain[place - 1]
                self._parent[block_id] = parent
                self._children[parent] = self._children.get(parent, 0) + 1
            self._enter(block_id, names[place])

    def idle(self, ids: Ids | list[int], tick: int, run: bool = False) -> None:
        for block_id in map(int, ids):
            self._idle[block_id] = tick
            if block_id not in self._keys:  # nobody told of it: its id stands for its name
                self._keys[block_id] = -block_id - 1
                self._enter(block_id, -block_id - 1)

    def busy(self, ids: Ids | list[int]) -> None:
        for block_id in map(int, ids):
            del self._idle[block_id]

    def forget(self, ids: Ids | list[int]) -> None:
        for block_id in map(int, ids):
            self._drop(block_id, evicted=False)

    def _drop(self, block_id: int, evicted: bool) -> None:
        del self._idle[block_id]
        self._leave(block_id, self._keys.pop(block_id), evicted)
        parent = self._parent.pop(block_id, -1)
        if parent in self._children:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
        self._children.pop(block_id, None)

    def victims(self, count: int, usable: Usable | None = None) -> list[int]:
        taken: list[int] = []
        tries = 0
        while len(taken) < count and self._idle and tries <= 4 * len(self._keys) + 16:
            block_id = self._choose()
            if block_id < 0:
                break
            if block_id in self._idle and block_id not in self._children and _may_go(block_id, usable):
                taken.append(block_id)
                self._drop(block_id, evicted=True)
                tries = 0
            else:
                self._put_back(block_id)
                tries += 1
        if len(taken) < count:
            for block_id in self.peek(count - len(taken), usable).tolist():
                taken.append(block_id)
                self._drop(block_id, evicted=True)
        return taken

    def peek(self, count: int, usable: Usable | None = None) -> npt.NDArray[np.int32]:
        found = [one for one in self._idle if _may_go(one, usable)][:count]
        return np.array(found, dtype=np.int32)


def _may_go(block_id: int, usable: Usable | None) -> bool:
    return usable is None or bool(usable(np.array([block_id], dtype=np.int32))[0])


class _Ghost:
    """Keys of blocks that are gone, the newest `capacity` of them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._held: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def add(self, key: int, value: int = 0) -> None:
        self._held[key] = value
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)

    def take(self, key: int) -> int | None:
        return self._held.pop(key, None)


class LRU2(_Leafy):
    """The block whose last use but one is longest ago (O'Neil et al.); remembers as many blocks as it holds."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses: dict[int, tuple[int, int]] = {}  # block -> (last but one, last)
        self._heap: list[tuple[int, int, int]] = []
        self._ghost = _Ghost(capacity)
        self._clock = 0

    def _enter(self, block_id: int, key: int) -> None:
        self._push(block_id, self._ghost.take(key) or 0)

    def _hit(self, block_id: int) -> None:
        self._push(block_id, self._uses[block_id][1])

    def _push(self, block_id: int, before: int) -> None:
        self._clock += 1
        self._uses[block_id] = (before, self._clock)
        heapq.heappush(self._heap, (before, self._clock, block_id))

    def _choose(self) -> int:
        while self._heap:
            before, last, block_id = self._heap[0]
            if self._uses.get(block_id) == (before, last):
                return block_id
            heapq.heappop(self._heap)
        return -1

    def _put_back(self, block_id: int) -> None:
        heapq.heappop(self._heap)
        self._push(block_id, self._uses[block_id][1])

    def _leave(self, block_id: int, key: int, evicted: bool) -> None:
        _, last = self._uses.pop(block_id)
        if evicted:
            self._ghost.add(key, last)


class S3FIFO(_Leafy):
    """Small, main and ghost queues (Yang et al.): most blocks leave through a small FIFO without a second use."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_max = max(1, capacity // 10)
        self._small: _Queue = OrderedDict()
        self._main: _Queue = OrderedDict()
        self._uses: dict[int, int] = {}
        self._ghost = _Ghost(capacity)

    def _enter(self, block_id: int, key: int) -> None:
        (self._small if self._ghost.take(key) is None else self._main)[block_id] = None
        self._uses[block_id] = 0

    def _hit(self, block_id: int) -> None:
        self._uses[block_id] = min(3, self._uses[block_id] + 1)

    def _choose(self) -> int:
        while self._small and (len(self._small) > self._small_max or not self._main):
            block_id = next(iter(self._small))
            if self._uses[block_id] < 2:
                return block_id
            del self._small[block_id]
            self._main[block_id] = None
            self._uses[block_id] = 0
        while self._main:
            block_id = next(iter(self._main))
            if not self._uses[block_id]:
                return block_id
            self._uses[block_id] -= 1
            self._main.move_to_end(block_id)
        return -1

    def _put_back(self, block_id: int) -> None:
        (self._small if block_id in self._small else self._main).move_to_end(block_id)

    def _leave(self, block_id: int, key: int, evicted: bool) -> None:
        del self._uses[block_id]
        if block_id in self._small:
            del self._small[block_id]
            if evicted:
                self._ghost.add(key)
        else:
            del self._main[block_id]


class ARC(_Leafy):
    """Recent and frequent lists whose shares follow what their ghosts would have hit (Megiddo and Modha)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: _Queue = OrderedDict()
        self._frequent: _Queue = OrderedDict()
        self._recent_gone = _Ghost(capacity)
        self._frequent_gone = _Ghost(capacity)
        self._recent_share = 0.0

    def _enter(self, block_id: int, key: int) -> None:
        recent, frequent = len(self._recent_gone), len(self._frequent_gone)
        if self._recent_gone.take(key) is not None:
            self._recent_share = min(self.capacity, self._recent_share + max(1.0, frequent / recent))
            self._frequent[block_id] = None
        elif self._frequent_gone.take(key) is not None:
            self._recent_share = max(0.0, self._recent_share - max(1.0, recent / frequent))
            self._frequent[block_id] = None
        else:
            self._recent[block_id] = None

    def _hit(self, block_id: int) -> None:
        self._recent.pop(block_id, None)
        self._frequent[block_id] = None
        self._frequent.move_to_end(block_id)

    def _choose(self) -> int:
        if self._recent and (len(self._recent) > self._recent_share or not self._frequent):
            return next(iter(self._recent))
        return next(iter(self._frequent), -1)

    def _put_back(self, block_id: int) -> None:
        (self._recent if block_id in self._recent else self._frequent).move_to_end(block_id)

    def _leave(self, block_id: int, key: int, evicted: bool) -> None:
        was_recent = block_id in self._recent
        del (self._recent if was_recent else self._frequent)[block_id]
        if evicted:
            (self._recent_gone if was_recent else self._frequent_gone).add(key)


class _Sketch:
    """Counts how often keys were seen, in four rows of small counters that are halved now and then."""

    def __init__(self, capacity: int) -> None:
        size = 1 << max(6, (4 * capacity).bit_length())
        self._mask = size - 1
        self._rows = [bytearray(size) for _ in range(4)]
        self._left = self._period = 10 * max(1, capacity)

    def add(self, key: int) -> None:
        for row, place in enumerate(self._places(key)):
            counters = self._rows[row]
            counters[place] = min(15, counters[place] + 1)
        self._left -= 1
        if not self._left:
            self._left = self._period
            self._rows = [bytearray(np.frombuffer(row, dtype=np.uint8) >> 1) for row in self._rows]

    def count(self, key: int) -> int:
        return min(self._rows[row][place] for row, place in enumerate(self._places(key)))

    def _places(self, key: int) -> Iterable[int]:
        return [(key >> shift) & self._mask for shift in (0, 13, 26, 39)]


class WTinyLFU(_Leafy):
    """A window before a segmented main part that admits only what is asked for more often (Einziger et al.)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._window_max = max(1, capacity // 100)
        self._protected_max = max(1, (capacity - self._window_max) * 8 // 10)
        self._window: _Queue = OrderedDict()
        self._probation: _Queue = OrderedDict()
        self._protected: _Queue = OrderedDict()
        self._sketch = _Sketch(capacity)
        self._was_full = False

    def _enter(self, block_id: int, key: int) -> None:
        self._sketch.add(key)
        self._window[block_id] = None
        if not self._was_full and len(self._window) > self._window_max:  # there is room: no contest yet
            oldest, _ = self._window.popitem(last=False)
            self._probation[oldest] = None

    def _hit(self, block_id: int) -> None:
        self._sketch.add(self._keys[block_id])
        if block_id in self._window:
            self._window.move_to_end(block_id)
            return
        self._probation.pop(block_id, None)
        self._protected[block_id] = None
        self._protected.move_to_end(block_id)
        if len(self._protected) > self._protected_max:
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None

    def _choose(self) -> int:
        self._was_full = True
        main = self._probation or self._protected
        victim = next(iter(main), -1)
        candidate = next(iter(self._window), -1)
        if victim < 0 or (candidate >= 0 and len(self._window) > self._window_max):
            if victim < 0 or self._seen(candidate) <= self._seen(victim):
                return candidate
            del self._window[candidate]
            self._probation[candidate] = None
        return victim

    def _seen(self, block_id: int) -> int:
        return self._sketch.count(self._keys[block_id])

    def _put_back(self, block_id: int) -> None:
        self._queue_of(block_id).move_to_end(block_id)

    def _queue_of(self, block_id: int) -> _Queue:
        return next(one for one in (self._window, self._probation, self._protected) if block_id in one)

    def _leave(self, block_id: int, key: int, evicted: bool) -> None:
        del self._queue_of(block_id)[block_id]
