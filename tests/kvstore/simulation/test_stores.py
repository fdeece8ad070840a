"""Hosts with tiers against a store with real bytes, real memory and a real disk: the same hits, moves and evictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allocator import KVGeometry
from kvstore import KVStore, KVStoreConfig
from kvstore.disk_tier.tier import DiskTier
from kvstore.frame.specs import geometry_specs
from kvstore.host_tier.tier import HostTier
from kvstore.simulation import Costs, Setting, Trace, first_requests, generate, replay
from kvstore.simulation.stores import StoreHost, aligned, geometry_of, identity_of, remote_room
from kvstore.simulation.trace import each

if TYPE_CHECKING:
    from kvstore.simulation.tiers import RemoteRoom
    from kvstore.tier import Tier

INSTANT = 1e30  # bytes a second
COSTS = Costs(bytes_per_token=64, host_bytes_per_second=INSTANT, remote_bytes_per_second=INSTANT)
DISK_BYTES = 256 << 20


class RealHost(StoreHost):
    """The same driver over a plain KVStore: a slab, an arena and a file."""

    _TIERS = ("device", "host", "disk")
    folder: Path
    block_tokens: int

    def _make_tiers(self, setting: Setting, remote: RemoteRoom | None) -> list[Tier]:
        specs = geometry_specs(geometry_of(self.block_tokens, setting.costs, setting.codec))
        room = setting.host_blocks * aligned(self.block_bytes)
        tiers: list[Tier] = [HostTier(room, self._link(INSTANT), slot_bytes=[self.block_bytes])]
        if remote is not None:
            tiers.append(DiskTier(str(self.folder), DISK_BYTES, self._link(INSTANT), sync="none", specs=specs))
        return tiers

    def _make_store(self, geometry: KVGeometry, config: KVStoreConfig, setting: Setting) -> KVStore:
        return KVStore(geometry, identity_of(geometry), config, device="cpu", tiers=self.tiers, clock=self._clock)


def check_equal(trace: Trace, setting: Setting, capacity: int, folder: Path) -> list[int]:
    """Blocks hit by tier, the same in both."""

    class Real(RealHost):
        pass

    Real.folder, Real.block_tokens = folder, trace.block_tokens
    room = remote_room(setting, trace.block_tokens)
    simulated = StoreHost(setting, capacity, trace.block_tokens, room)
    real = Real(setting, capacity, trace.block_tokens, room)
    totals = [0, 0, 0]
    for number, keys, _ in each(trace):
        arguments = (keys, float(trace.seconds[number]), int(trace.input_tokens[number]))
        found, expected = simulated.request(*arguments), real.request(*arguments)
        assert found == expected, number
        totals = [total + blocks for total, blocks in zip(totals, found, strict=False)]
    for host in (simulated, real):
        host.finish()
    assert simulated.store.pool.evicted_count == real.store.pool.evicted_count > 0
    for own, other in zip(simulated.tiers, real.tiers, strict=True):
        for kind in ("put", "get"):
            assert simulated.moved_bytes(own.name, kind) == real.moved_bytes(other.name, kind)
    evicted = [host.tiers[0].counters()["evicted"] for host in (simulated, real)]
    assert evicted[0] == evicted[1] > 0
    real.store.close()
    simulated.store.close()
    return totals[: 1 + len(simulated.tiers)]


@pytest.mark.parametrize("policy", ["lru", "default"])
@pytest.mark.parametrize("workload", ["multi-turn", "rag", "mixture"])
def test_two_tiers_hold_and_move_what_a_store_with_bytes_does(workload: str, policy: str, tmp_path: Path) -> None:
    trace = generate(workload, 120, seed=11, block_tokens=16)
    assert min(check_equal(trace, *setting_of(trace, policy, remote_blocks=1 << 14), tmp_path)) > 0


def test_one_tier_holds_and_moves_what_a_store_with_bytes_does(tmp_path: Path) -> None:
    trace = generate("agent", 150, seed=11, block_tokens=16)
    assert min(check_equal(trace, *setting_of(trace, "default", remote_blocks=0), tmp_path)) > 0


@pytest.mark.parametrize("name", ["synthetic", "conversation"])
def test_two_tiers_do_the_same_on_the_first_requests_of_a_public_trace(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    trace = first_requests(request.getfixturevalue(name), 120)
    assert sum(check_equal(trace, *setting_of(trace, "lru", remote_blocks=1 << 14), tmp_path)) > 0


def setting_of(trace: Trace, policy: str, remote_blocks: int) -> tuple[Setting, int]:
    """Everything in use, and the device's blocks."""
    capacity = max(int(trace.full_counts.max()) + 8, trace.capacity_blocks(4))
    setting = Setting(
        policy=policy,
        capacity_blocks=capacity,
        costs=COSTS,
        admission="everything",
        host_blocks=2 * capacity,
        remote_blocks=remote_blocks,
    )
    return setting, capacity


def test_a_slow_tier_brings_less_and_what_comes_late_is_computed() -> None:
    trace = generate("multi-turn", 400, seed=2, block_tokens=16)
    rows = [
        replay(
            trace,
            Setting(
                policy="lru",
                capacity_percent=3,
                host_blocks=4_000,
                fetch_deadline_seconds=deadline,
                costs=Costs(host_bytes_per_second=speed),
            ),
        )
        for speed, deadline in ((20e9, 1.0), (0.1e9, 1.0), (20e9, 1e-4))
    ]
    assert rows[0].host_hit_ratio > 0.1
    assert rows[1].host_hit_ratio < rows[0].host_hit_ratio / 2  # slower than computing: left alone
    assert rows[2].host_hit_ratio < rows[0].host_hit_ratio
    assert rows[1].ttft_seconds_mean > rows[0].ttft_seconds_mean


def test_the_remote_tier_takes_what_its_admission_says() -> None:
    trace = generate("mixture", 300, seed=2, block_tokens=16)
    few, many = (
        replay(trace, Setting(policy="lru", capacity_percent=5, remote_blocks=100_000, admission=one))
        for one in ("reuse", "everything")
    )
    assert 0 < few.spilled_bytes < many.spilled_bytes / 2
    assert many.remote_hit_ratio > few.remote_hit_ratio > 0


def test_what_each_tier_did_adds_up_and_is_paid_for() -> None:
    trace = generate("rag", 300, seed=2)
    below = {"host_blocks": 600, "remote_blocks": 50_000}
    row = replay(trace, Setting(policy="lru", capacity_percent=3, admission="everything", **below))
    device, host, remote = row.tiers
    assert [one.tier for one in row.tiers] == ["device", "host", "remote"]
    assert sum(one.block_hit_ratio for one in row.tiers) == pytest.approx(row.block_hit_ratio)
    assert sum(one.seconds_saved for one in row.tiers) == pytest.approx(row.prefill_seconds_saved)
    assert (host.written_bytes + remote.written_bytes, host.read_bytes + remote.read_bytes) == (
        row.spilled_bytes,
        row.fetched_bytes,
    )
    block_bytes = trace.block_tokens * 131_072
    assert host.read_bytes == round(host.block_hit_ratio * row.blocks) * block_bytes
    assert host.evictions > 0
    assert device.evictions == row.evictions
    hours = float(trace.seconds[-1] - trace.seconds[0]) / 3600
    assert remote.dollars == pytest.approx(50_000 * block_bytes / 2**30 * 0.017 * hours)
    assert row.tier_dollars == pytest.approx(host.dollars + remote.dollars)
