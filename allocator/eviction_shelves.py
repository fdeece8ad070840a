"""Priorities above any policy: idle blocks of a class lie on shelves, one a priority, each with a policy of its own.

The lowest shelf gives first; among blocks of one priority their policy decides, as if there were no other. Beside that
it knows, of each tenant, which of its blocks are idle and in which order they would go when it is over its quota.
Called by the pool like every policy, under its caller's lock. A pool without marks has no shelves.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from allocator.block_marks import NOBODY, PRIORITY_DEFAULT, BlockMarks
from allocator.eviction import EvictionPolicy, Ids, Keys, Prices, Usable


class TenantBlocks:
    """The idle blocks of one tenant, over all classes: of the lowest priority the longest idle goes first."""

    def __init__(self) -> None:
        self.idle_bytes = 0
        self._levels: dict[int, OrderedDict[int, int]] = {}  # priority -> block id -> slot bytes, oldest first

    def add(self, block_id: int, priority: int, slot_bytes: int) -> None:
        self._levels.setdefault(priority, OrderedDict())[block_id] = slot_bytes
        self.idle_bytes += slot_bytes

    def remove(self, block_id: int, priority: int) -> None:
        level = self._levels[priority]
        self.idle_bytes -= level.pop(block_id)
        if not level:
            del self._levels[priority]

    def first(self, byte_count: int, usable: Usable) -> list[int]:
        """Blocks of at least so many bytes, or all that may go; they are not taken out."""
        found: list[int] = []
        for priority in sorted(self._levels):
            for block_id, slot_bytes in self._levels[priority].items():
                if byte_count <= 0:
                    return found
                if usable(np.array([block_id], dtype=np.int32))[0]:
                    found.append(block_id)
                    byte_count -= slot_bytes
        return found


class Shelves(EvictionPolicy):
    """See the module. `plain`: the policy of blocks without a mark, with all that it knows."""

    def __init__(
        self, plain: EvictionPolicy, marks: BlockMarks, tenants: dict[int, TenantBlocks], slot_bytes: int
    ) -> None:
        self._plain = plain
        self._shelves = {PRIORITY_DEFAULT: plain}
        self._order = [PRIORITY_DEFAULT]  # priorities of the shelves, rising
        self._marks = marks
        self._tenants = tenants
        self._slot_bytes = slot_bytes
        self._at: dict[int, tuple[int, int]] = {}  # block on another shelf, or with a mark -> (its shelf, tenant)
        self._ends: list[tuple[float, int, int]] = []  # heap of (end of its priority, when it was put there, block)
        self._put_count = 0

    @property
    def plain(self) -> EvictionPolicy:
        """The policy of blocks without a mark."""
        return self._plain

    def beside(self) -> EvictionPolicy:
        return self._plain.beside()

    def __len__(self) -> int:
        return sum(len(one) for one in self._shelves.values())

    def count_up_to(self, priority: int) -> int:
        return sum(len(shelf) for level, shelf in self._shelves.items() if level <= priority)

    def since(self, block_id: int) -> int:
        return self._shelf_of(block_id).since(block_id)

    def since_many(self, ids: Ids) -> npt.NDArray[np.int64]:
        if not self._at:
            return self._plain.since_many(ids)
        usual = PRIORITY_DEFAULT, NOBODY
        priorities = np.array([self._at.get(block_id, usual)[0] for block_id in ids.tolist()])
        ticks = np.zeros(len(ids), dtype=np.int64)
        for priority in set(priorities.tolist()):
            here = priorities == priority
            ticks[here] = self._shelves[priority].since_many(ids[here])
        return ticks

    def observe(
        self, keys: Keys, tables: Sequence[Ids | list[int]], prices: Prices | None = None, owner: int = 0
    ) -> None:
        self._plain.observe(keys, tables, prices, owner)

    def settle(self) -> None:
        for one in self._shelves.values():
            one.settle()

    # -- in and out ---------------------------------------------------------------------------------------------

    def idle(self, ids: Ids | list[int], tick: int, run: bool = False) -> None:
        if not len(self._marks):
            self._plain.idle(ids, tick, run)
            return
        listed: list[int] = ids if isinstance(ids, list) else ids.tolist()
        steps = [self._marks.step(block_id) for block_id in listed]
        if run:  # kept or dropped as one
            steps = [max(steps)] * len(steps)
        for block_id, (priority, end) in zip(listed, steps, strict=True):
            self._note(block_id, priority, end)
        for priority, part in groupby(zip(listed, steps, strict=True), key=lambda pair: pair[1][0]):
            self._shelf(priority).idle([block_id for block_id, _ in part], tick, run)

    def idle_one(self, block_id: int, tick: int) -> None:
        if len(self._marks):
            self.idle([block_id], tick)
        else:
            self._plain.idle_one(block_id, tick)

    def busy(self, ids: Ids | list[int]) -> None:
        for shelf, part in self._taken_from(ids):
            shelf.busy(part)

    def forget(self, ids: Ids | list[int]) -> None:
        for shelf, part in self._taken_from(ids):
            shelf.forget(part)

    def _note(self, block_id: int, priority: int, end: float) -> None:
        mark = self._marks.get(block_id)
        if mark is None and priority == PRIORITY_DEFAULT:
            return
        tenant = NOBODY if mark is None else mark.tenant  # one without a mark is where the rest of its run is
        self._at[block_id] = priority, tenant
        if tenant != NOBODY:
            self._tenants.setdefault(tenant, TenantBlocks()).add(block_id, priority, self._slot_bytes)
        if end != float("inf"):
            self._put_count += 1
            heapq.heappush(self._ends, (end, self._put_count, block_id))

    def _leave(self, block_id: int) -> int:
        """Notes that a block is idle no more; the shelf that it was on."""
        priority, tenant = self._at.pop(block_id, (PRIORITY_DEFAULT, NOBODY))
        if tenant != NOBODY:
            self._tenants[tenant].remove(block_id, priority)
        return priority

    def _taken_from(self, ids: Ids | list[int]) -> list[tuple[EvictionPolicy, Ids | list[int]]]:
        if not self._at:
            return [(self._plain, ids)]
        parts: dict[int, list[int]] = {}
        for block_id in ids if isinstance(ids, list) else ids.tolist():
            parts.setdefault(self._leave(block_id), []).append(block_id)
        return [(self._shelves[priority], part) for priority, part in parts.items()]

    def _shelf_of(self, block_id: int) -> EvictionPolicy:
        return self._shelves[self._at[block_id][0]] if block_id in self._at else self._plain

    def _shelf(self, priority: int) -> EvictionPolicy:
        found = self._shelves.get(priority)
        if found is None:
            found = self._shelves[priority] = self._plain.beside()
            self._order = sorted(self._shelves)
        return found

    # -- victims ------------------------------------------------------------------------------------------------

    def victim_one(self) -> int:
        for priority in self._order:
            shelf = self._shelves[priority]
            if len(shelf):
                block_id = shelf.victim_one()
                if block_id >= 0 and self._at:
                    self._gone([block_id])
                return block_id
        return -1

    def victims(self, count: int, usable: Usable | None = None) -> Ids | list[int]:
        taken: list[int] = []
        for priority in self._order:
            if len(taken) >= count:
                break
            shelf = self._shelves[priority]
            if len(shelf):
                found = shelf.victims(count - len(taken), usable)
                taken += found if isinstance(found, list) else found.tolist()
        if self._at:
            self._gone(taken)
        return taken

    def _gone(self, ids: list[int]) -> None:
        for block_id in ids:
            if block_id in self._at:
                self._leave(block_id)
        self._marks.drop(ids)

    def peek(self, count: int, usable: Usable | None = None) -> npt.NDArray[np.int32]:
        found = [np.empty(0, np.int32)]
        for priority in self._order:
            if count > 0:
                found.append(self._shelves[priority].peek(count, usable))
                count -= len(found[-1])
        return np.concatenate(found)

    # -- time ---------------------------------------------------------------------------------------------------

    def expire(self, now: float, count: int) -> int:
        """Moves blocks whose priority has ended, with their age, to the shelf of the next; `count` at most."""
        moved = 0
        while moved < count and self._ends and self._ends[0][0] <= now:
            _, _, block_id = heapq.heappop(self._ends)
            if block_id not in self._at:
                continue
            priority, end = self._marks.step(block_id)
            if priority == self._at[block_id][0]:
                continue
            shelf = self._shelf_of(block_id)
            tick = shelf.since(block_id)
            shelf.forget([block_id])
            self._leave(block_id)
            self._note(block_id, priority, end)
            self._shelf(priority).idle([block_id], tick)
            moved += 1
        return moved
