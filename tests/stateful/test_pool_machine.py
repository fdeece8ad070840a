"""The usual run of the pool's state machine; profile `ci` 300 x 40, `nightly` 10,000 x 100 (HYPOTHESIS_PROFILE)."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.stateful.pool_machine import PoolMachine

_SIZES = {"ci": (300, 40), "nightly": (10_000, 100)}
_EXAMPLES, _STEPS = _SIZES[os.environ.get("HYPOTHESIS_PROFILE", "ci")]

TestPool = PoolMachine.TestCase
TestPool.settings = settings(
    max_examples=_EXAMPLES,
    stateful_step_count=_STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
