"""The floor of the learned order: which of it and LRU is followed, by what shadow caches of a sample show.

Used by `allocator.eviction_learned`, under the pool's lock. Three shadows follow a sample of sessions: one by LRU, one
by the learned order, and one by whichever of the two is followed. LRU is followed at first, until the sample is large
enough to tell luck from gain, and one heavy request's hits are little beside all; again as soon as a lead shrinks,
since what was kept for it will have to be fetched anew; and when what was followed has fewer hits than LRU would have
had, by a share of all blocks seen. While a lead shrinks, LRU is not left either, and each time that it was left in
vain, the lead has to be twice as large.
"""

from __future__ import annotations

from allocator.eviction import Keys, Prices
from allocator.eviction_shadow import ShadowCache

_SHADOW_BLOCKS = 1 << 14
_GROUPS = 256
_SHADOW_DECAY = 0.99
_MARGIN = 0.06  # that many more hits than LRU, relative, before LRU is left
_DEBT_FACTOR = 4.0  # and so many times what following the learned order has cost so far
_LOSS_MAX = 0.002  # of the blocks seen: what it may have cost in all
_START_REQUESTS = 650  # of the sample, before LRU is left for the first time
_START_BLOCKS = 20_000  # and so many blocks: what a wrong turn costs, a few requests' hits, is little beside them
_START_HEAVY = 400.0  # and so many times those of a heavy request (the mean one that a block is in)
_BACK_OFF = 2.0  # what the margin grows by, each time that LRU was left in vain
_LEAD_LOSS_MAX = 0.003  # of the blocks seen of late: how far below its best the lead may fall


class Floor:
    """Which of two orders has more hits on a sample of the sessions, and how far what was followed is ahead of LRU.

    capacity: in what it is told of, each of which stands for `grain` blocks.
    """

    def __init__(self, capacity: int, grain: int = 1) -> None:
        self._start_blocks = _START_BLOCKS // grain
        share = _GROUPS
        while share > 1 and capacity * share > _SHADOW_BLOCKS * _GROUPS:
            share //= 2
        self._share = share
        blocks = capacity * share // _GROUPS
        self._recency, self._learned = ShadowCache(blocks), ShadowCache(blocks)
        self._followed: ShadowCache | None = None  # by whichever order was followed; None: what LRU has
        self._recency_hits = self._learned_hits = 0.0  # of late
        self._late_blocks = self._seen_blocks = 0.0  # of late, and in all
        self._gained_blocks = 0.0  # in all, by what was followed instead of LRU
        self._best_lead = 0.0  # since the last turn
        self._square_blocks = 0.0  # of every request seen, the square
        self._entry_gained_blocks = 0.0  # when LRU was left last
        self._vain_count = 0
        self._request_count = 0
        self.prefers_recency = True

    def request(self, keys: Keys, group: int, clock: int, until: Prices, worths: Prices | None) -> None:
        if group >= self._share:
            return
        names = keys.tolist()
        self._request_count += bool(names)
        weights = None if worths is None else worths.tolist()
        seen = len(names) if weights is None else sum(weights)
        self._seen_blocks += seen
        self._late_blocks += seen
        self._square_blocks += seen * seen
        by_recency, by_due = [float(clock)] * len(names), until.tolist()
        hits = self._recency.request(names, by_recency, weights, by_due)
        self._learned.request(names, by_due, weights)
        if self._followed is not None:
            orders = (by_recency, by_due) if self.prefers_recency else (by_due, by_recency)
            self._gained_blocks += self._followed.request(names, orders[0], weights, orders[1]) - hits
            if not self.prefers_recency and self._is_spent:
                self._turn()

    @property
    def _is_spent(self) -> bool:
        """Whether the learned order has cost all that it may."""
        return self._gained_blocks < -_LOSS_MAX * self._seen_blocks

    def _turn(self) -> None:
        self._followed = (self._recency if self._followed is None else self._followed).turned()
        if self.prefers_recency:
            self._entry_gained_blocks = self._gained_blocks
        elif self._gained_blocks < self._entry_gained_blocks:
            self._vain_count += 1
        else:
            self._vain_count = max(0, self._vain_count - 1)
        self.prefers_recency = not self.prefers_recency
        self._best_lead = self._learned_hits - self._recency_hits

    def end_epoch(self) -> None:
        """LRU until the other is clearly ahead; back when it falls behind or loses its lead."""
        self._recency_hits = self._recency_hits * _SHADOW_DECAY + self._recency.hits
        self._learned_hits = self._learned_hits * _SHADOW_DECAY + self._learned.hits
        self._late_blocks *= _SHADOW_DECAY
        self._recency.hits = self._learned.hits = 0
        lead = self._learned_hits - self._recency_hits
        self._best_lead = max(self._best_lead * _SHADOW_DECAY, lead)
        is_shrinking = lead < self._best_lead - _LEAD_LOSS_MAX * self._late_blocks
        if not self.prefers_recency:
            if lead <= 0 or is_shrinking:
                self._turn()
            return
        margin = _MARGIN * _BACK_OFF**self._vain_count
        wanted = margin * self._recency_hits + _DEBT_FACTOR * max(0.0, -self._gained_blocks)
        if lead > wanted and self._is_started and not is_shrinking and not self._is_spent:
            self._turn()
        elif self._followed is not None and self._followed.holds_what(self._recency):
            self._followed = None

    @property
    def _is_started(self) -> bool:
        """Whether enough was seen for a first turn."""
        heavy_blocks = self._square_blocks / max(1.0, self._seen_blocks)
        enough = self._request_count >= _START_REQUESTS and self._seen_blocks >= self._start_blocks
        return enough and self._seen_blocks >= _START_HEAVY * heavy_blocks
