"""Replays a trace through simulated hosts and counts.

    row = replay(trace, Setting(policy="lru", capacity_percent=5))

The clock is the trace's; requests are handled one after the other. Of all blocks that requests present (a partly
filled last one included), those in the leading run of resident blocks are hits. Deterministic: a seed and a trace give
one row. Without tiers below, a host is the block pool alone; with them it is a whole store
(`kvstore.simulation.stores`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from allocator.block_marks import NOBODY
from kvstore.simulation.belady import bound_hits
from kvstore.simulation.counts import Counts
from kvstore.simulation.hosts import Host, Router
from kvstore.simulation.policies import BOUND, POLICIES
from kvstore.simulation.setting import Row, Setting
from kvstore.simulation.trace import Trace, each

if TYPE_CHECKING:
    from kvstore.simulation.stores import StoreHost

_PROGRESS_REQUESTS = 2048
_PROGRESS_REQUESTS_OF_STORES = 16
Progress = Callable[[int], None]


def replay(trace: Trace, setting: Setting, progress: Progress | None = None) -> Row:
    """Runs one setting. `progress` is told how many requests have been done, now and then."""
    began = time.perf_counter()
    percent, blocks = setting.capacity_percent, setting.capacity_blocks
    raw_blocks = trace.capacity_blocks(percent) if percent is not None else blocks
    assert raw_blocks is not None
    fitting = max(1, int(raw_blocks * setting.costs.blocks_per_raw_block(setting.codec)))
    counts = Counts(setting, fitting, trace.block_tokens)
    if setting.policy == BOUND:
        _bound(trace, counts, fitting)
    elif setting.has_tiers:
        _replay_stores(trace, setting, counts, fitting, progress)
    else:
        _replay_pools(trace, setting, counts, fitting, progress)
    presented = max(1, trace.block_count)
    requests = len(trace)
    tiers = counts.tier_rows(presented, float(trace.seconds[-1] - trace.seconds[0]))
    ratios = {one.tier: one.block_hit_ratio for one in tiers}
    hits = sum(counts.blocks.values())
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
        device_hit_ratio=ratios["device"],
        host_hit_ratio=ratios.get("host", 0.0),
        remote_hit_ratio=ratios.get("remote", 0.0),
        least_tenant_hit_ratio=_least_of_tenants(trace, counts.hits),
        evictions=counts.evictions["device"],
        spilled_bytes=sum(counts.written_bytes.values()),
        fetched_bytes=sum(counts.read_bytes.values()),
        prefill_seconds_saved=counts.seconds_saved,
        ttft_seconds_mean=(counts.seconds_plain - counts.seconds_saved) / requests,
        ttft_seconds_mean_without_cache=counts.seconds_plain / requests,
        gpu_dollars_saved=counts.seconds_saved / 3600 * setting.costs.gpu_dollars_per_hour,
        tier_dollars=sum(one.dollars for one in tiers if one.tier != "device"),
        tiers=tiers,
        seconds=time.perf_counter() - began,
    )


def _replay_pools(trace: Trace, setting: Setting, counts: Counts, fitting: int, progress: Progress | None) -> None:
    quota = fitting * setting.tenant_percent / 100
    room = min(fitting, trace.block_count + 1)  # with room for everything nothing is evicted: no larger pool is made
    hosts = [Host(room, POLICIES[setting.policy], quota) for _ in range(setting.hosts)]
    router = Router(setting.routing, hosts, setting.seed)
    input_tokens, sessions = trace.input_tokens.tolist(), trace.sessions.tolist()
    owners = trace.tenants.tolist()
    tenants = owners if setting.tenant_percent else [NOBODY] * len(trace)
    priorities = trace.priorities.tolist()
    for number, keys, names in each(trace):
        host = hosts[router.choose(sessions[number], keys, names)]
        whose = {"owner": owners[number], "tenant": tenants[number], "priority": priorities[number]}
        counts.add(input_tokens[number], host.request(keys, names, **whose))
        if progress is not None and not number % _PROGRESS_REQUESTS:
            progress(number)
    counts.evictions["device"] = sum(host.pool.evicted_count for host in hosts)


def _replay_stores(trace: Trace, setting: Setting, counts: Counts, fitting: int, progress: Progress | None) -> None:
    from kvstore.simulation.stores import StoreHost, remote_room  # a whole store: only where one is asked for

    room = remote_room(setting, trace.block_tokens)
    hosts = [StoreHost(setting, fitting, trace.block_tokens, room) for _ in range(setting.hosts)]
    router = Router(setting.routing, hosts, setting.seed)
    input_tokens, sessions, seconds = trace.input_tokens.tolist(), trace.sessions.tolist(), trace.seconds.tolist()
    owners, priorities = trace.tenants.tolist(), trace.priorities.tolist()
    for number, keys, names in each(trace):
        host = hosts[router.choose(sessions[number], keys, names)]
        whose = {"owner": owners[number], "priority": priorities[number]}
        counts.add(input_tokens[number], *host.request(keys, seconds[number], input_tokens[number], **whose))
        if progress is not None and not number % _PROGRESS_REQUESTS_OF_STORES:
            progress(number)
    for host in hosts:
        host.finish()
    _count_movement(hosts, counts)
    if room is not None:
        counts.evictions["remote"] = room.index.counts["evicted"]


def _count_movement(hosts: Sequence[StoreHost], counts: Counts) -> None:
    for host in hosts:
        counts.evictions["device"] += host.store.pool.evicted_count
        for tier in host.tiers:
            counts.written_bytes[tier.name] += host.moved_bytes(tier.name, "put")
            counts.read_bytes[tier.name] += host.moved_bytes(tier.name, "get")
            if tier.private_memory:
                counts.evictions[tier.name] += tier.counters().get("evicted", 0)


def _least_of_tenants(trace: Trace, hits: list[int]) -> float:
    blocks = np.bincount(trace.tenants, np.diff(trace.starts))
    ratios = np.bincount(trace.tenants, hits) / np.maximum(blocks, 1)
    return float(ratios[blocks > 0].min(initial=1.0))


def _bound(trace: Trace, counts: Counts, fitting: int) -> None:
    hits, counts.evictions["device"] = bound_hits(trace, fitting)
    for tokens, count in zip(trace.input_tokens.tolist(), hits, strict=True):
        counts.add(tokens, count)
