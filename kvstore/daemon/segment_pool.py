"""The daemon's memory budget in segments, which every arena takes from. Under the daemon's lock, but for `make`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from allocator.errors import CapacityError
from kvstore.daemon.slots import ArenaSegment

if TYPE_CHECKING:
    from kvstore.daemon.segments import SegmentMemory


_NICE = 10  # where pages lie anywhere, the system works for them as long as it copies the bytes they will hold
_LOG = logging.getLogger(__name__)
_AGAIN_SECONDS = 60.0  # until memory that the system refused is asked for again
MAKING_SECONDS = 0.1
"""Longest wait of a store for the last of the memory."""


class SegmentPool:
    """The daemon's memory budget in segments; every arena takes from it. Numbers are never used twice.

    make: what makes one segment's memory, at leisure or not; the system's refusal lowers the budget to what there is,
    until one more is to be had: the thread that prepares tries once in again_seconds.
    forget: is told of memory that is given back for good.
    """

    def __init__(
        self,
        budget_bytes: int,
        segment_bytes: int,
        make: Callable[[int, bool], SegmentMemory],
        forget: Callable[[SegmentMemory], None] | None = None,
        again_seconds: float = _AGAIN_SECONDS,
    ) -> None:
        self.segment_bytes = segment_bytes
        self.wanted = self.limit = budget_bytes // segment_bytes
        self.made = 0
        self._stopped = False
        self.making = 0  # of these, not there yet
        self.ready: deque[SegmentMemory] = deque()
        self.counts: Counter[str] = Counter()  # why memory could not be made
        self._make, self._forget = make, forget
        self._again_seconds, self._again_at = again_seconds, 0.0
        self._is_trying_again = False
        self._next_number = 1

    def take(self) -> ArenaSegment | None:
        """A segment, or None when the budget is spent. Reserves memory when none is ready."""
        memory: SegmentMemory | None = None
        if self.ready:
            memory = self.ready.popleft()
        elif self.begin_make():
            self.finish_make(self.make())
            memory = self.ready.popleft() if self.ready else None
        return None if memory is None else self._numbered(memory)

    def take_over(self, memory: SegmentMemory) -> ArenaSegment | None:
        """One that an earlier daemon has filled; None when the budget has no room for it."""
        if not self.begin_make():
            return None
        self.making -= 1
        return self._numbered(memory)

    def _numbered(self, memory: SegmentMemory) -> ArenaSegment:
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
        return self.making > self._is_trying_again and self.made >= self.limit

    @property
    def is_short(self) -> bool:
        """None is ready, and the budget has room for one."""
        return not self.ready and self.made < self.limit

    def make(self, *, at_leisure: bool = False) -> SegmentMemory | None:
        """The memory claimed; None when the system has none. Takes milliseconds, at leisure perhaps longer: needs no
        lock."""
        try:
            return self._make(self.segment_bytes, at_leisure)
        except CapacityError:
            self.counts["segments_failed_room"] += 1
        except (OSError, MemoryError) as error:  # the system's other refusals: a file's greatest length, no permission
            self.counts[f"segments_failed_{getattr(error, 'errno', None) or 'memory'}"] += 1
            _LOG.exception("kvstore: shared memory could not be made")
        return None

    def finish_make(self, memory: SegmentMemory | None) -> None:
        """Under the lock. What the system has is the budget from then on."""
        self.making -= 1
        if memory is None:
            self.made -= 1
            self.limit = self.made
            self._again_at = time.monotonic() + self._again_seconds
        else:
            self.ready.append(memory)

    def _begin_again(self) -> bool:
        """Claim one that the system has refused, beyond the budget as it is: no store waits for it. Under the lock."""
        if self.limit >= self.wanted or time.monotonic() < self._again_at:
            return False
        self.limit += 1
        self._is_trying_again = True
        return self.begin_make()

    def renew(self, segment: ArenaSegment) -> None:
        """A segment that left one domain: its memory goes, and the budget has room for a fresh one."""
        if self._forget is not None:
            self._forget(segment.memory)
        segment.memory.close()
        self.made -= 1

    def prepare(self, made: threading.Condition, wake: threading.Event, *, all_of_it: bool) -> threading.Thread:
        """Reserve memory ahead of its use until `stop`, on a thread that is started. made: told of it, on the daemon's
        lock."""
        work = partial(self._prepare, made, wake, all_of_it)
        thread = threading.Thread(target=work, name="kvstore-segments", daemon=True)
        thread.start()
        return thread

    def _prepare(self, made: threading.Condition, wake: threading.Event, all_of_it: bool) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for memory in list(self.ready):  # made in a hurry
            memory.gather()
        while not self._stopped:
            with made:
                may = (all_of_it or len(self.ready) < 1) and (self.begin_make() or self._begin_again())
            if may:
                made_one = self.make(at_leisure=True)
                with made:
                    self.finish_make(made_one)
                    self._is_trying_again = False
                    made.notify_all()
                continue
            wake.wait(0.5)
            wake.clear()

    def stop(self) -> None:
        self._stopped = True
