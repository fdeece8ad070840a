"""What losing a device block would cost: computing it again, or reading it from a tier below that has a copy.

Told to the eviction policy with every sequence that ends, from what has been measured: the engine's prefill speed and
the bandwidth of each tier. Only where a difference shows: a store with host memory of its own copies down whatever the
device is about to evict, so there every loss costs one fetch; and a tier that has to ask a server is not asked. Under
the store's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allocator import COLD, FULL
from kvstore.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from allocator import BlockPool, KVGeometry
    from allocator.eviction import Prices
    from kvstore.costs import CostModel
    from kvstore.residency import Residency


class LossPrices:
    """tiers: the store's, fast to slow. cools: it makes INT4 copies too."""

    def __init__(
        self,
        geometry: KVGeometry,
        pool: BlockPool,
        residency: Residency,
        costs: CostModel,
        tiers: Items[Tier],
        *,
        cools: bool,
    ) -> None:
        self._block_tokens = geometry.block_tokens
        self._residency = residency
        self._costs = costs
        self._forms = (COLD, FULL) if cools else (FULL,)
        self._form_bytes = [sum(pool.layout.raw_slot_bytes[form::2]) for form in (FULL, COLD)]
        # a tier that finds out later says so by a count of its own
        answering = [tier for tier in tiers if type(tier).pending_count is Tier.pending_count]
        self._tiers = [] if any(tier.private_memory for tier in tiers) else answering

    def of(self, root: bytes, hashes: list[bytes]) -> Prices | None:
        """float64[n], seconds a block; None: all the same."""
        if not self._tiers or not hashes:
            return None
        prices = np.full(len(hashes), self._block_tokens / self._costs.prefill_tokens_per_second)
        for tier in self._tiers:
            for form in self._forms:
                seconds = self._form_bytes[form] / self._costs.tier(tier.name).bytes_per_second
                run = tier.leading_run(self._residency.copy_key(root, 0, hashes[0], form, True), hashes)
                np.minimum(prices[:run], seconds, out=prices[:run])
        return prices
