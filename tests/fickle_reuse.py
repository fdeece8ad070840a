"""What a policy has learned, made up: levels follow keys, and the better order changes every few requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allocator.eviction import Ids, Keys, Prices
from allocator.eviction_learned import Reuse
from allocator.eviction_reuse import LEVELS


class FickleReuse(Reuse):
    """steady: never LRU."""

    def __init__(self, id_capacity: int, *, steady: bool = False) -> None:
        super().__init__(id_capacity, id_capacity)
        self._steady = steady
        self._observed_count = 0

    @property
    def prefers_recency(self) -> bool:
        return not self._steady and self._observed_count // 4 % 2 == 0

    def observe(
        self, keys: Keys, tables: Sequence[Ids | list[int]], prices: Prices | None = None, owner: int = 0
    ) -> None:
        self._observed_count += 1
        self._memory.clock += len(keys)
        for ids in tables:
            self.wanted[ids] = (keys[: len(ids)] >> np.uint64(20)).astype(np.intp) % LEVELS
