"""The moment a sequence can compute: what it asked for is there, or is a miss. Runs under the store's lock."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Items

    import numpy.typing as npt

    from allocator import BlockPool, KVGeometry
    from kvstore.admission import Admitter
    from kvstore.announce import Announcer
    from kvstore.growth import Growth
    from kvstore.metrics import StoreMetrics
    from kvstore.sequence import PendingCopy, Sequence
    from kvstore.upkeep import Upkeep


class Arrivals:
    """sequences: the live ones by id, of which `fetched` leaves alone those that are gone."""

    def __init__(
        self,
        geometry: KVGeometry,
        pool: BlockPool,
        admitter: Admitter,
        growth: Growth,
        upkeep: Upkeep,
        metrics: StoreMetrics,
        announcer: Announcer,
        sequences: Mapping[str, Sequence],
    ) -> None:
        self._block_tokens = geometry.block_tokens
        self._pool = pool
        self._admitter = admitter
        self._growth = growth
        self._upkeep = upkeep
        self._metrics = metrics
        self._announcer = announcer
        self._sequences = sequences

    def fetched(self, sequence: Sequence) -> None:
        """All copies that a sequence waited for have an outcome."""
        if self._sequences.get(sequence.sequence_id) is not sequence:
            return  # aborted meanwhile: its blocks were released and leave when their transfers ended
        pending = sequence.pending
        blocks = self.adopt(sequence)
        self.ready(sequence, blocks, {copy.position: copy.tier for copy in pending})

    def adopt(self, sequence: Sequence) -> int:
        """Name what arrived, cut the sequence at the first block that did not; the blocks that are there."""
        planned = sequence.loading_tokens // self._block_tokens
        blocks, fresh = self._admitter.settle(sequence)
        self._upkeep.remember_fetched(sequence, fresh)
        self._bring_nearer(fresh)
        if self._announcer.heard:
            for copy in fresh:
                place = range(copy.position, copy.position + 1)
                self._announcer.stored(copy.group, sequence.chain, place, copy.key.exact, copy.form)
        if blocks < planned:
            ready = blocks * self._block_tokens
            self._growth.truncate(sequence, ready)  # and with it what was computed behind it meanwhile
            sequence.written = ready
            tables = sequence.tables
            if all(self._pool.reads_exact(one) for table in tables for one in table.ids().tolist() if one >= 0):
                sequence.lossy_from = None
            elif sequence.lossy_from is not None:
                sequence.lossy_from = min(sequence.lossy_from, ready)
            self._metrics.recomputed((planned - blocks) * self._block_tokens, cause="not_fetched")
        return blocks

    def _bring_nearer(self, arrived: Items[PendingCopy]) -> None:
        """Offer what came from a slower tier to the faster ones: the next hit is found nearer."""
        upkeep = self._upkeep
        order = {tier.name: place for place, tier in enumerate(upkeep.tiers)}
        for place, tier in enumerate(upkeep.tiers[:-1]):
            lower = [copy for copy in arrived if order[copy.tier] > place]
            present = tier.contains([copy.key for copy in lower]) if lower else []
            missing = [copy for copy, there in zip(lower, present, strict=True) if not there]
            upkeep.offer([copy.block_id for copy in missing], (tier,))
            for source, blocks in Counter(copy.tier for copy in missing).items():
                self._metrics.promoted(source, blocks)

    def ready(self, sequence: Sequence, blocks: int, fetched: Mapping[int, str]) -> None:
        """`blocks` leading blocks are there, those in `fetched` (position -> tier) from below: computing can start."""
        sequence.committed = sequence.reused_tokens = blocks * self._block_tokens
        sequence.sealed_blocks = blocks
        by_tier = Counter(tier for position, tier in fetched.items() if position < blocks)
        first = min(self._first_read(table.ids()) for table in sequence.tables) if fetched and blocks else 0
        if first in fetched:
            by_tier[fetched[first]] += first  # that nothing reads them is owed to what is read instead
        if by_tier.total() < blocks:
            by_tier["device"] = blocks - by_tier.total()
        hits = {name: count * self._block_tokens for name, count in by_tier.items()}
        self._metrics.count_request(sequence.sequence_id, sequence.chain.token_count, hits)
        self._metrics.reused(sequence.reused_tokens, hits)
        if fetched and blocks:
            self._admitter.note_reuse(sequence, by_tier)
        self._upkeep.touch_below(sequence, blocks)

    @staticmethod
    def _first_read(ids: npt.NDArray[np.int32]) -> int:
        """Of a table's entries, before which it has dropped all."""
        return int(np.argmax(ids >= 0)) if len(ids) else 0
