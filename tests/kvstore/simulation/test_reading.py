"""Traces: three formats, and what is wrong told with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.simulation import Setting, TraceError, generate, read, replay
from kvstore.simulation.trace import ConfigError

MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
BAILIAN = {
    "chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 5, "type": "text",
    "turn": 1, "hash_ids": [1, 2, 3],
}  # fmt: skip
HEADER = {"format": "kvstore-trace", "version": 1, "block_tokens": 16}
RECORDED = {
    "seconds": 0.5,
    "input_tokens": 33,
    "output_tokens": 4,
    "hashes": "00" * 7 + "01" + "ff" * 8,
    "session": "a",
}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines))
    return path


def test_mooncake(tmp_path: Path) -> None:
    trace = read(write(tmp_path, MOONCAKE, {**MOONCAKE, "timestamp": 2500}))
    assert (trace.block_tokens, trace.unique_count, trace.block_count) == (512, 3, 6)
    assert trace.full_counts.tolist() == [2, 2]
    assert trace.seconds.tolist() == [0.0, 2.5]


def test_bailian_tells_sessions(tmp_path: Path) -> None:
    follow_up = {**BAILIAN, "chat_id": 9, "parent_chat_id": 7, "timestamp": 2.0}
    trace = read(write(tmp_path, BAILIAN, follow_up, {**BAILIAN, "chat_id": 11, "timestamp": 3}))
    assert trace.block_tokens == 16
    first, second, other = trace.sessions.tolist()
    assert first == second != other


def test_recorded(tmp_path: Path) -> None:
    trace = read(write(tmp_path, HEADER, RECORDED, {**RECORDED, "seconds": 1, "unknown": True}))
    assert (trace.block_tokens, trace.unique_count, len(trace)) == (16, 2, 2)
    assert replay(trace, Setting(policy="lru", capacity_percent=100)).block_hit_ratio == 0.5


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([MOONCAKE, "{broken"], "line 2: got what is no JSON"),
        ([MOONCAKE, "[1]"], "line 2: got list; expected one JSON object"),
        ([{**MOONCAKE, "timestamp": 9}, MOONCAKE], "line 2: got time 0.0 s after 0.009 s; expected requests in order"),
        ([MOONCAKE, {**MOONCAKE, "input_length": -1}], "line 2: input_length: got -1; expected an int in [0, "),
        ([MOONCAKE, {**MOONCAKE, "timestamp": -1}], "line 2: timestamp: got -1; expected a time >= 0"),
        ([{**MOONCAKE, "hash_ids": [4, 5, 4]}], "line 1: got block id 4 twice"),
        ([{**MOONCAKE, "hash_ids": [4, -5]}], "line 1: hash_ids: got -5; expected ints in [0, 2^64)"),
        ([{**MOONCAKE, "hash_ids": [1 << 70]}], "line 1: hash_ids: got 1180591620717411303424"),
        ([{**MOONCAKE, "hash_ids": [True]}], "line 1: hash_ids: got True"),
        ([{**MOONCAKE, "hash_ids": "abc"}], "line 1: hash_ids: got 'abc'; expected a list"),
        ([MOONCAKE, {**MOONCAKE, "input_length": 10**30}], "line 2: input_length: got 1000"),
        ([MOONCAKE, {**MOONCAKE, "output_length": 1.5}], "line 2: output_length: got 1.5"),
        ([MOONCAKE, '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}'], "line 2: timestamp"),
        (
            [MOONCAKE, '{"timestamp": 1e999, "input_length": 1, "output_length": 1, "hash_ids": []}'],
            "line 2: timestamp",
        ),
        ([MOONCAKE, '{"timestamp": ' + "9" * 6000 + "}"], "line 2: got what is no JSON"),
        ([MOONCAKE, "[" * 100_000], "line 2: got what is no JSON"),
        ([{"timestamp": 1}], "line 1: input_length: got nothing"),
        ([BAILIAN, BAILIAN], "line 2: got chat_id 7 again"),
        ([{**HEADER, "version": 2}], "line 1: got format 'kvstore-trace' version 2"),
        ([{**HEADER, "block_tokens": 0}], "line 1: block_tokens: got 0"),
        ([HEADER, {**RECORDED, "hashes": "00"}], "line 2: hashes: got '00'; expected 16 hexadecimal digits a block"),
        ([HEADER, {**RECORDED, "hashes": "zz" * 8}], "line 2: hashes or session: expected hexadecimal digits only"),
        ([HEADER, {**RECORDED, "session": 5}], "line 2: hashes or session: expected hexadecimal digits only"),
        ([HEADER], "got no request"),
        ([""], "line 1: got what is no JSON"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(lines: list[object], said: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError) as told:
        read(write(tmp_path, *lines))
    assert said in str(told.value)


def test_a_trace_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"capacity_percent": 0.0}, "capacity percent: got 0.0"),
        ({"capacity_percent": float("nan")}, "capacity percent: got nan"),
        ({"capacity_blocks": 0}, "capacity blocks: got 0"),
        ({}, "expected either a percentage"),
        ({"capacity_percent": 1, "policy": "mru"}, "policy: got 'mru'; expected one of lru"),
        ({"capacity_percent": 1, "codec": "zip"}, "codec: got 'zip'"),
        ({"capacity_percent": 1, "hosts": 1001}, "hosts: got 1001; expected 1 to 1000"),
        ({"capacity_percent": 1, "routing": "best"}, "routing: got 'best'"),
        ({"capacity_percent": 1, "host_blocks": -1}, "blocks of a tier"),
        ({"capacity_percent": 1, "policy": "belady", "hosts": 2}, "policy belady is the bound of one device"),
    ],
)
def test_a_bad_setting_is_told(setting: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as told:
        Setting(**setting)  # type: ignore[arg-type]
    assert said in str(told.value)


def test_a_seed_gives_one_workload() -> None:
    one, same, other = (generate("mixture", 200, seed) for seed in (1, 1, 2))
    assert one.keys.tolist() == same.keys.tolist() != other.keys.tolist()
    with pytest.raises(TraceError, match="expected one of system-prompt"):
        generate("nothing", 5)
    with pytest.raises(TraceError, match="requests: got 0"):
        generate("rag", 0)
