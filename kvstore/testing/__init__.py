"""Public test tools: prove your own tier or codec, and drive a store deterministically.

    from kvstore.testing import TierContract

    class TestMyTier(TierContract):
        def make_tier(self, capacity_bytes, executor):
            return MyTier(...)

TierContract and CodecContract are plain classes of test methods, to be subclassed in a test file. FaultyTier wraps any
tier and loses, tears, flips, delays, reorders, duplicates and refuses, reproducibly. Nothing here needs pytest to be
imported, and only CodecContract needs torch; names load when first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.testing.clock import ManualClock
    from kvstore.testing.executor import SteppedExecutor
    from kvstore.testing.faulty_tier import Faults, FaultyTier
    from kvstore.testing.tier_contract import TierContract
    from quant.testing import CodecContract

_HOME_OF = {
    "CodecContract": "quant.testing",
    "Faults": "kvstore.testing.faulty_tier",
    "FaultyTier": "kvstore.testing.faulty_tier",
    "ManualClock": "kvstore.testing.clock",
    "SteppedExecutor": "kvstore.testing.executor",
    "TierContract": "kvstore.testing.tier_contract",
}

__all__ = ["CodecContract", "Faults", "FaultyTier", "ManualClock", "SteppedExecutor", "TierContract"]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore.testing' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
