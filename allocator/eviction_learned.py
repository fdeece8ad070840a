"""The policy that learns reuse: recency plus what each class of blocks has earned, leaves first, never far below LRU.

Called by the pool under its caller's lock, like every policy; `observe` must be told of every request, or it is LRU.

A block is due at its last use plus the age of its level (`eviction_reuse`). Levels are few and their ages fixed, so
each is a queue in the order of release: the victim is at the head of the queue that is due first, and an operation
costs at most a look at LEVELS heads. A parent is never due before its child: levels of a release only rise from tail
to head, and a block that is used again keeps at least the time it had.

The floor: two shadow caches follow a sample of sessions, one by LRU and one by these levels. While LRU has the more
hits, victims are chosen by last use alone, which is LRU.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from allocator.eviction import EvictionPolicy, Ids, Usable
from allocator.eviction_reuse import LEVELS, ReuseMemory
from allocator.eviction_shadow import ShadowCache

_SHADOW_BLOCKS = 2048
_GROUPS = 256
_SHADOW_DECAY = 0.99
_MARGIN = 0.03  # that many more hits than LRU, relative, before LRU is left
_LOSS_MAX = 0.003  # hits, as a share of the blocks seen, that following the learned order may have cost


class _Segment:
    """Blocks of one level that one release made idle, tail first; `cursor` of them are consumed."""

    __slots__ = ("clock", "cursor", "ids", "run")

    def __init__(self, clock: int, ids: list[int], run: bool) -> None:
        self.clock = clock
        self.ids = ids
        self.run = run
        self.cursor = 0


class _Floor:
    """Which of two orders has more hits on a sample of the sessions."""

    def __init__(self, capacity: int) -> None:
        share = _GROUPS
        while share > 1 and capacity * share > _SHADOW_BLOCKS * _GROUPS:
            share //= 2
        self._share = share
        blocks = capacity * share // _GROUPS
        self._recency, self._learned = ShadowCache(blocks), ShadowCache(blocks)
        self._recency_hits = self._learned_hits = 0.0
        self._earned_blocks = self._seen_blocks = 0.0
        self.prefers_recency = True

    def request(self, keys: npt.NDArray[np.uint64], group: int, clock: int, until: npt.NDArray[np.float64]) -> None:
        if group < self._share:
            names = keys.tolist()
            self._seen_blocks += len(names)
            self._recency.request(names, [float(clock)] * len(names))
            self._learned.request(names, until.tolist())

    def end_epoch(self) -> None:
        """LRU until the other is clearly ahead; back when it no longer is, or when following it has cost too much."""
        self._recency_hits = self._recency_hits * _SHADOW_DECAY + self._recency.hits
        self._learned_hits = self._learned_hits * _SHADOW_DECAY + self._learned.hits
        self._earned_blocks *= _SHADOW_DECAY
        self._seen_blocks *= _SHADOW_DECAY
        if not self.prefers_recency:
            self._earned_blocks += self._learned.hits - self._recency.hits
        self._recency.hits = self._learned.hits = 0
        margin = 1 + _MARGIN if self.prefers_recency else 1
        spent = self._earned_blocks < -_LOSS_MAX * self._seen_blocks
        self.prefers_recency = spent or self._learned_hits <= self._recency_hits * margin


class Learned(EvictionPolicy):
    """Recency plus learned reuse, with LRU as its floor."""

    def __init__(self, capacity: int) -> None:
        self._memory = ReuseMemory(capacity)
        self._floor = _Floor(capacity)
        self._ages = self._memory.ages.astype(np.int64)
        self._age_list: list[int] = self._ages.tolist()
        self._wanted: npt.NDArray[np.intp] = np.full(capacity + 1, self._memory.levels[0], dtype=np.intp)
        self._due = np.zeros(capacity + 1, dtype=np.int64)
        self._stamp = np.zeros(capacity + 1, dtype=np.int64)  # clock of the release that counts; 0: not idle here
        self._since = np.zeros(capacity + 1, dtype=np.int64)
        self._stamps, self._dues = self._stamp.data, self._due.data
        self._queues: list[deque[_Segment]] = [deque() for _ in range(LEVELS)]
        self._late: list[tuple[int, int, int]] = []
        self._clock = 0
        self._ticks = 0
        self._newest_tick = 0
        self._late_order = 0
        self._epoch = 0
        self._count = 0
        self._stale = 0

    def __len__(self) -> int:
        return self._count

    @property
    def follows_recency(self) -> bool:
        """Whether it acts as LRU now."""
        return self._floor.prefers_recency

    def since(self, block_id: int) -> int:
        return int(self._since[block_id]) if self._stamps[block_id] else 0

    def observe(self, ids: Ids | list[int], keys: npt.NDArray[np.uint64]) -> None:
        if not len(keys):
            return
        levels, group = self._memory.observe(keys)
        self._wanted[ids] = levels[: len(ids)]
        clock = self._memory.clock
        self._floor.request(keys, group, clock, clock + self._memory.ages[levels])
        if self._memory.epoch != self._epoch:
            self._epoch = self._memory.epoch
            self._floor.end_epoch()

    def idle(self, ids: Ids | list[int], tick: int, run: bool = False) -> None:
        places = np.asarray(ids, dtype=np.intp)
        if not len(places):
            return
        self._count += len(places)
        self._since[places] = tick
        if tick < self._newest_tick:
            self._idle_late(places, tick)
            return
        self._newest_tick = tick
        self._ticks += 1
        self._clock = clock = self._clock + len(places)
        owed = np.searchsorted(self._ages, self._due[places] - clock)
        levels = np.maximum.accumulate(np.minimum(np.maximum(self._wanted[places], owed), LEVELS - 1))
        self._due[places] = clock + self._ages[levels]
        self._stamp[places] = clock
        listed: list[int] = places.tolist()
        first, last = int(levels[0]), int(levels[-1])
        if first == last or run:
            self._queues[last].append(_Segment(clock, listed, run))
            return
        edges = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(listed)]
        for start, end in pairwise(edges):
            self._queues[int(levels[start])].append(_Segment(clock, listed[start:end], False))

    def _idle_late(self, places: npt.NDArray[np.intp], tick: int) -> None:
        """Blocks that come from another class and keep their age, which is told in ticks."""
        blocks_per_tick = max(1, self._clock // max(1, self._ticks))
        clock = max(1, self._clock - (self._newest_tick - tick) * blocks_per_tick)
        for block_id in places.tolist():
            self._late_order += 1
            heapq.heappush(self._late, (clock, self._late_order, block_id))
            self._stamps[block_id] = -self._late_order
            self._dues[block_id] = clock

    def busy(self, ids: Ids | list[int]) -> None:
        self._stamp[ids] = 0
        self._count -= len(ids)
        self._stale += len(ids)
        if self._stale > self._count + 1024:
            self._sweep()

    def forget(self, ids: Ids | list[int]) -> None:
        self.busy(ids)
        self._due[ids] = 0

    def victims(self, count: int, usable: Usable | None = None) -> list[int]:
        taken: list[int] = []
        kept: list[tuple[int, _Segment]] = []
        kept_late: list[tuple[int, int, int]] = []
        while len(taken) < count:
            level = self._next_level()
            if level < 0:
                break
            if level == LEVELS:
                entry = heapq.heappop(self._late)
                if self._stamps[entry[2]] != -entry[1]:
                    self._stale -= 1
                elif usable is not None and not _is_usable(entry[2], usable):
                    kept_late.append(entry)
                else:
                    taken.append(entry[2])
                continue
            refused = self._take(self._queues[level], count, taken, usable)
            if refused is not None:
                kept.append((level, refused))
        for level, segment in reversed(kept):
            self._queues[level].appendleft(segment)
        for entry in kept_late:
            heapq.heappush(self._late, entry)
        self._stamp[taken] = 0
        self._due[taken] = 0
        self._count -= len(taken)
        return taken

    def _next_level(self) -> int:
        """The queue whose head goes next; LEVELS: the late blocks; -1: none is left."""
        best, best_level = 0, -1
        by_recency = self._floor.prefers_recency
        if self._late:
            best, best_level = self._late[0][0], LEVELS
        for level, queue in enumerate(self._queues):
            if queue:
                due = queue[0].clock if by_recency else queue[0].clock + self._age_list[level]
                if best_level < 0 or due < best:
                    best, best_level = due, level
        return best_level

    def _take(self, queue: deque[_Segment], count: int, taken: list[int], usable: Usable | None) -> _Segment | None:
        """Moves blocks of the head segment to `taken`; what may not go now, as a segment to be put back."""
        segment = queue[0]
        ids, clock, stamps = segment.ids, segment.clock, self._stamps
        cursor = segment.cursor
        refused: list[int] = []
        while cursor < len(ids) and (len(taken) < count or segment.run):
            block_id = ids[cursor]
            cursor += 1
            if stamps[block_id] != clock:
                self._stale -= 1
            elif usable is not None and not _is_usable(block_id, usable):
                refused.append(block_id)
            else:
                taken.append(block_id)
        segment.cursor = cursor
        if cursor == len(ids):
            queue.popleft()
        elif refused:  # the head is needed no more in this call: put the refused ones back before the rest
            segment.ids = refused + ids[cursor:]
            segment.cursor = 0
            return None
        return _Segment(clock, refused, segment.run) if refused else None

    def peek(self, count: int, usable: Usable | None = None) -> npt.NDArray[np.int32]:
        found: list[int] = []
        for block_id in self._in_order():
            if len(found) >= count:
                break
            if usable is None or _is_usable(block_id, usable):
                found.append(block_id)
        return np.array(found, dtype=np.int32)

    def _in_order(self) -> Iterator[int]:
        by_recency = self._floor.prefers_recency
        late = ((clock, LEVELS, -order, [block_id]) for clock, order, block_id in sorted(self._late))
        queues = [self._queue_in_order(level, by_recency) for level in range(LEVELS)]
        for _, _, stamp, ids in heapq.merge(*queues, late, key=lambda entry: entry[:2]):
            for block_id in ids:
                if self._stamps[block_id] == stamp:
                    yield block_id

    def _queue_in_order(self, level: int, by_recency: bool) -> Iterator[tuple[int, int, int, list[int]]]:
        age = 0 if by_recency else self._age_list[level]
        for segment in self._queues[level]:
            yield segment.clock + age, level, segment.clock, segment.ids[segment.cursor :]

    def _sweep(self) -> None:
        """Drops stale entries, so that hits without evictions do not grow the queues."""
        stamps = self._stamps
        for level, queue in enumerate(self._queues):
            fresh: deque[_Segment] = deque()
            for segment in queue:
                live = [one for one in segment.ids[segment.cursor :] if stamps[one] == segment.clock]
                if live:
                    fresh.append(_Segment(segment.clock, live, segment.run))
            self._queues[level] = fresh
        self._late = [entry for entry in self._late if stamps[entry[2]] == -entry[1]]
        heapq.heapify(self._late)
        self._stale = 0


def _is_usable(block_id: int, usable: Usable) -> bool:
    return bool(usable(np.array([block_id], dtype=np.int32))[0])
