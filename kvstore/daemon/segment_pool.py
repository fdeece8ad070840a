"""The daemon's memory budget in segments, which every arena takes from. Under the daemon's lock, but for `make`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from allocator.errors import CapacityError
from kvstore.daemon.arena import ArenaSegment

if TYPE_CHECKING:
    from kvstore.daemon.segments import SegmentMemory


MAKING_SECONDS = 0.1
"""Longest wait of a store for the last of the memory."""


class SegmentPool:
    """The daemon's memory budget in segments; every arena takes from it. Numbers are never used twice.

    make: what makes one segment's memory; CapacityError from it lowers the budget to what there is.
    """

    def __init__(self, budget_bytes: int, segment_bytes: int, make: Callable[[int], SegmentMemory]) -> None:
        self.segment_bytes = segment_bytes
        self.limit = budget_bytes // segment_bytes
        self.made = 0
        self.making = 0  # of these, not there yet
        self.ready: deque[SegmentMemory] = deque()
        self._make = make
        self._next_number = 1

    def take(self) -> ArenaSegment | None:
        """A segment, or None when the budget is spent. Reserves memory when none is ready."""
        memory: SegmentMemory | None = None
        if self.ready:
            memory = self.ready.popleft()
        elif self.begin_make():
            self.finish_make(self.make())
            memory = self.ready.popleft() if self.ready else None
        if memory is None:
            return None
        number, self._next_number = self._next_number, self._next_number + 1
        return ArenaSegment(number, memory)

    def make_first(self) -> None:
        """Before anybody asks: one that is only being made could not be given, and a store would be told of no room."""
        if self.begin_make():
            self.finish_make(self.make())

    def begin_make(self) -> bool:
        """Claim room for one more in the budget. Under the lock."""
        if self.made >= self.limit:
            return False
        self.made += 1
        self.making += 1
        return True

    @property
    def is_making_last(self) -> bool:
        """Nothing is left of the budget but what is on its way. Under the lock."""
        return self.making > 0 and self.made >= self.limit

    def make(self) -> SegmentMemory | None:
        """The memory claimed; None when the system has none. Takes milliseconds: needs no lock."""
        try:
            return self._make(self.segment_bytes)
        except CapacityError:
            return None

    def finish_make(self, memory: SegmentMemory | None) -> None:
        """Under the lock. What the system has is the budget from then on."""
        self.making -= 1
        if memory is None:
            self.made -= 1
            self.limit = self.made
        else:
            self.ready.append(memory)

    def renew(self, segment: ArenaSegment) -> None:
        """A segment that left one domain: its memory goes, and the budget has room for a fresh one."""
        segment.memory.close()
        self.made -= 1

    def close(self) -> None:
        while self.ready:
            self.ready.pop().close()
