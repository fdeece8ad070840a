"""What a trace would hit and save on the machine of a plan, for each codec and with each tier added below.

Replays through `kvstore.simulation`. The costs are the plan's own floors, so times are what the machine could do at
best; blocks are counted at a codec's bytes a token, so windows and blocks that stay in full precision are left aside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from allocator import ConfigError
from kvstore.planning.capacity import Capacity, Machine
from kvstore.simulation.running import Progress, run
from kvstore.simulation.setting import Costs, Row, Setting

if TYPE_CHECKING:
    from kvstore.planning.report import TierSize
    from kvstore.simulation.trace import Trace

_TIERS_MAX = 2
_NEVER_TOKENS = 1e18  # a context at which attending costs as much as all the rest, where attention has windows only


@dataclass(frozen=True, slots=True)
class Traffic:
    """The trace to replay on the plan's machine, by which eviction policy; progress: told of requests done."""

    trace: Trace
    policy: str
    progress: Progress | None = None


def traffic_rows(
    traffic: Traffic, capacities: Sequence[Capacity], machine: Machine, tiers: Sequence[TierSize]
) -> list[dict[str, Any]]:
    """A row a codec for the device alone, then one more a tier added. None where no block fits."""
    _check(tiers)
    cases = []
    for capacity in capacities:
        block_bytes = capacity.token_bytes * traffic.trace.block_tokens
        blocks = int(machine.kv_bytes // block_bytes)
        for depth in range(len(tiers) + 1) if blocks > 0 else ():
            below = [int(tier.capacity_bytes // block_bytes) for tier in tiers[:depth]]
            cases.append((capacity, blocks, tiers[:depth], below))
    settings = [_setting(traffic, machine, *case) for case in cases]
    rows = run(traffic.trace, settings, progress=traffic.progress)
    return [_row(row, *case) for row, case in zip(rows, cases, strict=True)]


def _check(tiers: Sequence[TierSize]) -> None:
    if len(tiers) > _TIERS_MAX:
        raise ConfigError(f"trace: got {len(tiers)} tiers; it is replayed with at most {_TIERS_MAX} below the device")
    for tier in tiers:
        if tier.bytes_per_second is None:
            raise ConfigError(f"trace: tier {tier.name} has no bandwidth; expected {tier.name}=size@bandwidth")


def _setting(
    traffic: Traffic, machine: Machine, capacity: Capacity, blocks: int, tiers: Sequence[TierSize], below: list[int]
) -> Setting:
    """In blocks of the codec. More than all that the trace has make no difference, and cost memory here."""
    enough = max(1, traffic.trace.unique_count)
    host, remote = [*(min(one, enough) for one in below), 0, 0][:_TIERS_MAX]
    host_speed, remote_speed = [*(tier.bytes_per_second or 1.0 for tier in tiers), 1.0, 1.0][:_TIERS_MAX]
    costs = costs_of(capacity, machine, host_speed, remote_speed)
    return Setting(
        policy=traffic.policy, capacity_blocks=min(blocks, enough), host_blocks=host, remote_blocks=remote, costs=costs
    )


def costs_of(
    capacity: Capacity, machine: Machine, host_bytes_per_second: float, remote_bytes_per_second: float
) -> Costs:
    """The floors of a prompt as the simulator's model: linear work, and attention that grows with the square."""
    shape = capacity.shape
    width = 2 * shape.query_heads * (shape.score_dim + shape.value_dim)
    windowed = sum(len(group.layers) * group.window_tokens for group in shape.groups if group.window_tokens)
    whole = sum(len(group.layers) for group in shape.groups if not group.window_tokens)
    linear = 2.0 * shape.active_parameters + width * windowed
    return Costs(
        bytes_per_token=max(1, round(capacity.token_bytes)),
        prefill_tokens_per_second=machine.flops_per_second / linear,
        attention_tokens=linear / (width * whole) if whole else _NEVER_TOKENS,
        host_bytes_per_second=host_bytes_per_second,
        remote_bytes_per_second=remote_bytes_per_second,
    )


def _row(row: Row, capacity: Capacity, blocks: int, tiers: Sequence[TierSize], below: list[int]) -> dict[str, Any]:
    ratios = (row.host_hit_ratio, row.remote_hit_ratio)[: len(tiers)]
    return {
        "name": " + ".join([capacity.codec, *(tier.name for tier in tiers)]),
        "codec": capacity.codec,
        "policy": row.policy,
        "capacity_blocks": blocks,
        "tier_blocks": {tier.name: count for tier, count in zip(tiers, below, strict=True)},
        "block_hit_ratio": row.block_hit_ratio,
        "token_hit_ratio": row.token_hit_ratio,
        "hit_ratio_by_tier": {"device": row.device_hit_ratio}
        | {tier.name: ratio for tier, ratio in zip(tiers, ratios, strict=True)},
        "ttft_seconds_mean": row.ttft_seconds_mean,
        "ttft_seconds_mean_without_cache": row.ttft_seconds_mean_without_cache,
        "ttft_seconds_saved_mean": row.ttft_seconds_mean_without_cache - row.ttft_seconds_mean,
        "prefill_seconds_saved": row.prefill_seconds_saved,
    }
