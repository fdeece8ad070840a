"""The policy that learns reuse: recency plus what each class of blocks has earned, leaves first, never far below LRU.

Called by the pool under its caller's lock, like every policy. `observe` must be told of every request and `settle`
called now and then (a store does both in its step), or it is LRU; what a release and an eviction cost is LRU's.

A block is due at its last use plus the age of its level (`eviction_reuse`). Levels are few and their ages fixed, so
each is a queue in the order of release: the victim is at the head of the queue that is due first, and an operation
costs at most a look at LEVELS heads. A parent is never due before its child: levels of a release only rise from tail
to head, and a block that is used again keeps at least the time it had. A release first joins the queue of LRU;
`settle` moves it to those of its levels. What was released since goes last.

The floor (`eviction_floor`): while shadow caches show more hits by LRU, victims are chosen by last use alone, which is
LRU.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from allocator.eviction import LRU, TICK_BITS, Ids, Keys, Prices, Usable
from allocator.eviction_floor import Floor
from allocator.eviction_reuse import LEVELS, WORTHS, ReuseMemory

_GRAIN_TOKENS = 128


class Reuse:
    """What has been learned of the requests so far; shared by the policies of all classes of a pool.

    grain: of a chain every so many blocks are followed by the shadow caches, one standing for all.
    wanted[block id]: the level that the block's last request gave it.
    """

    def __init__(self, id_capacity: int, capacity_blocks: int, grain: int = 1) -> None:
        self._memory = ReuseMemory(capacity_blocks)
        self._floor = Floor(max(1, capacity_blocks // grain), grain)
        self._grain = grain
        self._epoch = 0
        self.ages: npt.NDArray[np.int64] = self._memory.ages.astype(np.int64)
        self.wanted: npt.NDArray[np.intp] = np.full(id_capacity + 1, self._memory.levels[0, 0], dtype=np.intp)

    @property
    def prefers_recency(self) -> bool:
        """Whether LRU is the better order now."""
        return self._floor.prefers_recency

    @property
    def clock(self) -> int:
        """Blocks seen so far: what ages are counted in."""
        return self._memory.clock

    def observe(
        self, keys: Keys, tables: Sequence[Ids | list[int]], prices: Prices | None = None, owner: int = 0
    ) -> None:
        if not len(keys):
            return
        worths = None if prices is None else self._memory.worths(prices)
        levels, group = self._memory.observe(keys, worths, owner)
        for ids in tables:
            self.wanted[ids] = levels[: len(ids)]
        clock, every = self._memory.clock, slice(self._grain - 1, None, self._grain)
        weights = None if worths is None else WORTHS[worths[every]]
        self._floor.request(keys[every], group, clock, clock + self._memory.ages[levels[every]], weights)
        if self._memory.epoch != self._epoch:
            self._epoch = self._memory.epoch
            self._floor.end_epoch()


def learned_together(group_count: int, block_tokens: int) -> Callable[[int], Learned]:
    """Makes the policies of one pool: what a chain shows is known to all classes, and to every group once."""
    grain = max(1, _GRAIN_TOKENS // block_tokens)
    made: list[Reuse] = []

    def policy(id_capacity: int) -> Learned:
        if not made:
            made.append(Reuse(id_capacity, id_capacity // group_count, grain))
        return Learned(id_capacity, made[0])

    return policy


_oldest = LRU.victim_one  # called for every block of a full pool


class _Segment:
    """Blocks of one level that one release made idle, tail first; `cursor` of them are consumed."""

    __slots__ = ("clock", "cursor", "ids", "run", "tick")

    def __init__(self, clock: int, tick: int, ids: list[int], run: bool) -> None:
        self.clock = clock
        self.tick = tick
        self.ids = ids
        self.run = run
        self.cursor = 0


class Learned(LRU):
    """Recency plus learned reuse, with LRU as its floor. Time is Reuse's clock; of releases since the blocks were
    placed last, as if they had come evenly."""

    def __init__(self, capacity: int, reuse: Reuse | None = None) -> None:
        super().__init__(capacity)
        self._reuse = Reuse(capacity, capacity) if reuse is None else reuse
        self._by_recency = True
        self._age_list: list[int] = self._reuse.ages.tolist()
        self._due = np.zeros(capacity + 1, dtype=np.int64)
        self._kept = np.zeros(capacity + 1, dtype=np.int64)  # of a block that was hit: when it would have been due
        self._queues: list[deque[_Segment]] = [deque() for _ in range(LEVELS)]
        self._heads: list[tuple[int, int]] = []  # heap of (due, level): no later than the queue's head; [] if none is
        self._clock = 0  # when blocks were placed last
        self._placed_tick = 0  # the newest release then
        self._blocks_per_tick = 0.0

    @property
    def follows_recency(self) -> bool:
        """Whether it acts as LRU now."""
        return self._by_recency

    def beside(self) -> Learned:
        return Learned(len(self._stamp) - 1, self._reuse)

    def observe(
        self, keys: Keys, tables: Sequence[Ids | list[int]], prices: Prices | None = None, owner: int = 0
    ) -> None:
        self._reuse.observe(keys, tables, prices, owner)

    # -- placing ------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        if self._reuse.prefers_recency != self._by_recency:
            self._by_recency = not self._by_recency  # what was placed keeps its time, so a parent must keep its own
            self._look_again()
        if self._by_recency or not self._segments:
            return
        self._stamp_all()
        self._fold_cursor()
        now, newest = max(self._clock, self._reuse.clock), self._newest >> TICK_BITS
        self._blocks_per_tick = (now - self._clock) / max(1, newest - self._placed_tick)
        self._clock, self._placed_tick = now, newest
        for tick, ids, run in self._segments:
            self._place(tick, np.atleast_1d(np.asarray(ids, dtype=np.intp)), run)
        self._segments.clear()
        self._look_again()

    def _clock_of(self, stamp: int) -> int:
        """About when a release was, for one since the placing before the last."""
        return self._clock - int(((self._newest - stamp) >> TICK_BITS) * self._blocks_per_tick)

    def _place(self, tick: int, places: npt.NDArray[np.intp], run: bool) -> None:
        """Moves what is left of one release to the queues of its levels."""
        clock = self._clock_of(tick)
        if self._stale:
            live = places[self._stamp[places] == tick]
            self._stale -= len(places) - len(live)
            places = live
            if not len(places):
                return
        owed = np.searchsorted(self._reuse.ages, self._kept[places] - clock)
        self._kept[places] = 0
        levels = np.maximum.accumulate(np.minimum(np.maximum(self._reuse.wanted[places], owed), LEVELS - 1))
        self._due[places] = clock + self._reuse.ages[levels]
        listed: list[int] = places.tolist()
        first, last = int(levels[0]), int(levels[-1])
        if first == last or run:
            self._queues[last].append(_Segment(clock, tick, listed, run))
            return
        edges = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(listed)]
        for start, end in pairwise(edges):
            self._queues[int(levels[start])].append(_Segment(clock, tick, listed[start:end], False))

    def busy(self, ids: Ids | list[int]) -> None:
        if self._heads:
            self._kept[ids] = self._due[ids]
        super().busy(ids)

    def forget(self, ids: Ids | list[int]) -> None:
        super().busy(ids)

    # -- victims ------------------------------------------------------------------------------------------------

    def victim_one(self) -> int:
        if not self._heads:
            if self._stale and self._unstamped:
                self._stamp_all()
            return _oldest(self)
        if self._late:
            return -1
        stamps = self._stamps
        while (queue := self._next_queue()) is not None:
            segment = queue[0]
            if segment.run:
                return -1
            block_id = segment.ids[segment.cursor]
            segment.cursor += 1
            if segment.cursor == len(segment.ids):
                queue.popleft()
            if not self._stale or stamps[block_id] == segment.tick:
                self._count -= 1
                return block_id
            self._stale -= 1
        return self.victim_one()

    def victims(self, count: int, usable: Usable | None = None) -> Ids | list[int]:
        if not self._heads:
            return super().victims(count, usable)
        taken: list[int] = []
        kept: list[tuple[int, _Segment]] = []
        kept_late: list[tuple[int, int, int]] = []
        while len(taken) < count and (queue := self._next_queue()) is not None:
            due, level = self._heads[0]
            if self._late and self._late_is_next(due):
                entry = heapq.heappop(self._late)
                if self._stamps[entry[2]] != -entry[1]:
                    self._stale -= 1
                elif usable is not None and not _is_usable(entry[2], usable):
                    kept_late.append(entry)
                else:
                    taken.append(entry[2])
                continue
            refused = self._take(queue, count, taken, usable)
            if refused is not None:
                kept.append((level, refused))
        for level, segment in reversed(kept):
            self._queues[level].appendleft(segment)
        if kept:
            self._look_again()
        for entry in kept_late:
            heapq.heappush(self._late, entry)
        self._count -= len(taken)
        if len(taken) < count and (self._segments or self._late):
            rest = super().victims(count - len(taken), usable)
            taken += rest if isinstance(rest, list) else rest.tolist()
        return taken

    def _next_queue(self) -> deque[_Segment] | None:
        """The queue whose head goes next, of two at once the lower level's; None when nothing is placed any more."""
        heads = self._heads
        while heads:
            due, level = heads[0]
            queue = self._queues[level]
            if queue:
                head = queue[0]
                now_due = head.tick if self._by_recency else head.clock + self._age_list[level]
                if now_due == due:
                    return queue
                heapq.heapreplace(heads, (now_due, level))
            else:
                heapq.heappop(heads)
        return None

    def _look_again(self) -> None:
        """Heads of the queues from scratch: blocks came in at other places than the ends, or the order is another."""
        self._heads = [
            (queue[0].tick if self._by_recency else queue[0].clock + self._age_list[level], level)
            for level, queue in enumerate(self._queues)
            if queue
        ]
        heapq.heapify(self._heads)

    def _late_is_next(self, due: int) -> bool:
        """Whether the oldest block that came late, with its age in ticks, goes before a head that is due then."""
        tick = self._late[0][0]
        return (tick if self._by_recency else self._late_due(tick)) < due

    def _late_due(self, tick: int) -> int:
        return max(1, self._clock_of(tick))

    def _take(self, queue: deque[_Segment], count: int, taken: list[int], usable: Usable | None) -> _Segment | None:
        """Moves blocks of the head segment to `taken`; what may not go now, as a segment to be put back."""
        segment = queue[0]
        ids, tick, stamps = segment.ids, segment.tick, self._stamps
        cursor = segment.cursor
        if usable is None and not self._stale:
            end = len(ids) if segment.run else min(len(ids), cursor + count - len(taken))
            taken += ids[cursor:end]
            segment.cursor = end
            if end == len(ids):
                queue.popleft()
            return None
        refused: list[int] = []
        while cursor < len(ids) and (len(taken) < count or segment.run):
            block_id = ids[cursor]
            cursor += 1
            if stamps[block_id] != tick:
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
        return _Segment(segment.clock, tick, refused, segment.run) if refused else None

    # -- looking ------------------------------------------------------------------------------------------------

    def peek(self, count: int, usable: Usable | None = None) -> npt.NDArray[np.int32]:
        if not self._heads:
            return super().peek(count, usable)
        self._stamp_all()
        found: list[int] = []
        for block_id in self._in_due_order():
            if len(found) >= count:
                break
            if usable is None or _is_usable(block_id, usable):
                found.append(block_id)
        return np.array(found, dtype=np.int32)

    def _in_due_order(self) -> Iterator[int]:
        self._fold_cursor()
        late = (
            (tick if self._by_recency else self._late_due(tick), -1, -order, [block_id])
            for tick, order, block_id in sorted(self._late)
        )
        queues = [self._queue_in_order(level) for level in range(LEVELS)]
        for _, _, tick, ids in heapq.merge(*queues, late, key=lambda entry: entry[:2]):
            yield from (block_id for block_id in ids if self._stamps[block_id] == tick)
        for tick, unplaced, _ in self._segments:
            array = np.atleast_1d(np.asarray(unplaced, dtype=np.int32))
            yield from array[self._stamp[array] == tick].tolist()

    def _queue_in_order(self, level: int) -> Iterator[tuple[int, int, int, list[int]]]:
        for one in self._queues[level]:
            due = one.tick if self._by_recency else one.clock + self._age_list[level]
            yield due, level, one.tick, one.ids[one.cursor :]

    def _sweep(self) -> None:
        """Drops stale entries, so that hits without evictions do not grow the queues."""
        stamps = self._stamps
        for level, queue in enumerate(self._queues):
            fresh: deque[_Segment] = deque()
            for one in queue:
                live = [block_id for block_id in one.ids[one.cursor :] if stamps[block_id] == one.tick]
                if live:
                    fresh.append(_Segment(one.clock, one.tick, live, one.run))
            self._queues[level] = fresh
        self._look_again()
        super()._sweep()


def _is_usable(block_id: int, usable: Usable) -> bool:
    return bool(usable(np.array([block_id], dtype=np.int32))[0])
