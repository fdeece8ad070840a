"""Replays a trace through simulated hosts and counts.

    row = replay(trace, Setting(policy="lru", capacity_percent=5))

The clock is the trace's; requests are handled one after the other. Of all blocks that requests present (a partly
filled last one included), those in the leading run of resident blocks are hits. Deterministic: a seed and a trace give
one row.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from allocator.block_marks import NOBODY
from kvstore.simulation.belady import bound_hits
from kvstore.simulation.hosts import BlockPrices, Host, LowerTier, Router
from kvstore.simulation.policies import BOUND, POLICIES
from kvstore.simulation.setting import Costs, Row, Setting
from kvstore.simulation.trace import Trace, each

_PROGRESS_REQUESTS = 2048


@dataclass(slots=True)
class _Counts:
    """What a replay adds up. Blocks by tier, and the model's seconds."""

    device: int = 0
    host: int = 0
    remote: int = 0
    evictions: int = 0
    spilled: int = 0
    seconds_saved: float = 0.0
    seconds_plain: float = 0.0
    hits: list[int] = field(default_factory=list)  # by request

    def add_time(self, costs: Costs, tokens: int, reused_tokens: int, fetching_seconds: float) -> None:
        """Time to first token of one request, without the cache and with it. The last token is always computed."""
        plain = costs.prefill_seconds(0, tokens)
        self.seconds_plain += plain
        if reused_tokens:
            left = costs.prefill_seconds(min(reused_tokens, tokens - 1), tokens)
            self.seconds_saved += max(0.0, plain - left - fetching_seconds)


def replay(trace: Trace, setting: Setting, progress: Callable[[int], None] | None = None) -> Row:
    """Runs one setting. `progress` is told how many requests have been done, now and then."""
    began = time.perf_counter()
    percent, blocks = setting.capacity_percent, setting.capacity_blocks
    raw_blocks = trace.capacity_blocks(percent) if percent is not None else blocks
    assert raw_blocks is not None
    fitting = max(1, int(raw_blocks * setting.costs.blocks_per_raw_block(setting.codec)))
    counts = _bound(trace, setting, fitting) if setting.policy == BOUND else _replay(trace, setting, fitting, progress)
    block_bytes = trace.block_tokens * setting.costs.bytes_per_token
    block_bytes = int(block_bytes / setting.costs.blocks_per_raw_block(setting.codec))
    hits = counts.device + counts.host + counts.remote
    presented = max(1, trace.block_count)
    requests = len(trace)
    return Row(
        trace=trace.name,
        policy=setting.policy,
        capacity_percent=percent if percent is not None else 100 * raw_blocks / max(1, trace.unique_count),
        capacity_blocks=fitting,
        codec=setting.codec,
        hosts=setting.hosts,
        routing=setting.routing if setting.hosts > 1 else "-",
        requests=requests,
        blocks=trace.block_count,
        block_hit_ratio=hits / presented,
        token_hit_ratio=hits * trace.block_tokens / max(1, int(trace.input_tokens.sum())),
        device_hit_ratio=counts.device / presented,
        host_hit_ratio=counts.host / presented,
        remote_hit_ratio=counts.remote / presented,
        least_tenant_hit_ratio=_least_of_tenants(trace, counts.hits),
        evictions=counts.evictions,
        spilled_bytes=counts.spilled * block_bytes,
        fetched_bytes=(counts.host + counts.remote) * block_bytes,
        prefill_seconds_saved=counts.seconds_saved,
        ttft_seconds_mean=(counts.seconds_plain - counts.seconds_saved) / requests,
        ttft_seconds_mean_without_cache=counts.seconds_plain / requests,
        gpu_dollars_saved=counts.seconds_saved / 3600 * setting.costs.gpu_dollars_per_hour,
        seconds=time.perf_counter() - began,
    )


def _replay(trace: Trace, setting: Setting, fitting: int, progress: Callable[[int], None] | None) -> _Counts:
    remote = LowerTier(setting.remote_blocks, None) if setting.remote_blocks else None
    policy = POLICIES[setting.policy]
    quota = fitting * setting.tenant_percent / 100
    hosts = [Host(fitting, policy, setting.host_blocks, remote, quota) for _ in range(setting.hosts)]
    router = Router(setting.routing, hosts, setting.seed)
    costs = setting.costs
    block_bytes = trace.block_tokens * costs.bytes_per_token / costs.blocks_per_raw_block(setting.codec)
    host_seconds = block_bytes / costs.host_bytes_per_second
    remote_seconds = block_bytes / costs.remote_bytes_per_second
    prices = None
    if setting.price == "cost":
        prices = BlockPrices(costs.prefill_seconds(0, trace.block_tokens), host_seconds, remote_seconds)
    counts = _Counts()
    input_tokens, sessions = trace.input_tokens.tolist(), trace.sessions.tolist()
    tenants = trace.tenants.tolist() if setting.tenant_percent else [NOBODY] * len(trace)
    priorities = trace.priorities.tolist()
    for number, keys, names in each(trace):
        host = hosts[router.choose(sessions[number], keys, names)]
        whose = {"tenant": tenants[number], "priority": priorities[number]}
        device, own, far = host.request(keys, names, prices, **whose)
        counts.hits.append(device + own + far)
        counts.device += device
        counts.host += own
        counts.remote += far
        fetching = own * host_seconds + far * remote_seconds
        counts.add_time(costs, input_tokens[number], (device + own + far) * trace.block_tokens, fetching)
        if progress is not None and not number % _PROGRESS_REQUESTS:
            progress(number)
    counts.evictions = sum(host.pool.evicted_count for host in hosts)
    counts.spilled = sum(host.spilled_count for host in hosts) + (remote.stored_count if remote else 0)
    return counts


def _least_of_tenants(trace: Trace, hits: list[int]) -> float:
    blocks = np.bincount(trace.tenants, np.diff(trace.starts))
    ratios = np.bincount(trace.tenants, hits) / np.maximum(blocks, 1)
    return float(ratios[blocks > 0].min(initial=1.0))


def _bound(trace: Trace, setting: Setting, fitting: int) -> _Counts:
    hits, evictions = bound_hits(trace, fitting)
    counts = _Counts(device=sum(hits), evictions=evictions, hits=hits)
    for tokens, count in zip(trace.input_tokens.tolist(), hits, strict=True):
        counts.add_time(setting.costs, tokens, count * trace.block_tokens, 0.0)
    return counts
