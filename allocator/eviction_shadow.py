"""A shadow cache: what a cache of this size would have hit, on a sample of sessions and without any bytes.

Used by `allocator.eviction_learned` to compare itself with LRU, under the pool's lock. Chains go in whole and head
first; a block is never worth less than its children, so leaves go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class ShadowCache:
    """Keys of at most `capacity` blocks; the one whose time is up first goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.hits = 0.0
        self._until: dict[int, tuple[float, int]] = {}
        self._queue: list[tuple[float, int, int]] = []
        self._order = 0

    def request(self, keys: Sequence[int], until: Sequence[float], worths: Sequence[float] | None = None) -> None:
        """One request: counts its leading resident blocks by their worth (1 when not given), and keeps its blocks
        until the times given (not rising)."""
        held, queue = self._until, self._queue
        count = 0
        for key in keys:
            if key not in held:
                break
            count += 1
        self.hits += count if worths is None else sum(worths[:count])
        earlier = [held.pop(key)[0] for key in keys[:count]]
        room = self.capacity - len(held)
        wanted = len(keys)
        while room < wanted and queue:
            worth, order, key = heapq.heappop(queue)
            if held.get(key) == (worth, order):
                del held[key]
                room += 1
        kept = min(wanted, room)
        highest = 0.0
        for place in range(kept - 1, -1, -1):
            highest = max(highest, until[place], earlier[place] if place < count else 0.0)
            self._order += 1
            held[keys[place]] = (highest, self._order)
            heapq.heappush(queue, (highest, self._order, keys[place]))
        if len(queue) > 4 * self.capacity + 1024:
            self._queue = [entry for entry in queue if held.get(entry[2]) == entry[:2]]
            heapq.heapify(self._queue)
