"""Which idle block goes first: the policy interface and LRU, its floor. One policy object a slot class.

Called by the pool only, under its caller's lock. The pool tells a policy when blocks become idle, busy again or are
gone;
the policy answers with victims. Ticks grow with every release of the pool and are shared between classes, so a block
that
changes class keeps its age. A sliding-window run is one hit point: when one of its blocks is a victim, the rest is too.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = "npt.NDArray[np.int32] | npt.NDArray[np.intp]"
Keys: TypeAlias = "npt.NDArray[np.uint64]"
Prices: TypeAlias = "npt.NDArray[np.float64]"
Usable: TypeAlias = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.bool_]]
_Segment: TypeAlias = tuple[int, "int | list[int] | Ids", bool]

_SMALL = 32
TICK_BITS = 20


class EvictionPolicy(ABC):
    """Order of the idle blocks of one slot class. Batches are in the order of release; arrays are int32 or intp."""

    @abstractmethod
    def __len__(self) -> int:
        """Idle blocks it knows."""

    @abstractmethod
    def idle(self, ids: Ids | list[int], tick: int, run: bool = False) -> None:
        """Blocks became idle; the first of `ids` is to go first. `run`: they are kept or dropped as one."""

    @abstractmethod
    def busy(self, ids: Ids | list[int]) -> None:
        """Idle blocks were hit and have a reference again."""

    @abstractmethod
    def forget(self, ids: Ids | list[int]) -> None:
        """Idle blocks went away for another reason (dropped by name, cooled into another class)."""

    @abstractmethod
    def victims(self, count: int, usable: Usable | None = None) -> Ids | list[int]:
        """Takes out at least `count` blocks (fewer when there are no more; more when a run ends later).

        `usable` tells which of some ids may go now; the others keep their place. None: all may.
        """

    @abstractmethod
    def peek(self, count: int, usable: Usable | None = None) -> npt.NDArray[np.int32]:
        """The `count` blocks nearest to eviction, without taking them out."""

    @abstractmethod
    def since(self, block_id: int) -> int:
        """Tick of the release that made the block idle."""

    def since_many(self, ids: Ids) -> npt.NDArray[np.int64]:
        """`since` of each."""
        return np.array([self.since(block_id) for block_id in ids.tolist()], dtype=np.int64)

    @abstractmethod
    def beside(self) -> EvictionPolicy:
        """An empty policy of this kind, for blocks of another priority; what was learned is shared."""

    def count_up_to(self, priority: int) -> int:
        """Idle blocks of at most that priority; a policy alone knows of none above the usual one."""
        return len(self)

    def observe(  # noqa: B027 - most need nothing
        self, keys: Keys, tables: Sequence[Ids | list[int]], prices: Prices | None = None, owner: int = 0
    ) -> None:
        """A request's full blocks, head first, about when they are released: what a policy that learns is told.

        keys: uint64[n], well mixed (of a block hash: its first eight bytes); tables: of each group the ids of the
        first of them that are resident, -1 where a block is not; prices: float64[n], what losing each would cost, in
        seconds a byte or on any other scale; owner: who shares these blocks with nobody else (a tenant, an adapter), as
        64 bits. Told to any policy of a pool, once.
        """

    def settle(self) -> None:  # noqa: B027 - most put nothing off
        """Work that idle and observe have put off. To be called often, when nobody waits."""

    def idle_one(self, block_id: int, tick: int) -> None:
        """`idle` for one block."""
        self.idle([block_id], tick)

    def victim_one(self) -> int:
        """`victims(1)` when that is one block and all are usable; -1 when the batch form has to be asked."""
        return -1


class LRU(EvictionPolicy):
    """Least recently released first. Since tables release tail first, that is leaves first.

    A queue of segments, one a release; a stamp a block says which segment counts, so a block that was hit again is
    skipped when its old segment comes up. Blocks that enter with an older tick wait in a heap beside the queue.
    No two entries of a block have the same stamp, however often it comes and goes within a tick: a segment's is its
    tick with a count below it, one in the heap has its number, negative; 0 is none.
    """

    def __init__(self, capacity: int) -> None:
        self._stamp = np.zeros(capacity + 1, dtype=np.int64)
        self._stamps = self._stamp.data
        self._segments: deque[_Segment] = deque()
        self._late: list[tuple[int, int, int]] = []  # heap of (tick as in a stamp, number, block)
        self._late_ticks: dict[int, int] = {}  # block -> tick, at least of those in the heap
        self._cursor = 0  # consumed entries of the first segment, then a list
        self._newest = 0  # the last segment's stamp
        self._late_order = 0
        self._count = 0
        self._stale = 0  # entries of blocks that were hit again or went away since
        self._unstamped = 0  # segments at the end (never more than there are) whose blocks have no stamp yet

    def __len__(self) -> int:
        return self._count

    def beside(self) -> EvictionPolicy:
        return LRU(len(self._stamp) - 1)

    def since(self, block_id: int) -> int:
        self._stamp_all()
        stamp = self._stamps[block_id]
        return stamp >> TICK_BITS if stamp >= 0 else self._late_ticks[block_id]

    def since_many(self, ids: Ids) -> npt.NDArray[np.int64]:
        self._stamp_all()
        stamps = self._stamp[ids]
        ticks = stamps >> TICK_BITS
        for place in np.flatnonzero(stamps < 0).tolist():
            ticks[place] = self._late_ticks[int(ids[place])]
        return ticks

    def idle(self, ids: Ids | list[int], tick: int, run: bool = False) -> None:
        size = len(ids)
        if size <= 1:
            if size:
                self.idle_one(int(ids[0]), tick)
            return
        stamp = tick << TICK_BITS
        if stamp <= self._newest:
            if tick < self._newest >> TICK_BITS:
                self._idle_late(ids, tick)
                return
            stamp = self._newest + 1
        self._count += size
        self._newest = stamp
        self._unstamped += 1
        self._segments.append((stamp, ids, run))

    def _stamp_all(self) -> None:
        """Writes the stamps of the newest segments. Put off until something needs them: eviction alone never does."""
        segments, stamps = self._segments, self._stamps
        for place in range(-min(self._unstamped, len(segments)), 0):
            tick, ids, _ = segments[place]
            if isinstance(ids, int):
                stamps[ids] = tick
            elif isinstance(ids, list):
                for block_id in ids:
                    stamps[block_id] = tick
            else:
                self._stamp[ids] = tick
        self._unstamped = 0

    def _idle_late(self, ids: Ids | list[int], tick: int) -> None:
        for block_id in ids:
            self._late_order += 1
            heapq.heappush(self._late, (tick << TICK_BITS, self._late_order, int(block_id)))
            self._late_ticks[int(block_id)] = tick
            self._stamps[block_id] = -self._late_order
        self._count += len(ids)

    def idle_one(self, block_id: int, tick: int) -> None:
        stamp = tick << TICK_BITS
        if stamp <= self._newest:
            if tick < self._newest >> TICK_BITS:
                self._idle_late([block_id], tick)
                return
            stamp = self._newest + 1
        self._newest = stamp
        self._segments.append((stamp, block_id, False))
        self._unstamped += 1
        self._count += 1

    def busy(self, ids: Ids | list[int]) -> None:
        if self._unstamped:
            self._stamp_all()
        if isinstance(ids, list) and len(ids) <= _SMALL:
            for block_id in ids:
                self._stamps[block_id] = 0
        else:
            self._stamp[ids] = 0
        self._count -= len(ids)
        self._stale += len(ids)
        if self._stale > self._count + 1024:
            self._sweep()

    def forget(self, ids: Ids | list[int]) -> None:
        self.busy(ids)

    def victim_one(self) -> int:
        segments, stamps = self._segments, self._stamps
        if self._late:
            return -1
        while segments:
            tick, block_id, _ = segments[0]
            if type(block_id) is not int:
                few = self._victims_few(1, runs=False)  # stale entries may lie before a run, which goes as one
                return few[0] if few else -1
            segments.popleft()
            if not self._stale or stamps[block_id] == tick:
                self._count -= 1
                return block_id
            self._stale -= 1
        return -1

    def victims(self, count: int, usable: Usable | None = None) -> Ids | list[int]:
        if count <= _SMALL and usable is None and not self._late:
            return self._victims_few(count)
        self._stamp_all()
        self._fold_cursor()
        taken: list[Ids | list[int]] = []
        kept: list[_Segment] = []
        kept_late: list[tuple[int, int, int]] = []
        need = count
        segments = self._segments
        while need > 0 and (segments or self._late):
            if self._late and (not segments or self._late[0][0] < segments[0][0]):
                tick, order, block_id = heapq.heappop(self._late)
                if self._stamps[block_id] != -order:
                    self._stale -= 1
                    continue
                if usable is not None and not usable(np.array([block_id], dtype=np.int32))[0]:
                    kept_late.append((tick, order, block_id))
                    continue
                taken.append([block_id])
                need -= 1
                continue
            tick, ids, run = segments.popleft()
            size = 1 if isinstance(ids, int) else len(ids)
            chosen, rest = self._split(tick, ids, need, run, usable)
            self._stale -= size - len(chosen) - len(rest)
            if len(rest):
                kept.append((tick, rest, run))
            if len(chosen):
                taken.append(chosen)
                need -= len(chosen)
        segments.extendleft(reversed(kept))
        for entry in kept_late:
            heapq.heappush(self._late, entry)
        victims = _joined(taken)
        self._count -= len(victims)
        return victims

    def _victims_few(self, count: int, *, runs: bool = True) -> list[int]:
        """`victims` for a small count, all usable, in plain Python; without `runs` it ends before a run."""
        segments = self._segments
        taken: list[int] = []
        need = count
        if not self._stale and not self._cursor:  # whole segments need no look at their entries
            while need > 0 and segments:
                _, ids, run = segments[0]
                if isinstance(ids, int):
                    taken.append(ids)
                    need -= 1
                elif not isinstance(ids, list) or (len(ids) > need and not run) or (run and not runs):
                    break
                else:
                    taken += ids
                    need -= len(ids)
                segments.popleft()
            if need <= 0:
                self._count -= len(taken)
                return taken
        stamps = self._stamps
        if self._unstamped:
            self._stamp_all()
        while need > 0 and segments:
            tick, ids, run = segments[0]
            if isinstance(ids, int):
                segments.popleft()
                if stamps[ids] == tick:
                    taken.append(ids)
                    need -= 1
                else:
                    self._stale -= 1
                continue
            if run and not runs:
                break
            if not isinstance(ids, list):
                ids = ids.tolist()
                segments[0] = (tick, ids, run)
            cursor = start = self._cursor
            end = len(ids)
            before = need
            while cursor < end and (run or need > 0):
                block_id = ids[cursor]
                cursor += 1
                if stamps[block_id] == tick:
                    taken.append(block_id)
                    need -= 1
            self._stale -= cursor - start - (before - need)
            if cursor < end:
                self._cursor = cursor
            else:
                segments.popleft()
                self._cursor = 0
        self._count -= len(taken)
        return taken

    def _fold_cursor(self) -> None:
        """Cuts what `_victims_few` has consumed off the first segment."""
        if self._cursor:
            tick, ids, run = self._segments[0]
            assert isinstance(ids, list)
            self._segments[0] = (tick, ids[self._cursor :], run)
            self._cursor = 0

    def _split(
        self, tick: int, ids: int | list[int] | Ids, need: int, run: bool, usable: Usable | None
    ) -> tuple[Ids | list[int], Ids | list[int]]:
        """(blocks to take now, blocks of this segment that stay), stale entries dropped."""
        if isinstance(ids, int):
            ids = [ids]
        if isinstance(ids, list) and usable is None:
            stamps = self._stamps
            live = [block_id for block_id in ids if stamps[block_id] == tick] if self._stale else ids
            return (live, []) if run or len(live) <= need else (live[:need], live[need:])
        array = np.asarray(ids, dtype=np.intp)
        fresh = array[self._stamp[array] == tick] if self._stale else array
        if usable is None:
            if run or len(fresh) <= need:
                return fresh, []
            return fresh[:need], fresh[need:]
        allowed = usable(fresh.astype(np.int32))
        places = np.flatnonzero(allowed)
        if not run:
            places = places[:need]
        stay = np.ones(len(fresh), dtype=bool)
        stay[places] = False
        return fresh[places], fresh[stay]

    def peek(self, count: int, usable: Usable | None = None) -> npt.NDArray[np.int32]:
        self._stamp_all()
        self._fold_cursor()
        late = sorted(self._late)
        found: list[npt.NDArray[np.int32]] = []
        need = count
        for tick, ids in self._in_order(late):
            array = np.atleast_1d(np.asarray(ids, dtype=np.int32))
            array = array[self._stamp[array] == tick]
            if usable is not None and len(array):
                array = array[usable(array)]
            found.append(array[:need].copy())
            need -= len(found[-1])
            if need <= 0:
                break
        return np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def _in_order(self, late: list[tuple[int, int, int]]) -> Iterator[tuple[int, int | list[int] | Ids]]:
        place = 0
        for tick, ids, _ in self._segments:
            while place < len(late) and late[place][0] < tick:
                yield -late[place][1], late[place][2]
                place += 1
            yield tick, ids
        for _, order, block_id in late[place:]:
            yield -order, block_id

    def _sweep(self) -> None:
        """Drops stale entries, so that hits without evictions do not grow the queue."""
        self._fold_cursor()
        fresh: deque[_Segment] = deque()
        for tick, ids, run in self._segments:
            array = np.atleast_1d(np.asarray(ids, dtype=np.int32))
            array = array[self._stamp[array] == tick]
            if len(array):
                fresh.append((tick, array if len(array) > 1 else int(array[0]), run))
        self._segments = fresh
        self._stale = 0
        self._late = [entry for entry in self._late if self._stamps[entry[2]] == -entry[1]]
        heapq.heapify(self._late)
        self._late_ticks = {block_id: self._late_ticks[block_id] for _, _, block_id in self._late}


def _joined(pieces: list[Ids | list[int]]) -> Ids:
    arrays = [np.asarray(piece, dtype=np.intp) for piece in pieces]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays or [np.empty(0, dtype=np.intp)])
