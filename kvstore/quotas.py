"""Tenants' quotas of device memory, in the words of the daemon's: a hard limit, 0 for none.

A tenant is the one of the identity that a sequence was admitted under. What counts is what its running sequences hold
and what it left behind as hits, each block once. A sequence is admitted only within the quota, for which the tenant's
own idle blocks go first, and no one else's; one that runs is never refused room to grow: `trim`, called in every step,
takes that from the tenant's idle blocks too. Under the store's lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allocator import CapacityError, UsageError
from allocator.block_marks import NOBODY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Items

    from allocator import BlockPool
    from kvstore.identity import Identity
    from kvstore.sequence import Sequence


def tenant_of(identity: Identity) -> str:
    """The name that a tenant's quota is set under; bytes as hex digits, as operators are shown them."""
    tenant = identity.tenant
    return tenant.hex() if isinstance(tenant, bytes) else tenant or ""


class Quotas:
    """The tenants that have one. sequences: the store's live ones."""

    def __init__(self, pool: BlockPool, sequences: Mapping[str, Sequence]) -> None:
        self._pool = pool
        self._sequences = sequences
        self._full_bytes = pool.layout.raw_slot_bytes[::2]  # by group
        self._numbers: dict[str, int] = {}  # of every tenant that ever had one: its blocks are marked with it
        self._quotas: dict[str, int] = {}
        self.refused_count = 0

    def __len__(self) -> int:
        return len(self._quotas)

    def set(self, tenant: str, quota_bytes: int) -> None:
        """Most bytes of a tenant's blocks on the device, counted from now on; 0: no limit."""
        if not isinstance(tenant, str) or not tenant:
            raise UsageError(f"tenant: got {tenant!r}; expected the tenant of an Identity")
        if isinstance(quota_bytes, bool) or not isinstance(quota_bytes, int) or quota_bytes < 0:
            raise UsageError(f"quota_bytes: got {quota_bytes!r}; expected an int >= 0")
        self._numbers.setdefault(tenant, len(self._numbers) + 1)
        self._quotas.pop(tenant, None)
        if quota_bytes:
            self._quotas[tenant] = quota_bytes

    def number_of(self, tenant: str) -> int:
        """What the pool knows a tenant by; NOBODY for one that has no quota."""
        return self._numbers[tenant] if tenant in self._quotas else NOBODY

    def used_bytes(self, tenant: str) -> int:
        """What the blocks of a tenant take, running and idle; not idle ones that it left before it had a quota."""
        return self._live_bytes(tenant) + self._pool.idle_bytes_of(self._numbers.get(tenant, NOBODY))

    def _live_bytes(self, tenant: str, also: Items[Items[int]] = ()) -> int:
        mine = [one for one in self._sequences.values() if one.tenant == tenant]
        tables = [table.ids() for one in mine for table in one.tables]
        return self._pool.live_bytes([*tables, *(np.array(ids, dtype=np.int32) for ids in also)])

    def _may_be_over(self, tenant: str, also: Items[Items[int]] = (), needed_bytes: int = 0) -> bool:
        """Whether the blocks have to be looked at: False when it is within its quota though each counts as often as a
        table has it, in full precision."""
        counts = [len(ids) for ids in also] or [0] * len(self._full_bytes)
        for one in self._sequences.values():
            if one.tenant == tenant:
                counts = [count + len(table) for count, table in zip(counts, one.tables, strict=True)]
        most = sum(count * size for count, size in zip(counts, self._full_bytes, strict=True))
        return most + needed_bytes + self._pool.idle_bytes_of(self._numbers[tenant]) > self._quotas[tenant]

    def require(self, tenant: str, shared: Items[Items[int]], needed_bytes: int) -> None:
        """Room within the quota for a sequence that shares these blocks (no longer idle) and needs so much more.

        CapacityError, `permanent` when it needs more than the whole quota; the tenant's idle blocks may be gone then.
        """
        quota = self._quotas.get(tenant)
        if quota is None or not self._may_be_over(tenant, shared, needed_bytes):
            return
        live = self._live_bytes(tenant, shared)
        number = self._numbers[tenant]
        over = live + needed_bytes + self._pool.idle_bytes_of(number) - quota
        if over > 0 and live + needed_bytes <= quota:
            over -= self._pool.evict_of(number, over)
        if over > 0:
            self.refused_count += 1
            alone = needed_bytes + self._pool.live_bytes([np.array(ids, dtype=np.int32) for ids in shared])
            raise CapacityError(
                needed_bytes,
                max(0, quota - live),
                f"bytes within the quota of tenant {tenant!r} ({quota} bytes)",
                permanent=alone > quota,
            )

    def trim(self) -> None:
        """Tenants that grew over their quota give up idle blocks."""
        for tenant, quota in self._quotas.items():
            idle = self._pool.idle_bytes_of(self._numbers[tenant])
            if idle and self._may_be_over(tenant) and (over := self._live_bytes(tenant) + idle - quota) > 0:
                self._pool.evict_of(self._numbers[tenant], over)
