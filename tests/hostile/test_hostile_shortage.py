"""What is scarce in the daemon: descriptors, and the time in which one client's request holds its lock."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import resource
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from allocator.errors import TierError
from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, protocol, server
from kvstore.daemon.admin import Admin
from kvstore.daemon.core import Core
from kvstore.daemon.forms import Form
from kvstore.daemon.holder import Holder
from kvstore.daemon.protocol import PLACE, Cause, Place
from kvstore.daemon.session import Session
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import ROOT, RawClient, ServeProcess, checked_daemon, get, put, settings, tier_at, until

OK = ResultCode.OK
FORM = Form(key_of(0).with_hash(bytes(32)), 16, 1, 0, "bytes")
COPY_BYTES = 1000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with checked_daemon(settings(tmp_path, 16 << 20, segment_bytes=1 << 20)) as daemon:
        yield daemon


@contextmanager
def few_descriptors(most: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# the lock -------------------------------------------------------------------------------------------------------------


def joined(core: Core) -> Holder:
    return core.join("raw", os.geteuid(), os.getpid(), -1)


def fill(core: Core, holder: Holder, count: int) -> list[bytes]:
    """Store so many fresh copies; their hashes."""
    hashes = [os.urandom(32) for _ in range(count)]
    for at in range(0, count, 500):
        part = tuple(hashes[at : at + 500])
        places = core.reserve(holder, FORM, part, (bytes(32),) * len(part), [COPY_BYTES] * len(part))
        leases = [one[3] for one in PLACE.iter_unpack(places) if one[0] == Place.GRANTED]
        assert len(core.publish(holder, leases)) == len(leases)
    return hashes


def cost_seconds(work: Callable[[], object]) -> float:
    """Processor time of this thread, the least of five."""
    took = []
    for _ in range(5):
        started = time.thread_time()
        work()
        took.append(time.thread_time() - started)
    return min(took)


def core_of(directory: Path, host_bytes: int = 16 << 20) -> Core:
    return Core(settings(directory, host_bytes, segment_bytes=1 << 20))


def test_copies_that_may_not_go_are_not_looked_for_at_every_store(tmp_path: Path) -> None:
    """Found here: a pin in each of many cold segments, and a page of 512 stores held the lock for four seconds."""
    costs = []
    for pinned in (False, True):
        core = core_of(tmp_path)
        old, new = joined(core), joined(core)
        fill(core, old, 12_000)
        if pinned:
            for segment in core.arena("").segments.values():
                copies = sorted(segment.entries, key=lambda entry: entry.offset)
                core.pin(old, FORM, (copies[len(copies) // 2].key.hash,))
        fill(core, new, 5000)
        costs.append(cost_seconds(lambda core=core, new=new: fill(core, new, 100)))  # type: ignore[misc]
        core.arena("").check()
        core.close(0)
    assert costs[1] < 2 * costs[0], costs


def test_who_leaves_costs_no_look_at_all_copies(tmp_path: Path) -> None:
    """Found here: once a client had gone, every other's end searched every copy, under the lock."""
    core = core_of(tmp_path, 32 << 20)

    def come_and_go() -> None:
        core.leave(joined(core), is_dead=True)

    quick = cost_seconds(come_and_go)
    first = joined(core)
    fill(core, first, 20_000)
    core.leave(first, is_dead=True)
    assert cost_seconds(come_and_go) < 20 * quick + 0.0003
    core.arena("").check()
    core.close(0)


class CountingLock:
    """The daemon's, and how often it was taken."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.count = lock, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_a_flush_lets_others_in_between(tmp_path: Path) -> None:
    """Found here: clearing 100,000 copies held the lock for 0.3 s, longer than clients wait for an answer."""
    core = core_of(tmp_path)
    fill(core, joined(core), 6000)
    lock = core.lock = CountingLock(core.lock)  # type: ignore[assignment]
    assert Admin(core).flush(FORM.template.root) == 6000
    assert lock.count >= 6000 / 512
    core.close(0)


def sessions_of(daemon: Daemon) -> list[Session]:
    return [one for one in gc.get_objects() if type(one) is Session and one._core is daemon.core]


def test_a_connection_leaves_no_cycle_behind(daemon: Daemon) -> None:
    """The daemon does not look for cycles among old objects: that stops everybody for as long as it has copies."""
    gc.collect()
    gc.disable()
    try:
        for number in range(20):
            client = RawClient.beside(daemon)
            client.form()
            client.reserve([key_of(number)])
            client.ask(protocol.Run, 9, b"")
            client.close()
        until(lambda: all(not one.is_remote for one in daemon.core.holders.values()))
        until(lambda: not sessions_of(daemon), what="sessions go by themselves")
    finally:
        gc.enable()


def test_the_collector_never_looks_at_old_copies() -> None:
    """Found here: with a quarter more copies each time it looked at all, and stopped everybody for 0.2 s."""
    usual = gc.get_threshold()
    try:
        looks = []
        for settle in (lambda: None, importlib.import_module("kvstore.cli.serve")._short_pauses):
            settle()
            before = gc.get_stats()[2]["collections"]
            made = [[number] for number in range(300_000)]
            looks.append(gc.get_stats()[2]["collections"] - before)
            assert len(made) == 300_000
        assert looks[0] > 0
        assert looks[1] == 0
    finally:
        gc.set_threshold(*usual)


# flush and what is under way ------------------------------------------------------------------------------------------


def publish_of(client: RawClient, place: tuple[Any, ...]) -> int:
    return int(client.ask(protocol.Publish, [place[3]]).flags[0])


def test_a_clear_ends_writes_of_its_own_roots_and_of_no_other(daemon: Daemon) -> None:
    """Found here: any client's clear made every store that was under way in the domain fail."""
    writer, other = RawClient(daemon.settings.socket_path), RawClient(daemon.settings.socket_path)
    writer.form()
    other.form(0, key_of(0, root=b"\x55" * 32))
    first, second, third = writer.reserve([key_of(n) for n in range(3)])
    assert isinstance(other.ask(protocol.Clear), protocol.Count)
    assert publish_of(writer, first) == 1
    other.form(1, key_of(0))
    assert other.ask(protocol.Clear).count == 1
    assert publish_of(writer, second) == 0, "it was being written when its root was cleared"
    (fourth,) = writer.reserve([key_of(3)])
    assert daemon.admin.flush(key_of(0).root) == 0
    assert publish_of(writer, fourth) == 0, "an operator's flush, too, with nothing of it stored"
    (fifth,) = writer.reserve([key_of(4)])
    daemon.admin.flush_all()
    assert publish_of(writer, fifth) == 0
    assert publish_of(writer, third) == 0
    (sixth,) = writer.reserve([key_of(5)])
    assert publish_of(writer, sixth) == 1
    for one in (writer, other):
        one.close()


def test_roots_that_were_cleared_are_bounded(daemon: Daemon) -> None:
    arena = daemon.core.arena("")
    client = RawClient(daemon.settings.socket_path)
    client.form()
    (place,) = client.reserve([key_of(1)])
    for _ in range(30):
        arena.note_cleared({os.urandom(32) for _ in range(200)})
    assert len(arena._cleared) <= 4096
    assert publish_of(client, place) == 0, "when too many are remembered all count as cleared"
    client.close()


def test_a_copy_that_is_read_outlives_its_flush_and_its_slot_waits(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(1)]) == [OK]
    reader = RawClient(daemon.settings.socket_path)
    reader.form()
    answer = reader.ask(protocol.Acquire, 0, key_of(1).hash, [4096])
    (place,) = PLACE.iter_unpack(answer.places)
    assert place[0] == Place.GRANTED
    segment = daemon.core.arena("").segments[place[1]]
    before = segment.memory.memory[place[2] : place[2] + place[3]].tobytes()
    assert daemon.admin.flush(key_of(1).root) == 1
    assert tier.contains([key_of(1)]) == [False]
    for turn in range(3):
        assert set(put(tier, [key_of(100 * turn + n) for n in range(10, 100)])) == {OK}
    assert segment.memory.memory[place[2] : place[2] + place[3]].tobytes() == before
    reader.tell(protocol.Release, [answer.lease])
    until(lambda: daemon.stats()["leases"]["read_copies"] == 0)
    for one in (tier, reader):
        one.close()


def test_one_request_has_no_more_checked_than_its_place_in_the_rate(daemon: Daemon) -> None:
    """Found here: a list of 512 copies under suspicion, each summed by the daemon, cost as much as it named."""
    tier = tier_at(daemon.settings.socket_path)
    keys = [key_of(n) for n in range(12)]
    assert put(tier, keys, 900_000) == [OK] * 12
    client = RawClient(daemon.settings.socket_path)
    client.form(0, keys[0])
    client.tell(protocol.Suspect, 0, b"".join(key.hash for key in keys) * 40)
    assert isinstance(client.ask(protocol.Ping), protocol.Pong)
    assert daemon.core.counts["suspect_but_whole"] == 12, "each once"
    for one in (tier, client):
        one.close()


# descriptors ----------------------------------------------------------------------------------------------------------


def test_a_daemon_that_has_no_more_descriptors_has_a_smaller_budget_and_goes_on(tmp_path: Path) -> None:
    """Found here: the thread that makes segments died, and every store that needed one ended its connection."""
    under = ("sh", "-c", 'ulimit -n 140; exec "$@"', "sh")
    daemon = ServeProcess(
        tmp_path / "d.sock", "--host-bytes", "64 MiB", under=under, environ={"KVSTORE_DAEMON_SEGMENT_BYTES": "1 MiB"}
    )
    tier = tier_at(tmp_path / "d.sock")
    codes = set()
    for turn in range(20):
        codes |= set(put(tier, [key_of(100 * turn + n) for n in range(30)], 100_000))
    assert codes <= {OK, ResultCode.FULL}
    assert get(tier, [key_of(1929)], 100_000) == [OK]
    others = [tier_at(tmp_path / "d.sock") for _ in range(10)]
    assert all(one.is_up for one in others), "segments leave some to clients"
    until(lambda: 4 << 20 <= tier.capacity_bytes < 40 << 20)
    assert tier.counters().get("link_lost", 0) == 0
    for one in (tier, *others):
        one.close()
    assert daemon.stop() == (0, "")


READER = """
import resource, sys
from tests.kvstore.daemon.kit import *
from kvstore.tier import ResultCode
tier, keys = tier_at(sys.argv[1]), [key_of(n) for n in range(40)]
get(tier, keys[:1], 100_000)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
free = os.open('/dev/null', os.O_RDONLY)
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
few = [one for key in keys for one in get(tier, [key], 100_000)]
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
many = get(tier, keys, 100_000)
counters = tier.counters()
print(few.count(ResultCode.MISS) > 20, set(few) <= {ResultCode.OK, ResultCode.MISS}, set(many) == {ResultCode.OK},
      counters['connected'], counters['map_failed'] > 20)
tier.close()
"""


def test_a_client_without_descriptors_misses_and_keeps_its_connection(daemon: Daemon) -> None:
    """Found here: it ended the connection each time, and its writable segments with it."""
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(n) for n in range(40)], 100_000) == [OK] * 40
    command = [sys.executable, "-c", READER, daemon.settings.socket_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True True True 1 True\n", "")
    tier.close()


def test_descriptors_are_sent_to_who_takes_them(daemon: Daemon) -> None:
    """Found here: each Map that nobody reads keeps 64 descriptors on their way, of which the daemon's user may have a
    limited number in all; then no other client gets any."""
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(1)]) == [OK]
    client = RawClient(daemon.settings.socket_path)
    (segment,) = [one.number for one in daemon.core.arena("").segments.values() if one.entries]
    assert client.ask(protocol.Map, [segment] * 64, False).cause == Cause.SEGMENT
    session = next(one for one in daemon._sessions if one.holder is not None and one.holder.name == "raw")
    before = session.refused_count
    for _ in range(30):
        client.tell(protocol.Map, [segment], False)
    until(lambda: session.refused_count == before + 29)
    answers = [client.answer() for _ in range(30)]
    assert isinstance(answers[0], protocol.Segments)
    assert {getattr(one, "cause", None) for one in answers[1:]} == {Cause.SEGMENT}
    assert isinstance(client.ask(protocol.Map, [segment], False), protocol.Segments), "once it has read"
    for one in (tier, client):
        one.close()


def test_a_dead_clients_number_is_nobody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernel knows no SO_PEERPIDFD (or says that the peer is gone) its number may have been given to another
    process, whose life would keep the segments of the dead one."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        for is_known in (True, False):
            if not is_known:
                monkeypatch.setattr(server, "_PEER_PID_FD", 9999)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            alive = server._pid_fd(ours, os.getpid())
            assert alive >= 0
            os.close(alive)
            theirs.close()
            if not is_known:
                assert server._pid_fd(ours, stranger.pid) == -1
            ours.close()
        stranger.communicate(b"\n")


def test_nobody_is_let_in_without_a_descriptor_of_its_process(daemon: Daemon) -> None:
    """Found here: it was taken for dead when its connection ended, and what it could still write to given away."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with few_descriptors(3), pytest.raises(OSError, match="open files"):
        server._pid_fd(ours, os.getpid())
    for one in (ours, theirs):
        one.close()


def test_leases_that_have_ended_are_forgotten(tmp_path: Path) -> None:
    """Found in the soak: each was kept until its time would have been up, so 40,000 a second took 60 MB, and with a
    longer lease_seconds more."""
    core = core_of(tmp_path)
    holder = joined(core)
    (first, *_), book = fill(core, holder, 2000), core.book
    tracemalloc.start()
    try:
        for _ in range(2000):
            lease, _ = core.acquire(holder, FORM, (first,), [1])
            core.release(holder, [lease])
        assert tracemalloc.get_traced_memory()[0] < 64 << 10
    finally:
        tracemalloc.stop()
    assert not book._reads
    assert not book._writes
    core.close(0)


# what the system no longer gives --------------------------------------------------------------------------------------


@contextmanager
def no_memory_files() -> Iterator[None]:
    """No file may become as long as a segment: an error that stands for any that nobody has thought of."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_an_unusual_error_of_the_system_ends_neither_a_store_nor_the_budget(tmp_path: Path) -> None:
    """Found here: what was being made counted as on its way for ever, so every store waited a tenth of a second for it,
    the first ended its client's connection, and nothing more was made ahead."""
    store = KVStoreConfig(host_bytes=64 << 20, host_prefault=False)
    core = Core(DaemonSettings(store=store, segment_bytes=1 << 20, socket_path=str(tmp_path / "d.sock")))
    holder = joined(core)
    with no_memory_files():
        fill(core, holder, 20_000)
        until(lambda: core.pool.making == 0 and 0 < core.pool.made == core.pool.limit < 64)
    assert core._preparer.is_alive()
    assert core.pool.counts[f"segments_failed_{errno.EFBIG}"] >= 1
    assert len(fill(core, holder, 100)) == 100
    core.arena("").check()
    core.close(0)


def test_a_daemon_without_any_memory_does_not_become_ready(tmp_path: Path) -> None:
    """Found here: it said that it was ready, with a budget of nothing."""
    before = threading.active_count()
    with no_memory_files(), pytest.raises(TierError, match="the system has none"):
        core_of(tmp_path)
    until(lambda: threading.active_count() <= before)


def test_a_client_for_whom_there_is_no_thread_is_turned_away(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found here: the thread that lets clients in died of it, and the daemon heard nobody any more."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = clients_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        refused = RawClient(daemon.settings.socket_path, hello=False)
        assert refused.answer() is None
    refused.close()
    assert daemon.stats()["counts"]["accept_failed_thread"] == 1
    assert daemon.stats()["connections"] == 0
    until(lambda: clients_descriptors() <= before)
    RawClient(daemon.settings.socket_path).close()


def clients_descriptors() -> int:
    """Sockets and processes; segments, which the daemon goes on making, are neither."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(link.startswith("socket:") or "pidfd" in link for link in links)
