"""How requests are told from calls to a storage below SGLang, without SGLang."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.sglang_storage import recording
from engine_adapter.sglang_storage.recording import Recording, Requests
from kvstore.trace_recorder import TraceRecorder

PAGE = 16
THRESHOLD = 48  # two pages of a prompt may be new without a question


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def made(tmp_path: Path, clock: Clock) -> tuple[Requests, TraceRecorder]:
    recorder = TraceRecorder(tmp_path / "t.jsonl", b"", PAGE, clock=clock)
    return Requests(recorder, PAGE, THRESHOLD), recorder


def lines_of(requests: Requests, recorder: TraceRecorder, tmp_path: Path, now: float) -> list[tuple[int, int, int]]:
    requests.end_due(now, all_=True)
    recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()[1:]]
    assert all(len(line["hash_ids"]) == line["input_length"] // PAGE for line in lines)
    return [(line["timestamp"], line["input_length"] // PAGE, line["output_length"] // PAGE) for line in lines]


def test_a_front_that_is_not_named_is_filled_in_by_what_is_written_next(tmp_path: Path) -> None:
    clock = Clock()
    requests, recorder = made(tmp_path, clock)
    requests.asked([1, 2], [5, 6, 7], 1.0)  # SGLang leaves out 3 and 4, the node that it stands at
    requests.wrote([1, 2, 3, 4], [5, 6, 7, 8], 1.5)  # the prompt's last page is never asked for
    requests.wrote([1, 2, 3, 4, 5, 6, 7, 8], [9, 10], 9.0)
    requests.end_due(9.1)
    assert recorder.recorded_requests == 0  # more of the answer may come
    clock.now = 11.0
    requests.end_due(11.0)
    assert recorder.recorded_requests == 1
    assert lines_of(requests, recorder, tmp_path, 11.0) == [(1000, 8, 2)]


def test_pieces_of_one_answer_are_one_and_the_next_turn_is_another(tmp_path: Path) -> None:
    clock = Clock()
    requests, recorder = made(tmp_path, clock)
    requests.asked([], [1, 2, 3], 0.0)
    requests.wrote([], [1, 2, 3], 0.5)
    requests.wrote([1, 2, 3], [4, 5, 6], 5.0)
    requests.wrote([1, 2, 3, 4, 5, 6], [7], 5.2)
    requests.wrote([1, 2, 3, 4, 5, 6, 7], [8, 9], 20.0)  # a prompt of less than the threshold
    requests.wrote([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12, 13], 24.0)
    clock.now = 30.0
    assert lines_of(requests, recorder, tmp_path, 30.0) == [(0, 3, 4), (20000, 9, 4)]


def test_what_was_written_before_names_the_front_of_what_is_found(tmp_path: Path) -> None:
    clock = Clock()
    requests, recorder = made(tmp_path, clock)
    requests.wrote([], [1, 2, 3, 4], 0.0)
    clock.now = 60.0
    requests.asked([1], [4], 60.0)  # all of it is stored, and nothing new is written
    lines = lines_of(requests, recorder, tmp_path, 60.0)
    assert lines == [(0, 2, 2), (60000, 4, 0)]


def test_requests_whose_front_is_never_named_are_counted(tmp_path: Path) -> None:
    clock = Clock()
    requests, recorder = made(tmp_path, clock)
    requests.asked([1], [4, 5], 0.0)
    requests.asked([1], [4, 5], 30.0)  # another one: the first would not wait so long
    requests.end_due(300.0)
    assert requests.lost_requests == 0
    requests.end_due(601.0)
    assert requests.lost_requests == 1
    requests.wrote([1, 2], [4, 5], 602.0)
    clock.now = 602.0
    assert lines_of(requests, recorder, tmp_path, 602.0) == [(30000, 4, 0)]


def test_a_question_behind_a_request_that_has_ended_is_another(tmp_path: Path) -> None:
    """Found here: it was taken for the rest of that request's, and its pages were held for ever."""
    clock = Clock()
    requests, recorder = made(tmp_path, clock)
    first = list(range(1, recording._BATCH_PAGES + 1))
    requests.asked([], first, 0.0)
    requests.wrote([], first, 0.5)
    requests.wrote(first, [900], 0.7)
    clock.now = 10.0
    requests.end_due(10.0)
    assert (recorder.recorded_requests, requests._held_pages) == (1, 0)
    requests.asked(first, [901, 902, 903], 20.0)
    requests.wrote(first, [901, 902, 903], 21.0)
    requests.wrote([*first, 901, 902, 903], [904], 22.0)
    clock.now = 40.0
    assert lines_of(requests, recorder, tmp_path, 40.0)[1:] == [(20000, len(first) + 3, 1)]
    assert (requests._held_pages, requests.lost_requests) == (0, 0)


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_HELD_PAGES", 1000)
    monkeypatch.setattr(recording, "_KNOWN_PAGES", 500)
    requests, recorder = made(tmp_path, Clock())
    for number in range(200):
        requests.asked([], range(1 + number * 100, 51 + number * 100), number)
        requests.end_due(number)
    assert requests._held_pages <= 1050
    assert len(requests._held) <= 21
    assert len(requests._by_end) <= 21
    assert len(requests._by_first) <= 21
    assert len(requests._before) <= 500
    assert requests.lost_requests > 150
    recorder.close()


def keys(*numbers: int) -> list[str]:
    return [hashlib.sha256(str(one).encode()).hexdigest() for one in numbers]


def recorded_by(tmp_path: Path, calls: Sequence[tuple[str, list[str], list[str]]], **given: Any) -> list[Any]:
    recorder = TraceRecorder(tmp_path / "t.jsonl", b"", PAGE, salt=bytes(32))
    one = Recording(recorder, PAGE, THRESHOLD, **given)
    for name, before, new in calls:
        getattr(one, name)(before, new)
    one.close()
    one.close()
    return [json.loads(line) for line in (tmp_path / "t.jsonl").read_text(encoding="utf-8").splitlines()[1:]]


def test_a_thread_of_its_own_writes(tmp_path: Path) -> None:
    calls = [("asked", [], keys(1, 2, 3)), ("wrote", [], keys(1, 2, 3)), ("wrote", keys(1, 2, 3), keys(4, 5))]
    (line,) = recorded_by(tmp_path, calls)
    assert (line["input_length"], line["output_length"], len(set(line["hash_ids"]))) == (48, 32, 3)
    assert not [one for one in threading.enumerate() if one.name == "kvstore-trace"]


def test_calls_that_there_is_no_time_for_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SGLang's threads never wait for the one that writes."""
    go = threading.Event()
    plain = Requests.asked

    def slow(self: Requests, *given: Any) -> None:
        go.wait(30)
        plain(self, *given)

    monkeypatch.setattr(Requests, "asked", slow)
    monkeypatch.setattr(recording, "_QUEUE_CALLS", 4)
    one = Recording(TraceRecorder(tmp_path / "t.jsonl", b"", PAGE), PAGE, THRESHOLD)
    began = time.monotonic()
    for number in range(50):
        one.asked([], keys(number))
    assert time.monotonic() - began < 10  # not the 30 that the other thread stands still
    assert 45 <= one.dropped_calls <= 46
    go.set()
    one.close()
    assert f"{one.dropped_calls} calls that there was no time for" in caplog.text
