"""What a trace holds, what it hides, and that recording never fails or slows the one who is recorded."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from allocator.errors import ConfigError
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import Request
from engine_adapter.testing import ToyRunner
from kvstore import Identity
from kvstore.cli import main
from kvstore.cli.record import summarize
from kvstore.simulation import read
from kvstore.trace_recorder import EndedRequest, TraceRecorder, read_salt
from tests.engine_adapter.loop_kit import geometry, make_store, prompt

ROOT = Path(__file__).resolve().parents[2]
SALT = bytes(range(32))


def root_of(tenant: str | None = None) -> bytes:
    return Identity(model="toy", weights="0" * 64, geometry=geometry("full"), tenant=tenant).root()


def recorded(path: Path, *requests: EndedRequest, **options: Any) -> list[dict[str, Any]]:
    recorder = TraceRecorder(path, options.pop("root", root_of()), 4, clock=lambda: 10.0, **options)
    for one in requests:
        recorder.record(one)
    recorder.close()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ended(token_ids: list[int], **more: Any) -> EndedRequest:
    return EndedRequest(**{"token_ids": token_ids, "output_tokens": 3, "age_seconds": 0.0, **more})


def test_the_first_line_describes_and_each_request_has_its_fields(tmp_path: Path) -> None:
    one = ended(prompt(1, 10), session="s", turn=2, tenant="t", finish="length", reused_tokens=4, ttft_seconds=0.25)
    header, line = recorded(tmp_path / "t.jsonl", one, model="toy")
    assert header == {"format": "kvstore-trace", "version": 1, "block_tokens": 4, "model": "toy"}
    assert (line["timestamp"], line["input_length"], line["output_length"], line["turn"]) == (0, 10, 3, 2)
    assert (line["finish"], line["reused_tokens"], line["ttft_ms"]) == ("length", 4, 250.0)
    assert len(line["hash_ids"]) == 2
    assert all(0 <= number < 2**64 for number in (*line["hash_ids"], line["session"], line["tenant"]))


def test_equal_numbers_are_equal_prefixes(tmp_path: Path) -> None:
    first = prompt(1, 17)
    same_start, shifted = [*first[:8], *prompt(2, 9)], first[1:]
    _, one, two, three = recorded(tmp_path / "t.jsonl", ended(first), ended(same_start), ended(shifted))
    assert one["hash_ids"][:2] == two["hash_ids"][:2]
    assert not set(one["hash_ids"][2:]) & set(two["hash_ids"][2:])
    assert not set(one["hash_ids"]) & set(three["hash_ids"])


def test_blocks_can_be_taken_together(tmp_path: Path) -> None:
    header, line = recorded(tmp_path / "t.jsonl", ended(prompt(1, 23)), group_blocks=2, salt=SALT)
    _, fine = recorded(tmp_path / "f.jsonl", ended(prompt(1, 23)), salt=SALT)
    assert header["block_tokens"] == 8
    assert line["hash_ids"] == fine["hash_ids"][1::2]


def test_without_the_salt_no_two_traces_join_and_with_it_they_do(tmp_path: Path) -> None:
    one = ended(prompt(1, 12), session="alice", tenant="alice")
    traces = [recorded(tmp_path / f"{n}.jsonl", one, salt=salt)[1] for n, salt in enumerate((None, None, SALT, SALT))]
    for field in ("hash_ids", "session", "tenant"):
        assert len({str(trace[field]) for trace in traces[:2]}) == 2
        assert traces[2][field] == traces[3][field]
    assert traces[0]["session"] != traces[0]["tenant"], "the kinds of names are kept apart"


def test_nothing_of_prompt_salt_or_names_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    recorder = TraceRecorder(path, root_of(), 4, salt=SALT)
    recorder.record(ended([90417, 90418, 90419, 90420, 90421], session="alice-and-bob", tenant="acme"))
    recorder.close()
    text = path.read_text(encoding="utf-8")
    for secret in ("9041", "9042", "alice", "acme", SALT.hex(), root_of().hex()):
        assert secret not in text


def test_tenants_share_no_block(tmp_path: Path) -> None:
    tokens = ended(prompt(1, 12))
    _, one = recorded(tmp_path / "a.jsonl", tokens, salt=SALT, root=root_of("a"))
    _, two = recorded(tmp_path / "b.jsonl", tokens, salt=SALT, root=root_of("b"))
    assert not set(one["hash_ids"]) & set(two["hash_ids"])


def test_arrival_is_the_time_that_is_written(tmp_path: Path) -> None:
    now = [100.0]
    path = tmp_path / "t.jsonl"
    recorder = TraceRecorder(path, root_of(), 4, clock=lambda: now[0])
    now[0] = 102.5
    recorder.record(ended(prompt(1, 5), age_seconds=1.5))
    recorder.close()
    assert json.loads(path.read_text().splitlines()[1])["timestamp"] == 1000


def test_a_disk_that_fails_ends_the_recording_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.trace_recorder._BYTES_LIMIT", 300)
    recorder = TraceRecorder(tmp_path / "t.jsonl", root_of(), 4)

    def record_nine() -> None:
        for _ in range(9):
            recorder.record(ended(prompt(1, 12)))

    with pytest.warns(RuntimeWarning, match="recording ends here"):
        record_nine()
    assert recorder.recorded_requests >= 1
    assert recorder.recorded_requests + recorder.lost_requests == 9
    lines = (tmp_path / "t.jsonl").read_text().splitlines()
    assert len(lines) == 1 + recorder.recorded_requests
    assert all(json.loads(line) for line in lines)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"salt": b"short"}, "salt: got 5 bytes"), ({"group_blocks": 0}, "group_blocks: got 0; expected a count")],
)
def test_misuse_is_told(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        TraceRecorder(tmp_path / "t.jsonl", root_of(), 4, **options)
    (tmp_path / "there").write_text("kept")
    with pytest.raises(ConfigError, match="expected a new file"):
        TraceRecorder(tmp_path / "there", root_of(), 4)
    assert (tmp_path / "there").read_text() == "kept"


def test_a_bad_salt_file_is_told_without_its_content(tmp_path: Path) -> None:
    (tmp_path / "salt").write_text("abc123")
    with pytest.raises(ConfigError, match="expected 64 hex digits") as caught:
        read_salt(tmp_path / "salt")
    assert "abc123" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"salt file .*gone: cannot be read \(No such file or directory\)"):
        read_salt(tmp_path / "gone")


PROGRAM = """
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import Request
from engine_adapter.testing import ToyRunner
from tests.engine_adapter.loop_kit import geometry, make_store, prompt
kv = geometry("full")
store = make_store(kv)
loop = DecodeLoop(ToyRunner.over(store), store)
for number in range(3):
    loop.submit(Request(f"r{number}", prompt(1, 12) + [number], 4, session="chat", turn=number))
    loop.run()
loop.submit(Request("gone", prompt(2, 9), 4))
loop.abort("gone")
loop.run()
store.close()
"""


def test_the_command_records_what_its_engine_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, salt = tmp_path / "trace.jsonl", tmp_path / "salt"
    salt.write_text(SALT.hex())
    words = ("record", "--out", str(out), "--salt-file", str(salt), "--json", "-", "--")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert main((*words, sys.executable, "-c", PROGRAM)) == 0
    said = capfd.readouterr()
    assert json.loads(said.out) == {
        "requests": 4, "input_tokens": 48, "blocks": 11, "distinct_blocks": 5,
        "files": [{"file": str(out), "requests": 4}],
    }  # fmt: skip
    assert "4 requests" in said.err
    lines = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert [line["reused_tokens"] for line in lines[:3]] == [0, 12, 12]
    assert [line["turn"] for line in lines[:3]] == [0, 1, 2]
    assert len({line["session"] for line in lines[:3]}) == 1
    assert (lines[3]["finish"], lines[3]["output_length"]) == ("abort", 0)


def test_what_a_loop_recorded_is_replayed_by_the_simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With room for everything it reuses what the loop reused, though the lines stand in order of their ends."""
    store = make_store(geometry("full"))
    path = tmp_path / "trace.jsonl"
    recorder = TraceRecorder(path, root_of(), 4)
    loop = DecodeLoop(ToyRunner.over(store), store, recorder=recorder)
    loop.submit(Request("first", prompt(1, 13), 2))
    loop.run()
    time.sleep(0.005)
    loop.submit(Request("long", prompt(2, 9), 30))
    loop.step()
    time.sleep(0.005)
    loop.submit(Request("same start", prompt(1, 13) + prompt(3, 8), 2))
    loop.run()
    loop.submit(Request("same again", prompt(2, 9), 2))
    loop.run()
    recorder.close()
    store.close()
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    stamps = [line["timestamp"] for line in lines]
    assert len(lines) == 4
    assert stamps != sorted(stamps)
    assert main(("simulate", "--trace", str(path), "--policy", "lru", "--capacity-percent", "100", "--json", "-")) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    reused_tokens = sum(line["reused_tokens"] for line in lines)
    assert reused_tokens > 0
    assert round(row["block_hit_ratio"] * row["blocks"]) * 4 == reused_tokens
    assert (row["requests"], row["blocks"]) == (4, sum(len(line["hash_ids"]) for line in lines))


@pytest.mark.parametrize("is_salted", [False, True])
def test_every_file_of_a_recording_is_named_and_counted(
    is_salted: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a daemon under --keeper that is started again makes them, and a server of several engines."""
    program = """
        from kvstore.trace_recorder import EndedRequest, TraceRecorder
        for requests in (2, 1, 3):
            recorder = TraceRecorder.from_environment(bytes(32), 4)
            for _ in range(requests):
                recorder.record(EndedRequest(token_ids=range(8), output_tokens=1, age_seconds=0.0))
            recorder.close()
    """
    out, salt = tmp_path / "t.v1.jsonl", tmp_path / "salt"
    salt.write_text(SALT.hex())
    (tmp_path / "t.v1-2.jsonl").write_text("somebody else's")
    for other in ("t.v1-x.jsonl", "t-2.jsonl", "t.v1-3.json", "at.v1-3.jsonl"):
        (tmp_path / other).write_text("no trace")
    words = ("--salt-file", str(salt)) if is_salted else ()
    command = (sys.executable, "-c", textwrap.dedent(program))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert main(("record", "--out", str(out), *words, "--json", "-", "--", *command)) == 0
    said = capfd.readouterr()
    files = [out, tmp_path / "t.v1-3.jsonl", tmp_path / "t.v1-4.jsonl"]
    assert json.loads(said.out) == {
        "requests": 6, "input_tokens": 48, "blocks": 12, "distinct_blocks": 2 if is_salted else 6,
        "files": [{"file": str(path), "requests": count} for path, count in zip(files, (2, 1, 3), strict=True)],
    }  # fmt: skip
    assert ", ".join(map(str, files)) in said.err
    assert ("3 files, which share a salt" if is_salted else "3 files, which have a salt each") in said.err


def test_the_command_hands_on_the_exit_code_and_says_when_nothing_recorded(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.jsonl"
    assert main(("record", "--out", str(out), "--", sys.executable, "-c", "raise SystemExit(3)")) == 3
    assert main(("record", "--out", str(out), "--", sys.executable, "-c", "pass")) == 1
    assert "made no engine that records" in capfd.readouterr().err
    assert main(("record", "--out", str(out), "--", "no-such-program")) == 2
    out.write_text("")
    assert main(("record", "--out", str(out), "--", "true")) == 2


def test_a_second_engine_of_the_process_gets_a_file_of_its_own(tmp_path: Path) -> None:
    environ = {"KVSTORE_TRACE_FILE": str(tmp_path / "trace.jsonl")}
    for _ in range(3):
        recorder = TraceRecorder.from_environment(root_of(), 4, environ=environ)
        assert recorder is not None
        recorder.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["trace-2.jsonl", "trace-3.jsonl", "trace.jsonl"]
    assert TraceRecorder.from_environment(root_of(), 4, environ={}) is None


def test_store_settings_leave_the_recorders_variables_alone() -> None:
    program = "from kvstore import KVStoreConfig; KVStoreConfig.load()"
    environment = os.environ | {"KVSTORE_TRACE_FILE": "x", "KVSTORE_TRACE_SALT_FILE": "y"}
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=False).returncode == 0


@pytest.mark.parametrize("tokens", [256, 1024, 32768])
def test_recording_costs_under_one_percent_of_computing_the_prompt(tmp_path: Path, tokens: int) -> None:
    """Of an engine that computes 10,000 prompt tokens a second; the best of many, since neighbours only add time."""
    recorder = TraceRecorder(tmp_path / "t.jsonl", root_of(), 16)
    one, best = ended(list(range(tokens))), 1.0
    for _ in range(20):
        started = time.perf_counter()
        recorder.record(one)
        best = min(best, time.perf_counter() - started)
    recorder.close()
    assert best < 0.01 * tokens / 10_000


def test_what_a_full_disk_cuts_off_leaves_whole_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Found here: `kvstore record` ended in a traceback over half a last line, and no reader took the trace."""
    path = tmp_path / "t.jsonl"
    recorder = TraceRecorder(path, bytes(32), 16)
    for number in range(300):
        recorder.record(EndedRequest(token_ids=range(number, number + 160), output_tokens=1, age_seconds=0.0))
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))
    try:
        with pytest.warns(RuntimeWarning, match="recording ends here|were lost"):
            recorder.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert 5_000 < path.stat().st_size <= 10_000
    assert len(read(path)) == summarize(path)["requests"] > 10
    with path.open("ab") as file:
        file.write(b'{"timestamp":0,"input_le')  # a kill leaves this
    assert summarize(path)["requests"] == len(path.read_bytes().splitlines()) - 2  # less the header and this
    assert "was cut off" in capsys.readouterr().err
