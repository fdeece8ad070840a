"""Counting: once, by cause, per store, and never a ratio above one."""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore import UsageError
from kvstore.metrics import StoreMetrics
from quant import dispatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore


def test_case_145_hits_are_counted_once_a_request() -> None:
    metrics = StoreMetrics()
    for _ in range(5):
        metrics.count_request("a", 100, {"device": 30, "host": 50})
    assert not metrics.count_request("a", 100, {"device": 90})
    assert metrics.get("hit_tokens") == 80
    assert metrics.get("hit_tokens", tier="host") == 50
    assert metrics.get("prompt_tokens") == 100
    assert metrics.hit_ratio == 0.8
    metrics.forget_request("a")
    assert metrics.count_request("a", 100, {})
    assert metrics.hit_ratio == 0.4
    with pytest.raises(UsageError, match="hit tokens of 100"):
        metrics.count_request("b", 100, {"device": 60, "host": 41})
    with pytest.raises(UsageError, match="hit tokens of 100"):
        metrics.count_request("b", 100, {"device": -1})
    assert metrics.get("requests") == 2


def test_what_happens_is_counted_by_cause() -> None:
    metrics = StoreMetrics()
    metrics.missed("absent", 2)
    metrics.missed("corrupt", tier="host")
    metrics.dropped("spill_queue_full", 3)
    metrics.cooled(4)
    metrics.cooled(1, cause="pressure")
    metrics.kept_raw("too_lossy")
    metrics.spilled("host", 5)
    metrics.fetched("host", 0)
    metrics.promoted("host", 1)
    metrics.demoted("host", 1)
    metrics.evicted(7)
    metrics.computed(16)
    metrics.recomputed(8, cause="late")
    metrics.reused(32, {"device": 16, "host": 16})
    metrics.reused(4)
    metrics.preempted()
    metrics.aborted()
    metrics.set("class_bytes", 512, **{"class": "full:int4"})
    metrics.set("waste_fraction", 0.01)
    snapshot = metrics.snapshot()
    assert snapshot['missed_blocks_total{tier="host",cause="corrupt"}'] == 1
    assert snapshot['cooled_blocks_total{cause="pressure"}'] == 1
    assert snapshot['reused_tokens_total{tier="host"}'] == 16
    assert snapshot['class_bytes{class="full:int4"}'] == 512
    assert 'fetched_blocks_total{tier="host"}' not in snapshot
    assert metrics.get("missed_blocks") == 3
    with pytest.raises(UsageError, match="add up"):
        metrics.reused(3, {"device": 2})


def test_the_exposition_parses_and_agrees() -> None:
    metrics = StoreMetrics()
    metrics.missed("absent", 2)
    metrics.set("tier_used_bytes", 77, tier="host")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(metrics.prometheus_text())
        for sample in family.samples
    }
    assert samples["kvstore_missed_blocks_total", (("cause", "absent"), ("tier", "any"))] == 2
    assert samples["kvstore_tier_used_bytes", (("tier", "host"),)] == 77
    assert samples["kvstore_requests_total", ()] == 0
    assert all(name.startswith("kvstore_") for name, _ in samples)


def test_a_restated_gauge_forgets_what_is_gone() -> None:
    metrics = StoreMetrics()
    first = {"operation": "hash_chain", "device": "cpu", "path": "native-sha"}
    metrics.restate("kernel_path", [(first, 1)])
    metrics.restate("kernel_path", [(first | {"path": "hashlib"}, 1)])
    assert metrics.snapshot() == {'kernel_path{operation="hash_chain",device="cpu",path="hashlib"}': 1}
    with pytest.raises(UsageError, match=r"expected .*device"):
        metrics.restate("kernel_path", [({"operation": "hash_chain"}, 1)])


def test_a_store_says_which_path_runs_each_operation(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    for path in ("plain", "fast"):
        dispatch.offer("test_sum", "cpu", [dispatch.Implementation(path)])
        try:
            shown = [name for name in store.metrics.snapshot() if name.startswith("kernel_path{")]
            text = store.metrics.prometheus_text()
        finally:
            dispatch.withdraw("test_sum", "cpu")
        expected = {(one.operation, one.device, one.path) for one in dispatch.decisions("cpu")}
        assert {tuple(re.findall('"([^"]*)"', name)) for name in shown} == {*expected, ("test_sum", "cpu", path)}
        assert f'kvstore_kernel_path{{device="cpu",operation="test_sum",path="{path}"}} 1.0' in text


def test_a_task_that_fails_on_the_stores_thread_is_a_metric(make_store: Callable[..., KVStore]) -> None:
    store = make_store(io_threads="thread")

    def fail() -> None:
        raise ZeroDivisionError("planted")

    store._parts.executor.submit(fail)
    store.close()
    assert store.metrics.get("failed_tasks", cause="ZeroDivisionError") == 1


def test_stores_do_not_share_counts() -> None:
    one, two = StoreMetrics(), StoreMetrics()
    one.computed(5)
    assert two.get("computed_tokens") == 0
    assert one.registry is not two.registry


@pytest.mark.parametrize(
    ("name", "amount", "labels", "words"),
    [
        ("misses", 1, {}, "expected one of"),
        ("missed_blocks", 1, {"tier": "host"}, "expected .*cause"),
        ("missed_blocks", 1, {"tier": "host", "reason": "x"}, "expected .*cause"),
        ("missed_blocks", -1, {"tier": "host", "cause": "x"}, "only rises"),
        ("waste_fraction", 1, {}, "used as a counter"),
    ],
)
def test_a_slip_in_a_name_is_an_error(name: str, amount: float, labels: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StoreMetrics().add(name, amount, **labels)


def test_no_count_is_lost_between_threads() -> None:
    metrics = StoreMetrics()

    def work() -> None:
        for _ in range(5000):
            metrics.evicted(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.get("evicted_blocks") == 20_000
