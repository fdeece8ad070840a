"""What can be read off a store at any time, and what it is told beside requests: the base of `KVStore`.

Every method takes the store's lock for a moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.arguments import whole
from kvstore.operations import state_kernel_paths
from kvstore.relocation import is_promotion
from kvstore.store_checks import check_store
from kvstore.usage import StoreUsage, measure, state_gauges

if TYPE_CHECKING:
    import threading

    from allocator import BlockPool, KVGeometry, Slab
    from kvstore.assembly import Parts
    from kvstore.identity import Identity
    from kvstore.live_sequences import LiveSequences
    from kvstore.metrics import StoreMetrics
    from kvstore.prompts import Prompts
    from kvstore.tier import Tier
    from kvstore.upkeep import Upkeep


class StoreViews:
    """See the module. `KVStore` sets these before its first call."""

    geometry: KVGeometry
    pool: BlockPool
    metrics: StoreMetrics
    _device: str
    _lock: threading.RLock
    _parts: Parts
    _prompts: Prompts
    _sequences: LiveSequences
    _upkeep: Upkeep

    @property
    def closed(self) -> bool:
        return self._sequences.closed

    @property
    def slab(self) -> Slab | None:
        return self._parts.device.slab

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self._parts.tiers

    @property
    def identity(self) -> Identity:
        return self._prompts.identity

    def sequence_ids(self) -> list[str]:
        with self._lock:
            return [name for name in self._sequences if not is_promotion(name)]

    def committed_tokens(self, sequence_id: str) -> int:
        with self._lock:
            return self._sequences.live(sequence_id).committed

    def written_tokens(self, sequence_id: str) -> int:
        with self._lock:
            return self._sequences.live(sequence_id).written

    def is_exact(self, sequence_id: str) -> bool:
        """True while everything committed was computed from full precision only."""
        with self._lock:
            sequence = self._sequences.live(sequence_id)
            return sequence.is_exact_up_to(sequence.committed)

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Tell the store how fast the engine computes prompts, so that it can choose between loading and computing."""
        with self._lock:
            self._parts.observe_prefill(tokens, seconds)

    def set_quota(self, tenant: str, quota_bytes: int, *, host_bytes: int = 0) -> None:
        """Most device memory of a tenant (of an Identity), and of its copies in the store's host memory, both counted
        from now on; 0: no limit."""
        whole("host_bytes", host_bytes, 0)
        with self._lock:
            self._parts.quotas.set(tenant, quota_bytes)
            for tier in self.tiers:
                if tier.private_memory:
                    tier.set_quota(tenant, host_bytes)
            self._prompts.describe_to(self.tiers)  # whose the roots are that it has told of before

    def tenant_bytes(self, tenant: str) -> int:
        """What the blocks of a tenant take on the device, running and idle, each once; idle ones only of one with a
        quota."""
        with self._lock:
            return self._parts.quotas.used_bytes(tenant)

    def usage(self) -> StoreUsage:
        with self._lock:
            return measure(self.geometry, self.pool, list(self._sequences.values()))

    def _state_gauges(self) -> None:
        with self._lock:
            state_gauges(self.metrics, self.usage(), self._upkeep, self.tiers, self._parts.costs)
        state_kernel_paths(self.metrics, self._device)

    def check_invariants(self) -> None:
        """Raise IntegrityError naming the first invariant that does not hold."""
        with self._lock:
            check_store(self.pool, self._sequences, self._upkeep.writes)
