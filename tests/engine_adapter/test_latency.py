from __future__ import annotations

import json

import pytest

from engine_adapter.latency import LatencyRecorder, percentile, summarize


def test_percentile_is_the_smallest_value_that_enough_do_not_exceed() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [percentile(values, p) for p in (50, 95, 99, 100, 0)] == [50.0, 95.0, 99.0, 100.0, 1.0]
    assert percentile([3.0], 99) == 3.0
    assert percentile([2.0, 1.0], 50) == 1.0
    assert percentile([], 50) is None
    assert summarize([]) == {"count": 0, "mean": None, "p50": None, "p95": None, "p99": None}


def test_queue_time_first_token_and_intervals_are_apart() -> None:
    recorder = LatencyRecorder()
    recorder.submitted("a", 10.0)
    recorder.admitted("a", 12.0)
    recorder.admitted("a", 15.0)  # after a preemption: the queue time stays
    recorder.tokens("a", 0, 1, 13.0)
    recorder.tokens("a", 0, 1, 13.5)
    recorder.tokens("a", 0, 2, 14.5)
    recorder.tokens("a", 0, 0, 99.0)
    entry = recorder.finished("a")
    assert (entry.queue_seconds, entry.ttft_seconds, entry.itl_seconds) == (2.0, 3.0, [0.5, 0.5, 0.5])


def test_branches_have_their_own_intervals_and_one_first_token() -> None:
    recorder = LatencyRecorder()
    recorder.submitted("a", 0.0)
    recorder.tokens("a", 0, 1, 1.0)
    recorder.tokens("a", 1, 1, 1.0)
    recorder.tokens("a", 1, 1, 3.0)
    recorder.tokens("a", 0, 1, 4.0)
    entry = recorder.finished("a")
    assert (entry.ttft_seconds, entry.itl_seconds) == (1.0, [2.0, 3.0])


def test_snapshot_covers_running_and_the_newest_finished_requests() -> None:
    recorder = LatencyRecorder(keep_requests=2)
    for index in range(4):
        recorder.submitted(f"r{index}", 0.0)
        recorder.tokens(f"r{index}", 0, 1, float(index + 1))
        if index < 3:
            recorder.finished(f"r{index}")
    assert recorder.snapshot()["ttft_seconds"]["count"] == 3  # r0 fell out
    told = json.loads(recorder.to_json())
    assert told["ttft_seconds"]["p50"] == 3.0
    assert told["itl_seconds"]["count"] == 0
    with pytest.raises(KeyError):
        recorder.finished("r0")
