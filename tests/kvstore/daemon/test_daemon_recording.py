"""The daemon's recorder: a line a request of its clients, with the names that their own recorders would give."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.daemon import protocol, recording
from kvstore.daemon.forms import Form
from kvstore.daemon.recording import DaemonRecording, Prompts
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from kvstore.simulation import read
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import Lookup
from kvstore.trace_recorder import FILE_VARIABLE, SALT_VARIABLE, TraceRecorder
from tests.kvstore.conftest import full_geometry
from tests.kvstore.daemon.kit import ServeProcess, checked_daemon, settings, tier_at, until
from tests.kvstore.driving import run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

SALT = bytes(range(32))
LONG = protocol.PAGE_HASHES + 300


def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "salt").write_text(SALT.hex(), encoding="ascii")
    return {FILE_VARIABLE: str(tmp_path / "t.jsonl"), SALT_VARIABLE: str(tmp_path / "salt")}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_stores_ask_is_recorded_as_their_engines_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_store: Callable[..., KVStore]
) -> None:
    """Whole stores: those of requests that are found in their own memory too, and once however often they ask."""
    for name, value in environ(tmp_path).items():
        monkeypatch.setenv(name, value)
    geometry, prompt = full_geometry(), list(range(165))
    with checked_daemon(settings(tmp_path)) as daemon:
        tier = tier_at(daemon.settings.socket_path, ThreadExecutor("daemon"), specs=geometry_specs(geometry))
        store = make_store(
            tiers=[tier], blocks=60, share=True, load_always=True, io_threads="thread", geometry=geometry
        )
        for _ in range(3):
            store.lookup(prompt)
        run_prompt(store, "a", prompt)
        run_prompt(store, "b", prompt)
        run_prompt(store, "c", [*prompt[:80], *range(500, 530)])
        _ = tier.used_bytes  # the daemon has read what was told before
    header, *lines = lines_of(tmp_path / "t.jsonl")
    assert header == {"format": "kvstore-trace", "version": 1, "block_tokens": 16}
    assert [(one["input_length"], one["output_length"]) for one in lines] == [(165, 0), (165, 0), (110, 0)]
    engine = TraceRecorder(tmp_path / "engine.jsonl", store.identity.root(), 16, salt=SALT)
    assert lines[0]["hash_ids"] == lines[1]["hash_ids"] == engine.hash_ids(prompt)
    assert lines[2]["hash_ids"] == engine.hash_ids([*prompt[:80], *range(500, 530)])
    engine.close()
    assert len(read(tmp_path / "t.jsonl")) == 3


def children(pid: int) -> list[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()]


def test_kvstore_record_around_kvstore_serve(tmp_path: Path) -> None:
    """The documented command, up to its end; a prompt that takes several messages."""
    out = tmp_path / "t.jsonl"
    under = [sys.executable, "-m", "kvstore.cli", "record", "--out", str(out), "--json", str(tmp_path / "sum"), "--"]
    serve = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB", under=under)
    tier = tier_at(tmp_path / "d.sock", specs=geometry_specs(full_geometry()))
    keys = [key_of(n) for n in range(LONG)]
    hashes = [key.hash for key in keys]
    tier.note_lookup(Lookup(keys[0], hashes, {}, range(LONG), LONG * 16 + 5))
    tier.note_lookup(Lookup(keys[0], hashes[:3], {}, range(3), 0))  # by a client that does not see whole prompts
    tier.note_lookup(Lookup(keys[0], hashes[:3], {}, range(3), 3 * 16))
    _ = tier.used_bytes
    tier.close()
    for child in children(serve.process.pid):  # the daemon: `kvstore record` waits for it
        os.kill(child, signal.SIGTERM)
    assert serve.process.wait(60) == 0, serve.process.communicate()
    serve._close()
    tokens = 16 * LONG + 5 + 48
    assert json.loads((tmp_path / "sum").read_text(encoding="utf-8")) == {
        "requests": 2, "input_tokens": tokens, "blocks": LONG + 3, "distinct_blocks": LONG,
        "files": [{"file": str(out), "requests": 2}],
    }  # fmt: skip


def test_a_daemon_that_is_started_again_within_a_recording(tmp_path: Path) -> None:
    """Found by a newcomer: the second life's file lay beside the first, and nobody was told of it."""
    out, total = tmp_path / "t.jsonl", tmp_path / "sum"
    under = [sys.executable, "-m", "kvstore.cli", "record", "--out", str(out), "--json", str(total), "--"]
    serve = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB", "--keeper", under=under)
    (keeper,) = children(serve.process.pid)
    keys = [key_of(n) for n in range(3)]
    for life in range(2):
        (daemon,) = children(keeper)
        tier = tier_at(tmp_path / "d.sock", specs=geometry_specs(full_geometry()))
        for _ in range(life + 1):
            tier.note_lookup(Lookup(keys[0], [key.hash for key in keys], {}, range(3), 3 * 16))
        _ = tier.used_bytes
        tier.close()
        if life == 0:
            until(lambda: out.exists() and len(lines_of(out)) == 2)
            os.kill(daemon, signal.SIGKILL)
            assert any("ready on" in line for line in serve.process.stdout or ())
    os.kill(keeper, signal.SIGTERM)
    serve.process.wait(60)
    said = serve.process.communicate()
    found = json.loads(total.read_text(encoding="utf-8"))
    assert found["files"] == [
        {"file": str(out), "requests": 1}, {"file": str(tmp_path / "t-2.jsonl"), "requests": 2},
    ], said  # fmt: skip
    assert (found["requests"], found["blocks"], found["distinct_blocks"]) == (3, 9, 6)
    serve._close()


def said(
    client: int, first: int, tokens: int, hashes: bytes, block_tokens: int = 16, tenant: str = "", when: float = 0.0
) -> tuple[float, int, int, str, protocol.Looked]:
    outcomes = bytes(len(hashes) // protocol.HASH_BYTES)
    return when, client, block_tokens, tenant, protocol.Looked(1, 0, bytes(32), first, hashes, outcomes, (), tokens)


def test_parts_of_a_prompt_that_do_not_fit_together_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = Prompts(environ(tmp_path), clock=lambda: 1.0)
    half = bytes(range(32)) + bytes(32)
    prompts.add(*said(1, 0, 64, half))
    prompts.add(*said(2, 0, 32, half))  # another client's is whole
    prompts.add(*said(1, 3, 64, bytes(32)))  # one was refused in between
    prompts.add(*said(1, 0, 64, half, tenant="acme"))
    prompts.add(*said(1, 2, 64, half[::-1], tenant="acme"))
    prompts.add(*said(1, 0, 64, bytes(32), 32))  # another size of blocks: not whole yet
    prompts.add(*said(1, 1, 64, half[:32], 32))
    prompts.add(*said(3, 0, 64, bytes(32)))
    prompts.add(*said(3, 0, 16, bytes(32)))
    prompts.close()
    assert prompts.lost_requests == 2
    assert "2 requests came in part" in capsys.readouterr().err
    assert [one["input_length"] for one in lines_of(tmp_path / "t.jsonl")[1:]] == [32, 64, 16]
    assert [one["block_tokens"] for one in lines_of(tmp_path / "t-2.jsonl")[:1]] == [32]


def test_prompts_without_end_stay_bounded(tmp_path: Path) -> None:
    """A client may say that its prompt is as long as it likes, and send page after page."""
    prompts = Prompts(environ(tmp_path))
    page = bytes(32) * 1024
    for client in (1, 2):
        for first in range(0, 400 * 1024, 1024):
            prompts.add(*said(client, first, 1 << 60, page))
            assert prompts._open_names == sum(map(len, prompts._open.values())) <= 1 << 18
    assert prompts.lost_requests > 0
    prompts.close()


def test_a_session_never_waits_for_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    plain = DaemonRecording._pass_on

    def held(self: DaemonRecording, pipe: Any) -> None:
        go.wait(60)
        plain(self, pipe)

    monkeypatch.setattr(DaemonRecording, "_pass_on", held)
    one = DaemonRecording(environ(tmp_path))
    form = Form(key_of(1), 16, 8, 8, "bfloat16")
    message = protocol.Looked(1, 0, bytes(32), 0, bytes(32), b"\0", (), 20)
    began = time.monotonic()
    for _ in range(recording._QUEUE_MESSAGES + 100):
        one.looked(7, form, message)
    assert time.monotonic() - began < 30
    assert one.dropped_messages == 100
    go.set()
    one.close()
    one.close()
    assert "lacks 100 messages" in caplog.text
    assert len(lines_of(tmp_path / "t.jsonl")) == 1 + recording._QUEUE_MESSAGES


def looked(hash_count: int = 1) -> protocol.Looked:
    return protocol.Looked(1, 0, bytes(32), 0, bytes(32) * hash_count, bytes(hash_count), (), 16 * hash_count + 4)


def test_a_flood_is_recorded_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """20,000 lookups a second, of which a tenth come while the thread that passes them on has no turn."""
    go, plain = threading.Event(), DaemonRecording._pass_on
    monkeypatch.setattr(DaemonRecording, "_pass_on", lambda self, pipe: go.wait(60) and plain(self, pipe))
    one, form = DaemonRecording(environ(tmp_path)), Form(key_of(1), 16, 8, 8, "bfloat16")
    for _ in range(2000):
        one.looked(7, form, looked(16))
    go.set()
    one.close()
    assert one.dropped_messages == 0
    assert len(lines_of(tmp_path / "t.jsonl")) == 1 + 2000


def test_what_waits_is_bounded_in_bytes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, plain = threading.Event(), DaemonRecording._pass_on
    monkeypatch.setattr(DaemonRecording, "_pass_on", lambda self, pipe: go.wait(60) and plain(self, pipe))
    one, form, long = DaemonRecording(environ(tmp_path)), Form(key_of(1), 16, 8, 8, "bfloat16"), looked(1024)
    for _ in range(600):
        one.looked(7, form, long)
    assert sum(len(message.hashes) for *_, message in one._waiting) == 16 << 20
    one.looked(7, form, looked(16))  # short ones have room of their own
    go.set()
    until(lambda: not one._waiting and not one._long_bytes)
    one.looked(7, form, long)
    one.close()
    assert one.dropped_messages == 600 - 512
    assert [one["input_length"] for one in lines_of(tmp_path / "t.jsonl")[1:]] == [16388] * 512 + [260, 16388]


def test_times_of_a_flood_are_of_few_requests_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 64 that wait have each its own; behind them, one of 16 does."""
    go, plain = threading.Event(), DaemonRecording._pass_on
    monkeypatch.setattr(DaemonRecording, "_pass_on", lambda self, pipe: go.wait(60) and plain(self, pipe))
    began = time.monotonic() + 1000  # the writing process's own clock goes on: only differences count
    times = iter(began + number for number in range(10_000))
    one = DaemonRecording(environ(tmp_path), clock=lambda: next(times))
    form = Form(key_of(1), 16, 8, 8, "bfloat16")
    for _ in range(200):
        one.looked(7, form, looked())
    go.set()
    one.close()
    stamps = [one["timestamp"] for one in lines_of(tmp_path / "t.jsonl")[1:]]
    steps = [round((after - before) / 1000) for before, after in pairwise(stamps)]
    assert len(stamps) == 200
    assert steps == [1] * 63 + [int(number % 16 == 0) for number in range(64, 200)]


def test_a_pipe_that_takes_a_part_gets_the_rest() -> None:
    taken = bytearray()

    class Pipe:
        @staticmethod
        def write(some: bytes) -> int:
            taken.extend(some[:3])
            return len(some[:3])

    recording._write_all(Pipe(), bytearray(b"0123456789"))  # type: ignore[arg-type]
    assert taken == b"0123456789"


def test_what_was_recorded_is_in_the_file_though_nothing_follows(tmp_path: Path) -> None:
    recording = DaemonRecording(environ(tmp_path))
    form: Any = SimpleNamespace(tenant="", block_tokens=16)
    recording.looked(7, form, protocol.Looked(1, 0, bytes(32), 0, bytes(32), b"\0", (), 20))
    until(lambda: (tmp_path / "t.jsonl").exists() and len(lines_of(tmp_path / "t.jsonl")) == 2)
    os.kill(recording._process.pid, signal.SIGTERM)  # as systemd sends to all of a service
    recording.looked(8, form, protocol.Looked(1, 0, bytes(32), 0, bytes(32), b"\0", (), 20))
    recording.close()
    assert len(lines_of(tmp_path / "t.jsonl")) == 3


def test_a_writer_that_cannot_write_ends_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The daemon goes on; who started it is told why there is no trace."""
    given = environ(tmp_path) | {FILE_VARIABLE: str(tmp_path / "no" / "folder" / "t.jsonl")}
    one = DaemonRecording(given)
    form = Form(key_of(1), 16, 8, 8, "bfloat16")
    for _ in range(3):
        one.looked(7, form, protocol.Looked(1, 0, bytes(32), 0, bytes(32), b"\0", (), 20))
        one._process.wait(60)
    one.close()
    assert "cannot be made" in capfd.readouterr().err
