"""Priorities and tenants' quotas in the simulator: the pool's own, under every policy."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocator import ConfigError
from kvstore.simulation import POLICIES, Setting, Trace, TraceError, build, read, replay
from kvstore.simulation.trace import Request
from tests.kvstore.simulation.invented_traces import tenants_that_differ


def flood_beside_chat(priority: int = 35) -> Trace:
    """Tenant 7 asks about twelve documents again and again; tenant 9 sends prompts that never come back."""

    def requests() -> Iterator[Request]:
        numbers, fresh = random.Random(4), itertools.count(1000)
        for second in range(900):
            if second % 3 == 0:
                document = numbers.randrange(12)
                yield Request(second, 8 * 512, 1, list(range(document * 8, document * 8 + 8)), 0, 7, priority)
            else:
                yield Request(second, 20 * 512, 1, [next(fresh) for _ in range(20)], 0, 9)

    return build("flood", 512, requests())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_quota_keeps_one_tenants_flood_from_the_others(policy: str) -> None:
    trace = flood_beside_chat()
    alone = replay(trace, Setting(policy=policy, capacity_blocks=250))
    quota = replay(trace, Setting(policy=policy, capacity_blocks=250, tenant_percent=60))
    assert quota.device_hit_ratio > 0.15
    assert quota.device_hit_ratio >= alone.device_hit_ratio
    assert quota.least_tenant_hit_ratio == alone.least_tenant_hit_ratio == 0  # the flood hits nothing in any case


@pytest.mark.parametrize("policy", POLICIES)
def test_a_priority_keeps_what_asked_for_it(policy: str) -> None:
    usual = replay(flood_beside_chat(), Setting(policy=policy, capacity_blocks=130))
    wanted = replay(flood_beside_chat(80), Setting(policy=policy, capacity_blocks=130))
    assert wanted.device_hit_ratio > 0.15
    assert wanted.device_hit_ratio >= usual.device_hit_ratio


def test_knowing_who_asks_gains_hits_where_tenants_differ() -> None:
    lru, hidden, told = (
        100
        * replay(tenants_that_differ(2400, 1, told=told), Setting(policy=policy, capacity_percent=5)).block_hit_ratio
        for policy, told in (("lru", True), ("default", False), ("default", True))
    )
    assert told > hidden + 0.5
    assert hidden > lru + 2


def test_tenants_and_priorities_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    head = {"format": "kvstore-trace", "version": 1, "block_tokens": 16}
    line = {"timestamp": 1, "input_length": 16, "output_length": 1, "hash_ids": [5], "tenant": 2**63, "priority": 80}
    path.write_text(f"{json.dumps(head)}\n{json.dumps(line)}\n", encoding="utf-8")
    trace = read(path, None, None)
    assert (trace.tenants.tolist(), trace.priorities.tolist()) == ([1], [80])
    path.write_text(f"{json.dumps(head)}\n{json.dumps(line | {'priority': 101})}\n", encoding="utf-8")
    with pytest.raises(TraceError, match=r"line 2: priority: got 101; expected an int in \[0, 100\]"):
        read(path, None, None)
    with pytest.raises(ConfigError, match="tenant percent: got 101"):
        Setting(capacity_percent=5, tenant_percent=101)
