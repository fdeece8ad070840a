"""The default policy against LRU on workloads that it was not made with, short and long."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvstore.simulation import Setting, Trace, generate, replay
from kvstore.simulation.workloads import WORKLOADS
from tests.kvstore.simulation.invented_traces import KINDS, invented, tenants_that_differ


def check_floor(trace: Trace, *percents: float) -> None:
    for percent in percents or (1, 2, 5, 10, 25, 50):
        floor, ours = (
            100 * replay(trace, Setting(policy=policy, capacity_percent=percent)).block_hit_ratio
            for policy in ("lru", "default")
        )
        assert ours >= floor - 0.3, (trace.name, len(trace), percent, floor, ours)


FORMER = [  # each lost between 0.4 and 0.9 point: LRU was left too early, or too soon again, or for a lead of the past
    (generate, "mixture", 2000, 5, 10), (generate, "rag", 700, 1, 5), (invented, "trap", 2500, 3, 10),
]  # fmt: skip


@pytest.mark.parametrize(("make", "kind", "requests", "seed", "percent"), FORMER)
def test_what_fell_below_lru_once(
    make: Callable[[str, int, int], Trace], kind: str, requests: int, seed: int, percent: float
) -> None:
    check_floor(make(kind, requests, seed), percent)


@pytest.mark.nightly
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_default_never_falls_below_lru_on_generated_workloads(workload: str) -> None:
    """Twelve of any length and seed; the trace is named by them."""
    draw = random.Random()
    for _ in range(12):
        check_floor(generate(workload, draw.randint(500, 5000), draw.getrandbits(32)))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_never_falls_below_lru_on_invented_workloads(kind: str) -> None:
    for requests, seed in ((600, 21), (1200, 11), (1200, 22), (3000, 12), (6000, 13)):
        check_floor(invented(kind, requests, seed))


@pytest.mark.nightly
@pytest.mark.parametrize("told", [True, False])
def test_nor_where_tenants_differ(told: bool) -> None:
    for requests, seed in ((1200, 3), (3000, 1)):
        check_floor(tenants_that_differ(requests, seed, told=told))
