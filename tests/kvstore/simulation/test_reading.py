"""Traces: three formats, and what is wrong told with its line."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from kvstore.simulation import Setting, TraceError, first_requests, generate, read, replay
from kvstore.simulation.trace import ConfigError, Trace

MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}
BAILIAN = {
    "chat_id": 7, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 5, "type": "text",
    "turn": 1, "hash_ids": [1, 2, 3],
}  # fmt: skip
HEADER = {"format": "kvstore-trace", "version": 1, "block_tokens": 16}
RECORDED = {"timestamp": 500, "input_length": 33, "output_length": 4, "hash_ids": [1, 2**64 - 1], "session": 10}


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
    trace = read(write(tmp_path, HEADER, RECORDED, {**RECORDED, "timestamp": 1000, "unknown": True}))
    assert (trace.block_tokens, trace.unique_count, len(trace)) == (16, 2, 2)
    assert (trace.seconds.tolist(), trace.sessions.tolist()) == ([0.5, 1.0], [10, 10])
    assert replay(trace, Setting(policy="lru", capacity_percent=100)).block_hit_ratio == 0.5


def test_recorded_lines_are_put_in_order_of_arrival(tmp_path: Path) -> None:
    """They stand in the file in order of their ends."""
    lines = [
        {"timestamp": stamp, "input_length": 16 * len(ids), "output_length": stamp, "hash_ids": ids}
        for stamp, ids in ((30, [1, 2, 3]), (10, [4]), (20, []), (10, [5, 6]), (0, [7]))
    ]
    lines[2]["input_length"] = 9
    trace = read(write(tmp_path, HEADER, *lines))
    in_order = read(write(tmp_path, HEADER, *(lines[place] for place in (4, 1, 3, 2, 0))))
    assert trace.output_tokens.tolist() == [0, 10, 10, 20, 30]
    for column in ("keys", "starts", "full_counts", "input_tokens", "output_tokens", "seconds"):
        assert getattr(trace, column).tolist() == getattr(in_order, column).tolist(), column


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([MOONCAKE, "{broken"], "line 2: got what is no JSON (Expecting property name"),
        ([{**BAILIAN, "parent_chat_id": [1]}], "line 1: parent_chat_id: got [1]; expected an int"),
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
        ([{**HEADER, "version": True}], "line 1: got format 'kvstore-trace' version True"),
        ([{**HEADER, "block_tokens": 0}], "line 1: block_tokens: got 0"),
        (
            [{**MOONCAKE, "input_length": 1024}],
            "line 1: hash_ids: got 3 for 1024 tokens in blocks of 512; expected 2",
        ),
        (
            [MOONCAKE, {**MOONCAKE, "hash_ids": [1]}],
            "line 2: hash_ids: got 1 for 1100 tokens in blocks of 512; expected 2 or 3",
        ),
        ([HEADER, {**RECORDED, "hash_ids": [1]}], "line 2: hash_ids: got 1 for 33 tokens in blocks of 16; expected"),
        ([HEADER, {**RECORDED, "hash_ids": [1, -2]}], "line 2: hash_ids: got -2"),
        ([HEADER, RECORDED, {**RECORDED, "timestamp": 0.5}], "line 3: timestamp: got 0.5; expected an int in [0, "),
        ([HEADER, {**RECORDED, "session": "a"}], "line 2: session: got 'a'"),
        ([HEADER, {**RECORDED, "input_length": 0}], "line 2: input_length: got 0; expected an int in [1, "),
        ([HEADER, RECORDED, "{"], "line 3: got what is no JSON"),
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
    ("line", "block_tokens", "said"),
    [
        (MOONCAKE, 16, "hash_ids: got 3 for 1100 tokens in blocks of 16; expected 68 or 69"),
        (MOONCAKE, 1024, "hash_ids: got 3 for 1100 tokens in blocks of 1024; expected 1 or 2"),
        (BAILIAN, 512, "hash_ids: got 3 for 40 tokens in blocks of 512; expected 0 or 1"),
        (BAILIAN, 8, "hash_ids: got 3 for 40 tokens in blocks of 8; expected 5"),
    ],
)
def test_blocks_of_a_size_that_the_trace_contradicts(
    line: dict[str, object], block_tokens: int, said: str, tmp_path: Path
) -> None:
    path = write(tmp_path, line)
    with pytest.raises(TraceError) as told:
        read(path, block_tokens=block_tokens)
    assert said in str(told.value)
    assert read(write(tmp_path, {**line, "input_length": 3 * block_tokens}), block_tokens=block_tokens).block_count == 3


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "got an empty file; expected a trace"),
        (gzip.compress(b"{}"), "got a file compressed with gzip; expected it unpacked (gunzip)"),
        (b"\x28\xb5\x2f\xfd\x00", "got a file compressed with zstd; expected it unpacked (unzstd)"),
        (lzma.compress(b"{}"), "got a file compressed with xz"),
        (bz2.compress(b"{}"), "got a file compressed with bzip2"),
    ],
    ids=["empty", "gzip", "zstd", "xz", "bzip2"],
)
def test_what_is_no_text_is_called_what_it_is(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError) as told:
        read(path)
    assert said in str(told.value)


def test_the_first_requests_are_those_that_arrive_first(tmp_path: Path) -> None:
    lines = [{**RECORDED, "timestamp": stamp, "hash_ids": [stamp, stamp + 1]} for stamp in (30, 10, 20)]
    whole = read(write(tmp_path, HEADER, *lines))
    first = first_requests(whole, 2)
    alone = read(write(tmp_path, HEADER, lines[1], lines[2]))
    assert (len(first), first.block_count, first.unique_count) == (2, 4, 4)
    for column in Trace.__dataclass_fields__:
        assert np.array_equal(getattr(first, column), getattr(alone, column)), column
    assert first_requests(whole, 9) is whole
    with pytest.raises(TraceError, match="requests: got 0"):
        first_requests(whole, 0)


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


def test_an_id_that_follows_different_ones_is_refused_with_its_line(tmp_path: Path) -> None:
    def line(*ids: int) -> dict[str, object]:
        return {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": list(ids)}

    assert len(read(write(tmp_path, line(1, 2), line(1, 2, 3), line(1, 4)))) == 3
    for second, word in ((line(2, 1), "after nothing"), (line(3, 2), "after block 3"), (line(7, 1), "after block 7")):
        with pytest.raises(TraceError, match=rf"line 2: got block id [12] {word}, where it came after .* before"):
            read(write(tmp_path, line(1, 2), second))
