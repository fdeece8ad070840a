"""Pins with an end and a budget. Runs under the store's lock; a lease that has ended is no error on the data path."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from allocator import CapacityError, LeaseError, UsageError
from kvstore.sequence import Lease

if TYPE_CHECKING:
    from allocator import BlockPool


PINNED_SHARE = 0.5  # of the device's bytes, at most; what is pinned can serve nobody else


class Leases:
    """The leases of one store. Invariant: a block is pinned once for each active lease that names it."""

    def __init__(self, pool: BlockPool, longest_seconds: float) -> None:
        self._pool = pool
        self._longest_seconds = longest_seconds
        self._ids = itertools.count(1)
        self._active: dict[int, Lease] = {}
        self._pins: Counter[int] = Counter()  # leases by block id
        self._budget_bytes = int(pool.layout.total_bytes * PINNED_SHARE)
        self.pinned_bytes = 0

    def checked_seconds(self, ttl_seconds: float | None) -> float:
        """The life asked for, by default the longest; UsageError for one that is longer, or no number."""
        longest = self._longest_seconds
        seconds = longest if ttl_seconds is None else ttl_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= longest:
            raise UsageError(f"ttl_seconds: got {seconds!r}; expected a number in (0, {longest:g}] (lease_seconds)")
        return seconds

    def grant(self, blocks: tuple[tuple[int, ...], ...], tokens: int, expires_at: float) -> Lease:
        """Pin `blocks` (ids by group) until `expires_at`. CapacityError, with nothing pinned, beyond the budget."""
        fresh_bytes = sum(self._slot_bytes(one) for ids in blocks for one in ids if one not in self._pins)
        if self.pinned_bytes + fresh_bytes > self._budget_bytes:
            raise CapacityError(
                fresh_bytes,
                self._budget_bytes - self.pinned_bytes,
                f"bytes to pin: leases may hold {PINNED_SHARE:.0%} of the device's memory together; "
                "unpin something, or pin a shorter prefix",
            )
        for ids in blocks:
            self._pool.pin(list(ids))
            self._pins.update(ids)
        self.pinned_bytes += fresh_bytes
        lease = Lease(next(self._ids), tokens, expires_at, blocks)
        self._active[lease.lease_id] = lease
        return lease

    def end(self, lease: Lease) -> None:
        """Give a lease back. LeaseError when it is not of this store, or has ended."""
        if not isinstance(lease, Lease):
            raise UsageError(f"lease: got {lease!r}; expected the Lease that pin gave")
        if not lease.active:
            raise LeaseError(f"lease {lease.lease_id} has ended already")
        if self._active.get(lease.lease_id) is not lease:
            raise LeaseError(f"lease {lease.lease_id} is not of this store")
        self._end(lease)

    def check(self, lease: Lease | None) -> None:
        """LeaseError for an active lease of another store."""
        if lease is not None and not isinstance(lease, Lease):
            raise UsageError(f"lease: got {lease!r}; expected the Lease that pin gave, or None")
        if lease is not None and lease.active and self._active.get(lease.lease_id) is not lease:
            raise LeaseError(f"lease {lease.lease_id} is not of this store")

    def take_over(self, lease: Lease | None) -> None:
        """A sequence has references to what the lease pinned: the lease ends here, unless it has ended before."""
        if lease is not None and lease.active:
            self._end(lease)

    def expire(self, now: float) -> int:
        """End every lease whose time is up; how many."""
        late = [lease for lease in self._active.values() if lease.expires_at <= now]
        for lease in late:
            self._end(lease)
        return len(late)

    def _end(self, lease: Lease) -> None:
        del self._active[lease.lease_id]
        lease.active = False
        for ids in lease.blocks:
            for block_id in ids:
                self._pins[block_id] -= 1
                if not self._pins[block_id]:
                    del self._pins[block_id]
                    self.pinned_bytes -= self._slot_bytes(block_id)
            self._pool.unpin(list(ids))

    def _slot_bytes(self, block_id: int) -> int:
        """A pinned block neither cools nor moves, so this stays."""
        layout, pool = self._pool.layout, self._pool
        return layout.raw_slot_bytes[2 * pool.group_of(block_id) + pool.form_of(block_id)]
