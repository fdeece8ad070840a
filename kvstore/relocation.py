"""Promote and demote: a prefix moved between device and tiers without a sequence that waits for it.

    promote   copies of its leading blocks that lie in lower tiers are read up and stay on the device as idle hits
    demote    its idle device blocks are copied down where they have no copy yet, and dropped once the copy is there

Runs under the store's lock, a bounded number of blocks a call (`_PROMOTED_BLOCKS`, and the queue of spills).
A promotion is a sequence of the store's own that never computes: it holds its blocks while the copies arrive, and is
released as soon as they are adopted. So fences, deadlines, resets and failures are those of any fetch.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from allocator import CapacityError

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from kvstore.admission import Admitter
    from kvstore.arrival import Arrivals
    from kvstore.identity import HashChain
    from kvstore.metrics import StoreMetrics
    from kvstore.sequence import Sequence
    from kvstore.upkeep import Upkeep

_PROMOTED_BLOCKS = 256  # at most by one call
_OWN_PREFIX = "\x00promote "  # no caller's id begins so: ids are printable text


def is_promotion(sequence_id: str) -> bool:
    """Whether a sequence is the store's own, for a promotion, and not to be shown to anybody."""
    return sequence_id.startswith(_OWN_PREFIX)


class Relocation:
    """sequences: the store's live ones by id. release: gives a sequence's references back and forgets it."""

    def __init__(
        self,
        admitter: Admitter,
        arrivals: Arrivals,
        upkeep: Upkeep,
        metrics: StoreMetrics,
        sequences: MutableMapping[str, Sequence],
        release: Callable[[Sequence], None],
    ) -> None:
        self._admitter = admitter
        self._arrivals = arrivals
        self._upkeep = upkeep
        self._metrics = metrics
        self._sequences = sequences
        self._release = release
        self._numbers = itertools.count(1)

    def promote(self, chain: HashChain, exact: bool, now: float) -> int:
        """Start reading up; tokens on their way. 0 when nothing lies lower, or no room can be had for it."""
        plan = self._admitter.find_leading(chain.root, chain.hashes, exact, _PROMOTED_BLOCKS)
        if plan.device_blocks == plan.blocks:
            return 0
        sequence = self._admitter.new_sequence(f"{_OWN_PREFIX}{next(self._numbers)}", chain)
        try:
            self._admitter.build_tables(sequence, plan, plan.blocks * chain.block_tokens)
        except CapacityError:
            return 0
        self._sequences[sequence.sequence_id] = sequence
        self._admitter.start_fetch(sequence, plan, self._arrived, now)
        return (plan.blocks - plan.device_blocks) * chain.block_tokens

    def _arrived(self, sequence: Sequence) -> None:
        if self._sequences.get(sequence.sequence_id) is not sequence:
            return
        pending = sequence.pending
        blocks = self._arrivals.adopt(sequence)
        for tier, count in Counter(copy.tier for copy in pending if copy.outcome and copy.position < blocks).items():
            self._metrics.promoted(tier, count)
        self._release(sequence)

    def demote(self, chain: HashChain) -> int:
        """Start moving down, leaves first; blocks that were dropped now or go once their copy is made."""
        upkeep, pool = self._upkeep, self._upkeep.pool
        if not upkeep.tiers:
            return 0
        tier = upkeep.tiers[0]
        found = [
            block_id
            for group in range(len(upkeep.geometry.groups))
            for block_hash in reversed(chain.hashes)
            for block_id in (pool.index(group).find(block_hash, True), pool.index(group).find_lossy(block_hash))
            if block_id is not None and pool.is_idle(block_id)
            if not (pool.in_flight(block_id) or pool.is_pinned(block_id))
        ]
        copies = upkeep.copies_of(found)
        present = tier.contains([copy.key for copy in copies]) if copies else []
        below = [copy.block_id for copy, there in zip(copies, present, strict=True) if there]
        pool.evict(below)
        self._metrics.demoted(tier.name, len(below))
        missing = [copy for copy, there in zip(copies, present, strict=True) if not there]
        return len(below) + upkeep.writes.demote(tier, missing)
