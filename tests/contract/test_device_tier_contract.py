"""The tier contract on the tier beside vLLM's own memory: in host memory, and in a tensor as on a card."""

from __future__ import annotations

from engine_adapter.vllm_connector.copier import NativeCopier
from engine_adapter.vllm_connector.device_tier import DeviceTier
from kvstore.executor import Executor
from kvstore.testing import TierContract


class TestDeviceTierInHostMemory(TierContract):
    leaves_first = True
    pins = True

    def make_tier(self, capacity_bytes: int, executor: Executor) -> DeviceTier:
        return DeviceTier(capacity_bytes, executor, NativeCopier(), slot_bytes=(self.payload_bytes,))


class CardLike(NativeCopier):
    """Its memory is a tensor, as a card's is."""

    is_immediate = False


class TestDeviceTierOnACard(TierContract):
    payload_bytes = 1024
    overhead_bytes = 1100  # an extent is cut for the larger slots
    leaves_first = True
    pins = True

    def make_tier(self, capacity_bytes: int, executor: Executor) -> DeviceTier:
        return DeviceTier(capacity_bytes, executor, CardLike(), slot_bytes=(3456, 1024))
