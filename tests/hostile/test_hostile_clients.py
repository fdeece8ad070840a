"""Clients that mean ill: garbage, sizes, versions, uids, floods, silence. The daemon answers others as before."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from kvstore.daemon import Daemon, DaemonTier, protocol
from kvstore.daemon.forms import Form, KnownForms
from kvstore.daemon.holder import WriteLease
from kvstore.daemon.pace import shares
from kvstore.daemon.protocol import Cause
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import (
    ROOT,
    RawClient,
    ServeProcess,
    checked_daemon,
    counts,
    get,
    put,
    settings,
    tier_at,
    until,
)

OK = ResultCode.OK


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with checked_daemon(
        settings(tmp_path, segment_bytes=256 << 10, leases_per_client=512, clients_per_uid=24)
    ) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("packet", "cause"),
    [
        (b"\xc1", Cause.GARBAGE),
        (b"GET / HTTP/1.1\r\n\r\n", Cause.GARBAGE),
        (b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.", Cause.GARBAGE),
        (protocol.encode(protocol.Hello(1, protocol.MAGIC, 1, "x"))[:-1], Cause.GARBAGE),
        (msgspec.msgpack.encode([1, 1, protocol.MAGIC, 1, "x" * 65]), Cause.GARBAGE),
        (msgspec.msgpack.encode([1, -1, protocol.MAGIC, 1, "x"]), Cause.GARBAGE),
        (msgspec.msgpack.encode([99, 1]), Cause.GARBAGE),
        (b"\xdd\xff\xff\xff\xff", Cause.GARBAGE),
        (b"\x91" * 60_000, Cause.GARBAGE),
        (b"\x00" * (protocol.LONGEST_BYTES + 1), Cause.OVERSIZED),
        (protocol.encode(protocol.Hello(1, protocol.MAGIC, 2, "x")), Cause.VERSION),
        (protocol.encode(protocol.Hello(1, "another protocol", 1, "x")), Cause.EARLY),
        (protocol.encode(protocol.Ping(1)), Cause.EARLY),
    ],
)
def test_what_is_no_hello_is_refused_counted_and_cut_off(daemon: Daemon, packet: bytes, cause: Cause) -> None:
    client = RawClient(daemon.settings.socket_path, hello=False)
    client.sock.send(packet)
    answer = client.answer()
    assert isinstance(answer, protocol.Refused)
    assert answer.cause == cause
    assert client.answer() is None
    client.close()
    until(lambda: counts(daemon).get(f"refused_{cause.name.lower()}") == 1)


def test_requests_that_cannot_be_met_are_refused_and_the_daemon_goes_on(daemon: Daemon) -> None:
    client = RawClient(daemon.settings.socket_path)
    assert client.ask(protocol.Run, 0, key_of(1).hash).cause == Cause.FORM
    assert isinstance(client.form(0), protocol.Count)
    assert client.form(0).cause == Cause.FORM
    assert client.ask(protocol.Unpin, 0, key_of(1).hash).cause == Cause.PINS
    assert client.ask(protocol.Publish, [1, 2, 3]).flags == bytes(3)
    assert client.ask(protocol.Map, [2**62], False).cause == Cause.SEGMENT
    client.tell(protocol.Release, [2**63 - 1])
    client.tell(protocol.Return, [4, 5])
    client.tell(protocol.Suspect, 0, key_of(1).hash * 3)
    places = client.reserve([key_of(n) for n in range(1, 3)], (1 << 48) - 1)
    assert [one[0] for one in places] == [protocol.Place.TOO_LARGE] * 2
    assert client.ask(protocol.Run, 0, b"").count == 0
    assert client.ask(protocol.Hello, protocol.MAGIC, 1, "again").cause == Cause.EARLY
    assert client.answer() is None
    client.close()
    for bad in (b"x" * 33, b"x" * 31):
        client = RawClient(daemon.settings.socket_path)
        client.form()
        assert client.ask(protocol.Run, 0, bad).cause == Cause.GARBAGE
        assert client.answer() is None
        client.close()
    good = tier_at(daemon.settings.socket_path)
    assert put(good, [key_of(1)]) == [OK]
    assert get(good, [key_of(1)]) == [OK]
    good.close()


def test_leases_pins_and_forms_have_limits(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(1)]) == [OK]
    client = RawClient(daemon.settings.socket_path)
    client.form()
    for kind, fields in ((protocol.Acquire, ([1] * 256,)), (protocol.Pin, ())):
        answers = [client.ask(kind, 0, key_of(1).hash * 256, *fields) for _ in range(3)]
        assert isinstance(answers[1], protocol.Places | protocol.Flags)
        assert answers[2].cause == Cause.LEASES
    client.reserve([key_of(100 + n) for n in range(400)])
    answer = client.ask(protocol.Reserve, 0, key_of(9).hash * 200, key_of(9).root * 200, [5000] * 200)
    assert answer.cause == Cause.LEASES
    for number in range(1, protocol.MOST_FORMS + 1):
        answer = client.form(number)
    assert answer.cause == Cause.FORM
    assert counts(daemon)["refused_leases"] == 3
    assert get(tier, [key_of(1)]) == [OK]
    client.close()
    until(lambda: daemon.stats()["leases"]["read_copies"] == 0)
    tier.close()


def test_what_clients_name_is_bounded(daemon: Daemon) -> None:
    """Tenants, forms and codecs: found here, each name that was ever said stayed for good."""
    arena = daemon.core.arena("")
    for turn in range(3):
        client = RawClient.beside(daemon)  # the pace is another test's
        for number in range(1000):
            key = key_of(0, codec=f"c{number}")
            fields = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, bytes(1000))
            client.ask(protocol.Form, number, *fields, 1, 1, 0, "bytes", f"tenant {turn} {number}")
            hashes = key_of(1000 * turn + number).hash
            answer = client.ask(protocol.Reserve, number, hashes, key.root, [5000])
            (place,) = protocol.PLACE.iter_unpack(answer.places)
            client.tell(protocol.Abandon, [place[3]])
        client.close()
    with daemon.core.lock:
        assert len(arena.tenants) <= 2048
        assert sum(map(len, arena._shelves.values())) <= 2048
    until(lambda: not arena.codec_bytes)
    client = RawClient(daemon.settings.socket_path)
    key = key_of(0)
    fields = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, bytes(16384), 1, 1, 0, "bytes", "")
    causes = [getattr(client.ask(protocol.Form, number, *fields), "cause", None) for number in range(70)]
    assert causes == [None] * 64 + [Cause.FORM] * 6
    client.close()


def test_slot_sizes_that_a_client_names_leave_nothing_while_it_stays(daemon: Daemon) -> None:
    """Found here: every size that a tenant had once reserved stayed until its client had left."""
    arena, client, key = daemon.core.arena(""), RawClient(daemon.settings.socket_path), key_of(0)
    fields = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, key.parameters, 1, 1, 0, "bytes")
    for number in range(20):
        client.ask(protocol.Form, number, *fields, f"tenant {number}")
    for frame_bytes in range(512, 512 + 64 * 20, 64):
        for number in range(20):
            answer = client.ask(protocol.Reserve, number, key_of(1).hash, key.root, [frame_bytes])
            ((place, segment, _, lease),) = protocol.PLACE.iter_unpack(answer.places)
            assert place == protocol.Place.GRANTED
            client.tell(protocol.Abandon, [lease])
        client.tell(protocol.Return, [segment])
    client.ask(protocol.Ping)
    with daemon.core.lock:
        assert sum(map(len, arena._shelves.values())) == len(arena._on_shelf) == 0
    client.close()


def test_a_return_looks_at_the_clients_leases_once(daemon: Daemon) -> None:
    """Found here: one message that named a segment 512 times looked through all write leases each time, a tenth of a
    second in which nobody could store or read."""

    class Watched(dict[int, WriteLease]):
        looks = 0

        def values(self) -> Any:
            self.looks += 1
            return super().values()

    client = RawClient(daemon.settings.socket_path)
    client.form()
    ((_, segment, _, lease),) = client.reserve([key_of(1)])
    (holder,) = daemon.core.holders.values()
    holder.writes = watched = Watched(holder.writes)
    client.tell(protocol.Return, [segment] * protocol.PAGE_ITEMS)
    client.ask(protocol.Ping)
    assert watched.looks == 1
    assert len(holder.segments) == 1, "it is being written to"
    client.tell(protocol.Abandon, [lease])
    client.tell(protocol.Return, [segment] * protocol.PAGE_ITEMS)
    client.ask(protocol.Ping)
    assert not holder.segments
    client.close()


def test_what_a_client_stores_and_deletes_again_and_again_leaves_nothing(daemon: Daemon) -> None:
    """Found here: each client's queue of candidates kept twice as many dropped ones as all clients had copies."""
    tiers = [tier_at(daemon.settings.socket_path) for _ in range(2)]
    assert put(tiers[0], [key_of(number) for number in range(200)], 64) == [OK] * 200
    deleted = 0
    for _ in range(150):
        put(tiers[1], [key_of(1000)], 64)
        deleted += tiers[1].delete([key_of(1000)])
    assert deleted > 100, "some may time out on a busy machine"
    (arena,) = daemon.core.arenas.values()
    kept = [item for heap in arena._candidates.values() for item in heap if not item[2].is_linked]
    assert len(kept) <= 66
    for tier in tiers:
        tier.close()


def test_forms_of_many_families_are_forgotten_by_age() -> None:
    known = KnownForms()
    for number in range(4000):
        key = key_of(0).with_hash(bytes(32))._replace(group=number, parameters=bytes(16384))
        known.learn(Form(key, 1, 1, 0, "bytes"))
    assert known._bytes <= 32 << 20
    assert len(known._by_family) < 2000


def test_who_opens_many_connections_gets_no_more_of_the_rate() -> None:
    class One(NamedTuple):
        uid: int
        pid: int
        number: int

    hostile = [One(1, pid, number) for pid in (10, 11) for number in range(30)]
    good = [One(1, 20, 0), One(2, 30, 0)]
    found = shares(hostile + good)  # type: ignore[arg-type]
    assert {found[one] for one in hostile} == {2 * 3 * 30}  # type: ignore[index]
    assert [found[one] for one in good] == [6, 2]  # type: ignore[index]
    assert sum(1 / part for part in found.values()) == pytest.approx(1)


def test_long_requests_are_slowed_by_what_they_cost(daemon: Daemon) -> None:
    """Found here: a lookup of 1,024 hashes counted as one of 16, so two clients could keep a core busy."""
    client = RawClient(daemon.settings.socket_path)
    client.form()
    session = next(iter(daemon._sessions))
    for _ in range(50):
        client.ask(protocol.Contains, 0, key_of(1).hash * 1024)
    assert session.spent > 2 * session.request_count
    short = RawClient(daemon.settings.socket_path)
    short.form()
    other = next(one for one in daemon._sessions if one is not session)
    before = other.spent
    for _ in range(50):
        short.ask(protocol.Run, 0, key_of(1).hash * 16)
    assert other.spent - before == 50
    for one in (client, short):
        one.close()


@pytest.mark.parametrize("packet", [b"\xff" * 5000, protocol.encode(protocol.Hello(1, protocol.MAGIC, 99, "x"))])
def test_a_process_that_was_cut_off_again_and_again_is_turned_away(daemon: Daemon, packet: bytes) -> None:
    tier = tier_at(daemon.settings.socket_path)
    for _ in range(12):
        client = RawClient(daemon.settings.socket_path, hello=False)
        with suppress(BrokenPipeError):
            client.sock.send(packet)
        answer = client.answer()
        client.close()
        if answer is not None and answer.cause == Cause.PACE:
            break
    assert answer.cause == Cause.PACE
    assert counts(daemon)["refused_pace"] >= 1
    assert put(tier, [key_of(1)]) == [OK], "who is in stays in"
    tier.close()


def test_descriptors_that_a_client_sends_are_not_kept(daemon: Daemon, tmp_path: Path) -> None:
    client = RawClient(daemon.settings.socket_path)
    with (tmp_path / "sent").open("wb") as sent:

        def copies() -> int:
            """Of that file alone: the daemon makes segments meanwhile, which are descriptors too."""
            return sum(os.path.realpath(one) == sent.name for one in Path("/proc/self/fd").iterdir())

        for number in range(20):
            client.seq += 1
            socket.send_fds(client.sock, [protocol.encode(protocol.Ping(client.seq))], [sent.fileno()] * 15)
            assert isinstance(client.answer(), protocol.Pong), number
        assert copies() == 1
    client.close()


def test_connections_have_limits_and_come_back(daemon: Daemon) -> None:
    clients = [RawClient(daemon.settings.socket_path) for _ in range(24)]
    over = RawClient(daemon.settings.socket_path, hello=False)
    assert over.answer().cause == Cause.CLIENTS
    over.close()
    assert clients[0].ask(protocol.Ping) is not None
    for one in clients:
        one.close()
    until(lambda: daemon.stats()["connections"] == 0)
    RawClient(daemon.settings.socket_path).close()


def test_a_client_that_says_nothing_is_cut_off(daemon: Daemon) -> None:
    client = RawClient(daemon.settings.socket_path, hello=False)
    started = time.monotonic()
    assert client.answer() is None
    assert time.monotonic() - started > 0.5
    client.close()
    until(lambda: counts(daemon).get("refused_slow") == 1)


@pytest.mark.parametrize("send_seconds", [60.0, 0.5])
def test_a_client_that_never_reads_is_cut_off_and_others_do_not_wait(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, send_seconds: float
) -> None:
    """60 s: so that whoever waited for it would be seen on a slow machine too; 0.5: until it is cut off."""
    monkeypatch.setattr("kvstore.daemon.session.SEND_SECONDS", send_seconds)
    tier = tier_at(daemon.settings.socket_path)
    slow = RawClient(daemon.settings.socket_path)
    slow.form()
    slow.sock.settimeout(0.2)
    sent = 0
    with pytest.raises((TimeoutError, BrokenPipeError, ConnectionResetError)):  # noqa: PT012 - until it is cut off
        while True:
            slow.tell(protocol.Contains, 0, key_of(1).hash * 1024)
            sent += 1
    started = time.monotonic()
    assert put(tier, [key_of(1)]) == [OK]
    assert time.monotonic() - started < 30
    if send_seconds < 1:
        until(lambda: len(daemon.stats()["clients"]) == 1, what="the slow reader is cut off")
    slow.close()
    tier.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_uid_that_is_not_on_the_list_is_refused_and_one_that_is_has_an_arena_of_its_own() -> None:
    outer = Path(tempfile.mkdtemp())  # pytest's own folders are closed to other users
    outer.chmod(0o755)
    folder = outer / "kvstore"
    daemon = Daemon(settings(folder, socket_path=str(folder / "d.sock"), allowed_uids=(12345,)))
    daemon.start()
    own = tier_at(daemon.settings.socket_path)
    assert put(own, [key_of(1), key_of(2)]) == [OK, OK]
    script = (
        "import os, sys\n"
        "from tests.kvstore.daemon.kit import *\n"
        "import kvstore.daemon.client, kvstore.daemon.link, xxhash, kvstore.frame.parsing, kvstore.daemon.frames\n"
        "put(DaemonTier('/nowhere'), [key_of(9)])\n"
        "os.setgid(12345); os.setuid(int(sys.argv[2]))\n"
        "tier = tier_at(sys.argv[1])\n"
        "print(tier.is_up, tier.contains([key_of(1)]), [str(one) for one in put(tier, [key_of(1)])],\n"
        "      tier.counters().get('refused_uid', 0) > 0)\n"
        "tier.close()"
    )
    said = []
    for uid in ("12345", "12346"):
        command = [sys.executable, "-c", script, daemon.settings.socket_path, uid]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        said.append((done.stdout.strip(), done.stderr))
    assert said[0] == ("True [False] ['ok'] False", "")
    assert said[1] == ("False [False] ['failed'] True", "")
    found = daemon.stats()
    assert {name: arena["copies"] for name, arena in found["arenas"].items()} == {"own": 2, "uid-12345": 1}
    assert found["counts"]["refused_uid"] >= 1
    assert oct(folder.stat().st_mode & 0o777) == "0o711"
    own.close()
    daemon.stop()
    shutil.rmtree(outer)


def test_a_private_daemons_folder_and_socket_are_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "kvstore" / "d.sock"
    daemon = Daemon(settings(tmp_path, socket_path=str(path)))
    daemon.start()
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    daemon.stop()


FLOOD = """
import sys, socket, time
from tests.kvstore.daemon.kit import *
kind, path, until_time = sys.argv[1], sys.argv[2], time.monotonic() + 3
print('flooding', flush=True)
while time.monotonic() < until_time:
    try:
        client = RawClient(path, hello=kind != 'garbage')
        if kind == 'garbage':
            client.sock.send(b'\\xff' * 5000); client.answer()
        elif kind == 'requests':
            client.form()
            while time.monotonic() < until_time:
                client.ask(protocol.Contains, 0, key_of(1).hash * 1024)
        elif kind == 'leases':
            client.form()
            for turn in range(200):
                client.reserve([key_of(1000 * turn + n) for n in range(64)])
                client.ask(protocol.Acquire, 0, key_of(1).hash * 512, [1] * 512)
        client.close()
    except (OSError, AttributeError, AssertionError):
        time.sleep(0.001)
"""


@pytest.mark.parametrize("kind", ["connections", "garbage", "leases", "requests"])
def test_a_flood_leaves_the_daemon_responsive(tmp_path: Path, kind: str) -> None:
    """Far wider than what the suite `daemon` measures (rows flood_of_*): a loaded machine keeps it."""
    server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "8 MiB")
    tier = tier_at(tmp_path / "d.sock")
    keys = [key_of(n, root=b"\x09" * 32) for n in range(16)]
    assert put(tier, keys) == [OK] * 16
    assert tier.pin(keys) == [True] * 16

    def median_seconds(lookups: int) -> float:
        took = []
        for _ in range(lookups):
            started = time.perf_counter()
            assert tier.leading_run(keys[0], [key.hash for key in keys]) == 16
            took.append(time.perf_counter() - started)
            time.sleep(0.001)
        return sorted(took)[lookups // 2]

    quiet = median_seconds(300)
    floods = [
        subprocess.Popen(
            [sys.executable, "-c", FLOOD, kind, str(tmp_path / "d.sock")], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for flood in floods:
        assert flood.stdout is not None
        flood.stdout.readline()
    flooded = median_seconds(600)
    for flood in floods:
        flood.wait()
        assert flood.stdout is not None
        flood.stdout.close()
    assert flooded < 10 * quiet + 0.02, (flooded, quiet)
    tier.close()
    assert server.stop()[0] == 0


CROWD = """
import socket, sys
held = []
print('crowding', flush=True)
while True:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        one.connect(sys.argv[1])
        one.send(b'x' * 200)
    except OSError:
        pass
    held.append(one)
    if len(held) > 300:
        held.pop(0).close()
"""


def _is_up(tier: DaemonTier) -> bool:
    return tier.is_up


def test_who_connects_into_a_crowd_gets_in(tmp_path: Path) -> None:
    """Processes that connect without end kept the queue so full that it took longer than a client waited."""
    path = str(tmp_path / "d.sock")
    server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "8 MiB")
    crowd = [
        subprocess.Popen([sys.executable, "-c", CROWD, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(3)
    ]
    try:
        for one in crowd:
            assert one.stdout is not None
            one.stdout.readline()
        time.sleep(1)
        for number in range(3):
            tier = DaemonTier(path)
            until(partial(_is_up, tier), what="a client in the crowd")
            assert put(tier, [key_of(number)]) == [OK]
            tier.close()
    finally:
        for one in crowd:
            one.kill()
            one.wait()
            assert one.stdout is not None
            one.stdout.close()
    assert server.stop()[0] == 0
