"""The default policy against LRU on workloads that it was not made with, short and long."""

from __future__ import annotations

import pytest

from kvstore.simulation import Setting, replay
from tests.kvstore.simulation.invented_traces import KINDS, invented


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_never_falls_below_lru_on_invented_workloads(kind: str) -> None:
    for requests, seed in ((600, 21), (1200, 11), (1200, 22), (3000, 12), (6000, 13)):
        trace = invented(kind, requests, seed)
        for percent in (1, 2, 5, 10, 25, 50):
            floor, ours = (
                100 * replay(trace, Setting(policy=policy, capacity_percent=percent)).block_hit_ratio
                for policy in ("lru", "default")
            )
            assert ours >= floor - 0.3, (requests, percent, floor, ours)
