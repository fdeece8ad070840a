"""A shadow cache: what a cache of this size would have hit, on a sample of sessions and without any bytes.

Used by `allocator.eviction_learned` to compare itself with LRU, under the pool's lock. Chains go in whole and head
first; a block is never worth less than its children, so leaves go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


class ShadowCache:
    """Keys of at most `capacity` blocks; the one whose time is up first goes first.

    Beside its time an entry has another, by another order, so that a copy may go on by that one (`turned`).
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = max(1, capacity)
        self.hits = 0.0
        self._until: dict[int, tuple[float, int, float]] = {}
        self._queue: list[tuple[float, int, int]] = []
        self._order = 0

    def request(
        self,
        keys: Sequence[int],
        until: Sequence[float],
        worths: Sequence[float] | None = None,
        others: Sequence[float] | None = None,
    ) -> float:
        """One request: its leading resident blocks by their worth (1 when not given), which count as hits; its blocks
        are kept until the times given (not rising). others: their times by the other order."""
        held, queue = self._until, self._queue
        count = 0
        for key in keys:
            if key not in held:
                break
            count += 1
        hits = float(count) if worths is None else sum(worths[:count])
        self.hits += hits
        earlier = [held.pop(key) for key in keys[:count]]
        room = self.capacity - len(held)
        wanted = len(keys)
        while room < wanted and queue:
            _, order, key = heapq.heappop(queue)
            entry = held.get(key)
            if entry is not None and entry[1] == order:
                del held[key]
                room += 1
        kept = min(wanted, room)
        highest = highest_other = 0.0
        others = until if others is None else others
        for place in range(kept - 1, -1, -1):
            highest = max(highest, until[place])
            highest_other = max(highest_other, others[place])
            if place < count:
                before = earlier[place]
                highest = max(highest, before[0])
                highest_other = max(highest_other, before[2])
            self._order += 1
            held[keys[place]] = (highest, self._order, highest_other)
            heapq.heappush(queue, (highest, self._order, keys[place]))
        if len(queue) > 4 * self.capacity + 1024:
            self._queue = [(entry[0], entry[1], key) for key, entry in held.items()]
            heapq.heapify(self._queue)
        return hits

    def turned(self) -> ShadowCache:
        """One that goes on by the other order, without its hits."""
        found = ShadowCache(self.capacity)
        found._until = {key: (other, order, until) for key, (until, order, other) in self._until.items()}
        found._queue = [(entry[0], entry[1], key) for key, entry in found._until.items()]
        heapq.heapify(found._queue)
        found._order = self._order
        return found

    def holds_what(self, other: ShadowCache) -> bool:
        """Whether both hold the same keys."""
        return self._until.keys() == other._until.keys()
