"""The simulator against plain caches, block for block, and against published figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from allocator import LRU, ConfigError, EvictionPolicy
from allocator.eviction_learned import Learned
from kvstore.simulation import BOUND, POLICIES, WORKLOADS, Setting, Trace, generate, replay
from kvstore.simulation.belady import bound_hits
from kvstore.simulation.hosts import Host
from kvstore.simulation.trace import each
from tests.fickle_reuse import FickleReuse
from tests.kvstore.simulation.plain_caches import PlainLRU, plain_belady

PUBLIC = ("synthetic", "conversation")


def percents(trace: Trace, policy: str, capacities: tuple[float, ...], codec: str = "raw") -> list[float]:
    settings = [Setting(policy=policy, capacity_percent=one, codec=codec) for one in capacities]
    return [100 * replay(trace, one).block_hit_ratio for one in settings]


def chains(trace: Trace) -> list[list[int]]:
    return [keys.tolist() for _, keys, _ in each(trace)]


def check_lru(trace: Trace, capacity: int) -> None:
    host, plain = Host(capacity, LRU), PlainLRU(capacity)
    evicted: list[bytes] = []
    host.pool.on_evict = lambda group, ids, names, exact, form: evicted.extend(names)
    for number, keys, names in each(trace):
        assert host.request(keys, names) == plain.request(keys.tolist()), number
    assert [int.from_bytes(name, "little") for name in evicted] == plain.evicted
    assert {int.from_bytes(name, "little") for name in host.pool.index(0).exact} == set(plain.last)
    host.pool.check_invariants()


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("percent", [1, 20])
def test_lru_equals_the_plain_cache_on_workloads(workload: str, percent: float) -> None:
    trace = generate(workload, 400, seed=3)
    check_lru(trace, trace.capacity_blocks(percent))


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.parametrize("percent", [1, 10])
def test_lru_equals_the_plain_cache_on_traces(name: str, percent: float, request: pytest.FixtureRequest) -> None:
    trace = request.getfixturevalue(name)
    check_lru(trace, trace.capacity_blocks(percent))


def check_bound(trace: Trace, capacity: int) -> None:
    hits, _ = bound_hits(trace, capacity)
    assert hits == [count for count, _ in plain_belady(chains(trace), capacity)]


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("percent", [1, 20])
def test_belady_equals_the_plain_one_on_workloads(workload: str, percent: float) -> None:
    trace = generate(workload, 400, seed=4)
    check_bound(trace, trace.capacity_blocks(percent))


@pytest.mark.parametrize("name", PUBLIC)
def test_belady_equals_the_plain_one_on_traces(name: str, request: pytest.FixtureRequest) -> None:
    trace = request.getfixturevalue(name)
    check_bound(trace, trace.capacity_blocks(1))


def test_lru_on_the_synthetic_trace_agrees_with_the_published_table(synthetic: Trace) -> None:
    expected = [3.94, 16.13, 27.01, 45.38]
    assert percents(synthetic, "lru", (1, 5, 10, 25)) == pytest.approx(expected, abs=0.1)


def test_int4_copies_hold_more_of_both_traces(synthetic: Trace, conversation: Trace) -> None:
    for trace, least in ((conversation, (7.1, 26.1, 32.7)), (synthetic, (11.7, 35.6, 51.8))):
        for policy in ("lru", "default"):
            found = percents(trace, policy, (1, 5, 10), codec="int4")
            assert all(have >= asked for have, asked in zip(found, least, strict=True)), (trace.name, policy, found)


def test_the_default_gains_on_both_traces_and_never_falls_below_lru(synthetic: Trace, conversation: Trace) -> None:
    capacities = (1, 2, 5, 10, 25, 50)
    for trace, least in ((synthetic, 8), (conversation, 12)):
        ours, floor = percents(trace, "default", capacities), percents(trace, "lru", capacities)
        assert all(one >= other - 0.3 for one, other in zip(ours, floor, strict=True)), (ours, floor)
        gains = [100 * (ours[place] / floor[place] - 1) for place in range(1, 5)]
        assert sum(gains) / 4 >= least, (trace.name, gains)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_default_never_falls_below_lru_on_workloads(workload: str) -> None:
    trace = generate(workload, 1200, seed=1)
    capacities = (1, 5, 25)
    pairs = zip(percents(trace, "default", capacities), percents(trace, "lru", capacities), strict=True)
    assert all(ours >= floor - 0.3 for ours, floor in pairs)


def fickle(capacity: int) -> Learned:
    return Learned(capacity, FickleReuse(capacity))


@pytest.mark.parametrize("policy", [*POLICIES.values(), fickle])
def test_a_policy_evicts_leaves_only_and_keeps_within_its_capacity(policy: Callable[[int], EvictionPolicy]) -> None:
    trace = generate("mixture", 500, seed=5)
    capacity = trace.capacity_blocks(3)
    host = Host(capacity, policy)
    parents: dict[bytes, bytes] = {}
    resident = host.pool.index(0).exact
    gone: set[bytes] = set()
    host.pool.on_evict = lambda group, ids, names, exact, form: gone.update(names)
    for _, keys, names in each(trace):
        parents.update(zip(names[1:], names, strict=False))
        host.request(keys, names)
        orphans = [name for name in resident if name in parents and parents[name] not in resident]
        assert not orphans
        assert len(resident) <= capacity
    assert gone
    host.pool.check_invariants()


@pytest.mark.parametrize("policy", [*POLICIES, BOUND])
def test_a_replay_is_deterministic(policy: str) -> None:
    rows = [replay(generate("agent", 300, seed=2), Setting(policy=policy, capacity_percent=5)) for _ in range(2)]
    assert replace(rows[0], seconds=0.0) == replace(rows[1], seconds=0.0)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_beats_the_bound(workload: str) -> None:
    trace = generate(workload, 300, seed=6)
    (bound,) = percents(trace, BOUND, (5,))
    for policy in POLICIES:
        assert percents(trace, policy, (5,))[0] <= bound + 1e-9, policy


def test_lower_tiers_add_hits() -> None:
    trace = generate("rag", 300)
    alone = replay(trace, Setting(policy="lru", capacity_percent=2))
    tiers = replay(trace, Setting(policy="lru", capacity_percent=2, host_blocks=2_000, remote_blocks=100_000))
    assert tiers.device_hit_ratio == pytest.approx(alone.device_hit_ratio, abs=0.02)
    assert tiers.host_hit_ratio > 0.2
    assert tiers.remote_hit_ratio > 0
    assert alone.spilled_bytes == alone.fetched_bytes == 0
    assert tiers.ttft_seconds_mean < alone.ttft_seconds_mean < alone.ttft_seconds_mean_without_cache


def test_priced_by_cost_means_something_only_where_a_tier_below_has_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_START_REQUESTS", 100), ("_START_BLOCKS", 100), ("_START_HEAVY", 1.0), ("_MARGIN", 0.03)):
        monkeypatch.setattr(f"allocator.eviction_floor.{name}", value)
    trace = generate("mixture", 400, seed=8)
    for remote_blocks, is_same in ((0, True), (20_000, False)):
        rows = [
            replay(
                trace,
                Setting(capacity_percent=5, price=price, remote_blocks=remote_blocks, admission="everything"),
            )
            for price in ("uniform", "cost")
        ]
        assert (rows[0].evictions == rows[1].evictions) is is_same
    with pytest.raises(ConfigError, match="price: got 'dear'; expected one of uniform, cost"):
        Setting(capacity_percent=5, price="dear")


def test_hosts_lose_hits_to_random_routing_and_keep_them_by_session_and_prefix() -> None:
    trace = generate("multi-turn", 1500)
    found = {
        routing: replay(trace, Setting(policy="lru", capacity_percent=10, hosts=10, routing=routing)).block_hit_ratio
        for routing in ("random", "session", "prefix")
    }
    assert found["session"] > 1.2 * found["random"]
    assert found["prefix"] > 1.2 * found["random"]


def test_a_thousand_hosts_share_what_one_computed_through_the_remote_tier() -> None:
    trace = generate("system-prompt", 500)
    setting = Setting(policy="lru", capacity_blocks=60, hosts=1000, remote_blocks=100_000)
    assert replay(trace, setting).remote_hit_ratio > 0
