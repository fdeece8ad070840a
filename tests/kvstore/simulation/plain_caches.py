"""Plain caches of prefix chains, written from the rules and from nothing else, to compare the simulator with.

The rules: a hit is the leading run of resident blocks; missing full blocks are taken in, in order; a request's own
blocks stay while it is handled; a block with a resident child is no victim.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence

Chain = Sequence[int]


class PlainLRU:
    """Leaves first, the longest unused leaf first of all."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.last: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}
        self.children: dict[int, int] = {}
        self.leaves: list[tuple[int, int]] = []
        self.evicted: list[int] = []
        self.clock = 0

    def request(self, chain: Chain) -> int:
        hits = 0
        while hits < len(chain) and chain[hits] in self.last:
            hits += 1
        own = set(chain[:hits])
        kept = hits
        for place in range(hits, len(chain)):
            if len(self.last) >= self.capacity and not self._evict(own):
                break
            block, parent = chain[place], chain[place - 1] if place else None
            self.last[block], self.children[block], self.parent[block] = 0, 0, parent
            if parent is not None:
                self.children[parent] += 1
            own.add(block)
            kept += 1
        for block in reversed(chain[:kept]):
            self.clock += 1
            self.last[block] = self.clock
            if not self.children[block]:
                heapq.heappush(self.leaves, (self.clock, block))
        return hits

    def _evict(self, own: set[int]) -> bool:
        while self.leaves:
            last, block = heapq.heappop(self.leaves)
            if self.last.get(block) != last or self.children[block] or block in own:
                continue
            parent = self.parent[block]
            del self.last[block], self.children[block], self.parent[block]
            if parent is not None:
                self.children[parent] -= 1
                if not self.children[parent]:
                    heapq.heappush(self.leaves, (self.last[parent], parent))
            self.evicted.append(block)
            return True
        return False


def plain_belady(chains: Sequence[Chain], capacity: int) -> Iterator[tuple[int, set[int]]]:
    """(hits, resident blocks afterwards) of each request: of all it could keep, those that are asked for soonest."""
    uses: dict[int, list[int]] = {}
    for number in range(len(chains) - 1, -1, -1):
        for block in chains[number]:
            uses.setdefault(block, []).append(number)
    held: dict[int, tuple[float, int]] = {}
    for chain in chains:
        hits = 0
        while hits < len(chain) and chain[hits] in held:
            hits += 1
        for depth, block in enumerate(chain):
            uses[block].pop()
            held[block] = (uses[block][-1] if uses[block] else math.inf, depth)
        ranked = sorted((when, depth, block) for block, (when, depth) in held.items() if when < math.inf)
        held = {block: (when, depth) for when, depth, block in ranked[:capacity]}
        yield hits, set(held)
