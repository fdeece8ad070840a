"""The daemon's memory budget where the system has less."""

from __future__ import annotations

import errno
import threading

from allocator.errors import CapacityError
from kvstore.daemon.segment_pool import SegmentPool
from kvstore.daemon.segments import SegmentMemory
from tests.hostile.test_hostile_shortage import no_memory_files
from tests.kvstore.daemon.kit import until


def test_memory_that_the_system_refused_is_asked_for_again() -> None:
    """Found by an operator: after one refusal the budget stayed small until the daemon was restarted."""
    pool = SegmentPool(8 << 20, 1 << 20, SegmentMemory, again_seconds=0.05)
    made, wake = threading.Condition(threading.Lock()), threading.Event()
    pool.make_first()
    with no_memory_files():
        preparer = pool.prepare(made, wake, all_of_it=True)
        until(lambda: wake.set() or pool.counts[f"segments_failed_{errno.EFBIG}"] >= 3)
        until(lambda: (pool.making, pool.made, pool.limit) == (0, 1, 1))
    until(lambda: wake.set() or (pool.made, pool.limit) == (8, 8), what="all that was asked for, once it is there")
    pool.stop()
    preparer.join()
    for memory in pool.ready:
        memory.close()


def test_no_store_waits_for_memory_that_is_only_tried_again() -> None:
    """What is being made beyond the budget as it is may well not come: nobody is told to wait for it."""
    asked, give, refuse = threading.Event(), threading.Event(), threading.Event()

    def make(size_bytes: int, at_leisure: bool) -> SegmentMemory:
        if not refuse.is_set():
            refuse.set()
            raise CapacityError(size_bytes, 0, "bytes")
        asked.set()
        assert give.wait(60)
        return SegmentMemory(size_bytes)

    pool = SegmentPool(1 << 20, 1 << 20, make, again_seconds=0.01)
    made, wake = threading.Condition(threading.Lock()), threading.Event()
    pool.make_first()
    preparer = pool.prepare(made, wake, all_of_it=True)
    until(lambda: wake.set() or asked.is_set())
    with made:
        assert (pool.making, pool.is_making_last) == (1, False)
    give.set()
    until(lambda: len(pool.ready) == 1)
    pool.stop()
    wake.set()
    preparer.join()
    pool.ready.pop().close()
