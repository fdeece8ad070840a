"""Belady's bound: a cache that knows the future keeps what is asked for again soonest, and takes in nothing else.

No policy can have more hits with that many blocks. Leaves first by itself: a block is asked for no later than its
child.
"""

from __future__ import annotations

import heapq

import numpy as np

from kvstore.simulation.trace import Counts, Trace

_NEVER = np.iinfo(np.int64).max


def next_uses(trace: Trace) -> Counts:
    """For every block presented, the request that asks for it next; the largest int64 when none does.

    Only full blocks count; the partly filled ones get that number too.
    """
    lengths = np.diff(trace.starts)
    requests = np.repeat(np.arange(len(trace)), lengths)
    is_full = np.arange(len(trace.keys)) - trace.starts[requests] < trace.full_counts[requests]
    places = np.flatnonzero(is_full)
    order = places[np.argsort(trace.keys[places], kind="stable")]
    following = np.full(len(trace.keys), _NEVER, dtype=np.int64)
    same = trace.keys[order[1:]] == trace.keys[order[:-1]]
    following[order[:-1][same]] = requests[order[1:][same]]
    return following


def bound_hits(trace: Trace, capacity_blocks: int) -> tuple[list[int], int]:
    """(blocks hit by each request, blocks evicted in all) with perfect knowledge."""
    following = next_uses(trace)
    held: dict[int, int] = {}  # key -> when it is asked for next
    queue: list[tuple[int, int, int]] = []
    starts, full_counts = trace.starts.tolist(), trace.full_counts.tolist()
    hits: list[int] = []
    evicted = 0
    for number, full in enumerate(full_counts):
        start = starts[number]
        keys = trace.keys[start : start + full].tolist()
        soon = following[start : start + full].tolist()
        count = 0
        while count < full and keys[count] in held:
            count += 1
        hits.append(count)
        for depth, (key, when) in enumerate(zip(keys, soon, strict=True)):
            if when == _NEVER:
                evicted += held.pop(key, None) is not None
                continue
            held[key] = when
            heapq.heappush(queue, (-when, -depth, key))
        while len(held) > capacity_blocks:
            when, _, key = heapq.heappop(queue)
            if held.get(key) == -when:
                del held[key]
                evicted += 1
    return hits, evicted
