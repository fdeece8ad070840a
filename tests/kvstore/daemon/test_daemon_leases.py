"""Leases and segments: who may write where, and what comes back when a client hangs, leaves or dies."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon import Daemon, protocol
from kvstore.daemon.protocol import Cause, Place
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import ROOT, RawClient, get, put, settings, tier_at, until

OK = ResultCode.OK


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """Its leases end when a test says so: `after` the time that they have."""
    daemon = Daemon(settings(tmp_path, segment_bytes=256 << 10, lease_seconds=0.3, write_lease_seconds=0.3))
    daemon.core.clock = lambda: 0.0
    daemon.start()
    yield daemon
    daemon.stop()
    for arena in daemon.core.arenas.values():
        arena.check()


def after(daemon: Daemon, seconds: float) -> None:
    daemon.core.clock = lambda: seconds


def leases(daemon: Daemon) -> dict[str, int]:
    return daemon.stats()["leases"]  # type: ignore[no-any-return]


def test_a_reader_cannot_write_and_a_segment_keeps_its_size(daemon: Daemon) -> None:
    client = RawClient(daemon.settings.socket_path)
    client.form()
    ((place, segment, _, lease),) = client.reserve([key_of(1)])
    assert place == Place.GRANTED
    fds = {}
    for writable in (False, True):
        client.seq += 1
        client.sock.send(protocol.encode(protocol.Map(client.seq, [segment], writable)))
        message, (fds[writable],), _, _ = socket.recv_fds(client.sock, 4096, 4)
        assert protocol.decode_answer(message).sizes == [256 << 10]  # type: ignore[union-attr]
    with pytest.raises(PermissionError):
        mmap.mmap(fds[False], 256 << 10, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(fds[False], b"x")
    assert os.fstat(fds[False]).st_mode & 0o777 == 0
    for size in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(fds[True], size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fds[True], fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    for descriptor in fds.values():
        os.close(descriptor)
    stranger = RawClient(daemon.settings.socket_path)
    refused = stranger.ask(protocol.Map, [segment], True)
    assert isinstance(refused, protocol.Refused)
    assert refused.cause == Cause.SEGMENT
    assert isinstance(stranger.ask(protocol.Map, [10**6], False), protocol.Refused)
    assert client.ask(protocol.Publish, [lease]).flags == b"\x01"
    assert stranger.ask(protocol.Publish, [lease]).flags == b"\x00", "a lease of another client"
    for one in (client, stranger):
        one.close()


def test_a_hung_readers_leases_end_at_their_time(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(1), key_of(2)]) == [OK, OK]
    client = RawClient(daemon.settings.socket_path)
    client.form()
    lease = client.ask(protocol.Acquire, 0, key_of(1).hash + key_of(2).hash, [4096, 4096]).lease
    assert lease
    assert leases(daemon)["read_copies"] == 2
    after(daemon, 0.31)
    until(lambda: leases(daemon)["read_copies"] == 0)
    assert leases(daemon)["read_leases_expired"] == 1
    client.tell(protocol.Release, [lease])  # too late: names nothing, and is counted
    until(lambda: daemon.stats()["counts"].get("refused_stale") == 1)
    assert client.ask(protocol.Ping) is not None
    client.close()
    tier.close()


def test_a_hung_writers_slot_is_quarantined_until_it_lets_go(daemon: Daemon) -> None:
    client = RawClient(daemon.settings.socket_path)
    client.form()
    ((_, _, offset, lease),) = client.reserve([key_of(1)])
    after(daemon, 0.31)
    until(lambda: leases(daemon)["quarantined_slots"] == 1)
    used = daemon.stats()["arenas"]["own"]["used_bytes"]
    assert used > 0, "the slot is not free: its holder may still write there"
    others = client.reserve([key_of(n) for n in range(2, 12)])
    assert offset not in {one[2] for one in others}
    assert client.ask(protocol.Publish, [lease]).flags == b"\x00", "published after its lease had ended"
    assert client.ask(protocol.Contains, 0, key_of(1).hash).flags == b"\x00"
    client.tell(protocol.Abandon, [one[3] for one in others])
    until(lambda: daemon.stats()["arenas"]["own"]["used_bytes"] == 0)
    assert client.ask(protocol.Publish, [lease]).flags == b"\x00"
    client.close()


def test_a_closed_connection_of_a_living_process_keeps_its_segments_quarantined(daemon: Daemon) -> None:
    script = (
        "import sys; from tests.kvstore.daemon.kit import RawClient; from kvstore.testing.transfer_contract import *\n"
        "c = RawClient(sys.argv[1]); c.form(); c.reserve([key_of(1)]); c.close(); print('closed', flush=True)\n"
        "sys.stdin.read()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, daemon.settings.socket_path],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "closed\n"
    until(lambda: leases(daemon)["quarantined_clients"] == 1)
    time.sleep(0.2)
    assert daemon.stats()["arenas"]["own"]["used_bytes"] > 0
    process.kill()
    process.communicate()
    until(lambda: daemon.stats()["arenas"]["own"]["used_bytes"] == 0)
    assert daemon.stats()["clients"] == []


def test_a_killed_clients_leases_come_back_at_once_even_if_a_child_holds_its_socket(daemon: Daemon) -> None:
    script = (
        "import os, sys, time; from tests.kvstore.daemon.kit import RawClient\n"
        "from kvstore.testing.transfer_contract import *; from kvstore.daemon import protocol\n"
        "c = RawClient(sys.argv[1]); c.form(); (one,) = c.reserve([key_of(5)]); c.ask(protocol.Publish, [one[3]])\n"
        "c.reserve([key_of(6)]); c.ask(protocol.Acquire, 0, key_of(5).hash, [1])\n"
        "c.ask(protocol.Pin, 0, key_of(5).hash)\n"
        "child = os.fork()\n"
        "print(child, flush=True) if child else None\n"
        "time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, daemon.settings.socket_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    found = leases(daemon)
    assert (found["write_slots"], found["read_copies"], found["pinned_copies"]) == (1, 1, 1)
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        until(lambda: not daemon.stats()["clients"], what="its leases' time does not pass here")
    finally:
        os.kill(child, signal.SIGKILL)
    found = leases(daemon)
    assert (found["write_slots"], found["read_copies"], found["pinned_copies"]) == (0, 0, 0)
    assert daemon.stats()["arenas"]["own"]["copies"] == 1, "what it had published stays"


def test_segments_move_to_who_needs_them(daemon: Daemon) -> None:
    first, second = (tier_at(daemon.settings.socket_path) for _ in range(2))
    count = (4 << 20) // 4608
    for at in range(0, 2 * count, 100):
        put(first, [key_of(n) for n in range(at, at + 100)])
    assert daemon.stats()["arenas"]["own"]["segments"] == 16
    keys = [key_of(100_000 + n) for n in range(64)]
    until(lambda: OK in put(second, keys), what="a new client never gets room")
    assert daemon.stats()["arenas"]["own"]["counts"]["segments_recalled"] >= 1
    assert first.counters()["segments_returned"] >= 1
    put(second, keys)
    assert get(second, keys).count(OK) == len(keys)
    assert get(first, keys).count(OK) == len(keys)
    assert daemon.stats()["budget"]["reserved_bytes"] <= 4 << 20
    for tier in (first, second):
        tier.close()


def test_what_a_writer_changes_after_publishing_is_a_miss_and_goes(daemon: Daemon) -> None:
    writer, reader = (tier_at(daemon.settings.socket_path) for _ in range(2))
    keys = [key_of(n) for n in range(3)]
    put(writer, keys)
    (memory,) = writer.link._writable.values()
    memory[:64] ^= 0xFF  # the header of one copy
    memory[4608 + 2000] ^= 1  # a bit of the next one's payload
    assert get(reader, keys).count(ResultCode.CORRUPT) == 2
    assert get(reader, keys).count(OK) == 1
    until(lambda: sorted(reader.contains(keys)) == [False, False, True])
    counted = daemon.stats()["counts"]
    assert counted["corrupt_payload_checksum"] == 1
    assert sum(amount for cause, amount in counted.items() if cause.startswith("corrupt_")) == 2
    assert reader.counters()["corrupt_payload_checksum"] == 1
    for tier in (writer, reader):
        tier.close()


def test_a_suspicion_that_is_wrong_drops_nothing(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    put(tier, [key_of(1)])
    client = RawClient(daemon.settings.socket_path)
    client.form()
    client.tell(protocol.Suspect, 0, key_of(1).hash)
    until(lambda: daemon.stats()["counts"].get("suspect_but_whole") == 1)
    assert get(tier, [key_of(1)]) == [OK]
    client.close()
    tier.close()


def test_case_108_a_wall_clock_that_jumps_changes_no_lease(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_at(daemon.settings.socket_path)
    put(tier, [key_of(1)])
    client = RawClient(daemon.settings.socket_path)
    client.form()
    for jump in (366 * 86400, -366 * 86400):
        assert client.ask(protocol.Acquire, 0, key_of(1).hash, [4096]).lease
        now = time.time()
        monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
        time.sleep(0.1)
        assert leases(daemon)["read_copies"] == 1
        after(daemon, daemon.core.clock() + 1)
        until(lambda: leases(daemon)["read_copies"] == 0)
    client.close()
    tier.close()
