"""The end of a store: what is named and worth it is written to the tiers that outlive it, within a limit of time.

Called once by `KVStore.close`, which refuses other calls by then. Takes the store's lock for bookkeeping only. Real
time, not the store's clock: people wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as Items

    from kvstore.assembly import Parts
    from kvstore.metrics import StoreMetrics
    from kvstore.upkeep import Upkeep

DRAIN_SECONDS = 2.0
"""How long a store that closes writes down what only it has, where nobody says otherwise."""
_GRACE_SECONDS = 3.0  # for tiers to end what runs, after that: a server's timeout is shorter, a hung file system's not
_CHUNK_BLOCKS = 64
_LOOK_SECONDS = 0.02
_LOG = logging.getLogger(__name__)


def close_parts(
    parts: Parts,
    lock: threading.RLock,
    arrived: threading.Event,
    seconds: float,
    now: float,
    end_sequences: Callable[[], None],
) -> None:
    """Write down for `seconds` at most, then end executor and tiers, lower tiers first, and apply what they say."""
    _spill_the_rest(parts.upkeep, lock, arrived, seconds, now)
    try:
        _end_within([parts.executor.close, *(tier.close for tier in parts.tiers[::-1])], parts.metrics)
    finally:
        with lock:
            parts.upkeep.drain(now)  # what the tiers cancelled
            end_sequences()


def _spill_the_rest(
    upkeep: Upkeep, lock: threading.RLock, arrived: threading.Event, seconds: float, now: float
) -> None:
    """Write until nothing is left or the time is up; what is left is counted as dropped, cause close."""
    deadline = time.monotonic() + seconds
    writes = upkeep.writes
    with lock:
        named = upkeep.named_copies() if upkeep.slower else []
    left = {tier: deque(named) for tier in upkeep.slower}  # each at its own pace: one may hang
    busy = bool(left)
    while busy and time.monotonic() < deadline:
        with lock:
            arrived.clear()
            upkeep.drain(now)
            for tier, copies in left.items():
                while copies and (room := min(_CHUNK_BLOCKS, writes.room_blocks(tier))):
                    upkeep.offer_copies([copies.popleft() for _ in range(min(room, len(copies)))], (tier,))
            writes.pump()
            busy = any(left.values()) or writes.is_busy
        if busy:
            arrived.wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic())))
    with lock:
        for tier, copies in left.items():
            writes.count_left(tier, list(copies))
        writes.clear("close")


def _end_within(ends: Items[Callable[[], None]], metrics: StoreMetrics) -> None:
    """Call what ends executor and tiers; one that hangs is left to itself, counted. Raises what one of them raised."""
    failures: list[BaseException] = []

    def end() -> None:
        for one in ends:
            try:
                one()
            except BaseException as error:  # raised below, in the thread that closes
                failures.append(error)

    worker = threading.Thread(target=end, name="kvstore-close", daemon=True)
    worker.start()
    worker.join(_GRACE_SECONDS)
    if worker.is_alive():
        metrics.add("failed_tasks", cause="close_unfinished")
        _LOG.error("kvstore: a tier has not closed within %.1f s; it is left to itself", _GRACE_SECONDS)
    if failures:
        raise failures[0]
