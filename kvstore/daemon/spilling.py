"""Which copies of the arena are written to the tiers below, and when: with the policy of a store in process.

Stored, read, touched or stored once more by another client: each is a use, and what the policy admits then is offered
to every tier below that neither has it nor is down. Under the daemon's lock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore.costs import CostModel
from kvstore.tier_admission import Candidate, Cause, make_admission

if TYPE_CHECKING:
    from kvstore.config import KVStoreConfig
    from kvstore.daemon.arena import ArenaIndex
    from kvstore.daemon.lower import LowerTier
    from kvstore.daemon.slots import ArenaEntry

_BELIEVED_SECONDS = 300.0
"""After so long what is used is offered once more: a tier that has it counts that as a use, another gets it again."""


class Spilling:
    """See the module. What a copy costs to read is weighed by the clients, so every one is taken to be worth it."""

    def __init__(self, lowers: Sequence[LowerTier], store: KVStoreConfig) -> None:
        self._lowers = lowers
        self._all_marks = sum(one.mark for one in lowers)
        costs = CostModel(prefill_tokens_per_second=store.prefill_tokens_per_second, always_load=True)
        self._admission = make_admission(store.spill_policy, costs)

    def note_use(self, arena: ArenaIndex, entries: Sequence[ArenaEntry]) -> None:
        if not self._lowers:
            return
        self._admission.note_use([entry.key.hash for entry in entries])
        since = time.monotonic() - _BELIEVED_SECONDS
        fresh = [one for one in entries if one.offered != self._all_marks or one.offered_seconds < since]
        for entry in fresh:
            if entry.offered_seconds < since:
                entry.offered = 0
        for lower in self._lowers if fresh else ():
            if not lower.takes_spills:
                continue
            new = [entry for entry in fresh if not entry.offered & lower.mark]
            wanted = [Candidate(one.key.hash, Cause.COMPUTED, one.form.block_tokens, one.size_bytes) for one in new]
            for entry, is_wanted in zip(new, self._admission.admits(lower.tier.name, wanted), strict=True):
                if is_wanted:
                    lower.offer(arena, entry)
