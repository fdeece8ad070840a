"""The usual run of the pool's state machine; profile `ci` 300 x 40, `nightly` 10,000 x 100 (HYPOTHESIS_PROFILE).

Once with LRU, once with a policy that orders blocks by what it was told and goes to and fro between that and LRU, and
once with priorities and tenants above that one.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hypothesis import HealthCheck, settings

from allocator.eviction_learned import Learned
from tests.fickle_reuse import FickleReuse
from tests.stateful.pool_machine import PoolMachine
from tests.stateful.priority_machine import PriorityMachine

_SIZES = {"ci": (300, 40), "nightly": (10_000, 100)}
_EXAMPLES, _STEPS = _SIZES[os.environ.get("HYPOTHESIS_PROFILE", "ci")]
_SETTINGS = settings(
    max_examples=_EXAMPLES,
    stateful_step_count=_STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def fickle_policies() -> Callable[[int], Learned]:
    reuse: list[FickleReuse] = []

    def policy(capacity: int) -> Learned:
        reuse.append(FickleReuse(capacity) if not reuse else reuse[0])
        return Learned(capacity, reuse[0])

    return policy


class LearningMachine(PoolMachine):
    policy = fickle_policies


class PrioritiesOverLearning(PriorityMachine):
    policy = fickle_policies


TestPool = PoolMachine.TestCase
TestPool.settings = _SETTINGS
TestLearningPool = LearningMachine.TestCase
TestLearningPool.settings = _SETTINGS
TestPriorities = PrioritiesOverLearning.TestCase
TestPriorities.settings = settings(_SETTINGS, max_examples=_EXAMPLES // 3)
