"""The tier contract on the host tier: small slots, odd sizes, no size hints, little room."""

from __future__ import annotations

from kvstore.executor import Executor
from kvstore.host_tier.tier import HostTier
from kvstore.testing import TierContract


class TestHostTier(TierContract):
    leaves_first = True
    pins = True

    def make_tier(self, capacity_bytes: int, executor: Executor) -> HostTier:
        return HostTier(capacity_bytes, executor, slot_bytes=(self.payload_bytes,), prefault=True)


class TestHostTierWithoutHints(TierContract):
    payload_bytes = 1000
    overhead_bytes = 24  # slots are multiples of 64 bytes
    leaves_first = True
    pins = True

    def make_tier(self, capacity_bytes: int, executor: Executor) -> HostTier:
        return HostTier(capacity_bytes, executor)


class TestHostTierWithOtherHints(TierContract):
    payload_bytes = 1024
    overhead_bytes = 1100  # an extent is cut for the larger slots
    leaves_first = True
    pins = True

    def make_tier(self, capacity_bytes: int, executor: Executor) -> HostTier:
        return HostTier(capacity_bytes, executor, slot_bytes=(3456, 1024))
