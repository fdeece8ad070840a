"""Shared memory outlives a daemon: what is there again, what must not be, and who may write where meanwhile."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, ledger, protocol
from kvstore.daemon.forms import form_of
from kvstore.daemon.handover import LEDGER_NAME
from kvstore.daemon.notify import NotifySocket, received
from kvstore.frame.specs import plain_specs
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import CopyKey, ResultCode
from tests.kvstore.daemon.handover_kit import FdStore, StoredProcess, taken_over
from tests.kvstore.daemon.kit import ROOT, RawClient, ServeProcess, get, put, settings, tier_at, until

OK, MISS, CORRUPT = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT
KEYS = [key_of(n) for n in range(40)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FdStore]:
    store = FdStore(tmp_path)
    yield store
    store.close()


def filled(store: FdStore, config: DaemonSettings) -> None:
    """A daemon that held KEYS, stopped."""
    daemon = store.daemon(config)
    tier = tier_at(config.socket_path)
    assert put(tier, KEYS) == [OK] * len(KEYS)
    tier.close()
    daemon.stop()


def checked_stop(daemon: Daemon) -> None:
    for arena in daemon.core.arenas.values():
        arena.check()
    daemon.stop()


def written(store: FdStore, name: str, at: int, change: bytes) -> None:
    """Memory that changed while there was no daemon."""
    (descriptor,) = store.kept[name]
    with mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as memory:
        memory[at : at + len(change)] = bytes(a ^ b for a, b in zip(memory[at : at + len(change)], change, strict=True))


def test_copies_are_there_again_after_a_graceful_restart_and_room_is_found_anew(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path, segment_bytes=256 << 10, quotas={"small": 64 << 10})
    first = store.daemon(config)
    tier = tier_at(config.socket_path)
    small = tier_at(config.socket_path, tenant="small")
    assert put(tier, KEYS) == [OK] * 40
    own = [key_of(500 + n) for n in range(4)]
    assert put(small, own) == [OK] * 4
    assert tier.delete(KEYS[:3]) == 3
    first.stop()
    second = store.daemon(config)
    report = taken_over(second)
    assert (report["copies"], report["refused"], report["dropped"]) == (41, "", {})
    until(lambda: tier.is_up and small.is_up)
    assert get(tier, KEYS) == [MISS] * 3 + [OK] * 37
    assert get(small, own) == [OK] * 4
    assert second.stats()["tenants"]["small"]["used_bytes"] == 4 * 4352
    until(lambda: second.stats()["leases"]["quarantined_clients"] == 0, what="clients said that nothing is mapped")
    for at in range(0, 2000, 100):  # more than there is room for
        put(tier, [key_of(10_000 + at + n) for n in range(100)])
    until(lambda: put(small, [key_of(600)]) == [OK], what="a segment is recalled and given back")
    assert put(small, [key_of(600 + n) for n in range(10)]) == [OK] * 10
    found = second.stats()
    assert found["tenants"]["small"]["used_bytes"] <= 64 << 10
    assert found["budget"]["reserved_bytes"] <= 4 << 20
    assert len(store.given()) == 1 + second.core.pool.made, "the keeper has what the daemon has, and no more"
    for one in (tier, small):
        one.close()
    checked_stop(second)


def test_kill_9_leaves_every_published_copy_to_the_next_daemon(store: FdStore, tmp_path: Path) -> None:
    arguments = ("--host-bytes", "4 MiB")
    server = StoredProcess(store, tmp_path / "d.sock", *arguments)
    tier = tier_at(str(tmp_path / "d.sock"))
    assert put(tier, KEYS) == [OK] * 40
    server.kill()
    assert get(tier, KEYS) == [MISS] * 40
    server = StoredProcess(store, tmp_path / "d.sock", *arguments)
    assert "took over 40 copies" in server.lines[0], server.lines
    until(lambda: tier.is_up)
    assert get(tier, KEYS) == [OK] * 40
    tier.close()
    assert server.stop() == (0, "")
    assert {"READY=1", "STOPPING=1"} <= set(store.said)


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_the_keeper_starts_a_killed_daemon_again_with_its_memory(tmp_path: Path) -> None:
    keeper = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB", "--keeper")
    tier = tier_at(str(tmp_path / "d.sock"))
    assert put(tier, KEYS) == [OK] * 40
    for number in (signal.SIGKILL, signal.SIGTERM):
        restarts = tier.counters().get("daemon_restarts", 0)
        os.kill(child_of(keeper.process.pid), number)
        until(lambda before=restarts: tier.is_up and tier.counters().get("daemon_restarts", 0) > before, 60)  # type: ignore[misc]
        assert get(tier, KEYS) == [OK] * 40
    second = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB", "--keeper", wait=False)
    assert "runs there already" in second.process.communicate(timeout=60)[1]
    assert second.process.returncode == 1
    assert put(tier, [key_of(100)]) == [OK]
    tier.close()
    code, errors = keeper.stop()
    assert code == 0
    assert errors.count("is started again") == 2
    assert not list(tmp_path.glob("*.keeper"))


def test_a_take_over_under_stores_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """kill -9 in the midst of reservations, copies and publications of three clients, again and again: what a store was
    told is there is there again, and bytes are right (get checks them)."""
    keeper = ServeProcess(tmp_path / "d.sock", "--host-bytes", "256 MiB", "--keeper")  # nothing has to go
    over, stored = threading.Event(), [list[CopyKey]() for _ in range(3)]

    def work(place: int) -> None:
        tier, number = tier_at(str(tmp_path / "d.sock")), 0
        while not over.is_set():
            keys = [key_of(100_000 * (place + 1) + number + n) for n in range(16)]
            codes = put(tier, keys)
            if OK in codes:
                number += 16
            stored[place] += [key for key, code in zip(keys, codes, strict=True) if code is OK]
            get(tier, stored[place][-40:])
            over.wait(0.002)
        tier.close()

    threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    probe, draw = tier_at(str(tmp_path / "d.sock")), random.Random(3)
    for restarts in range(1, 4):
        time.sleep(0.2 + 0.3 * draw.random())
        os.kill(child_of(keeper.process.pid), signal.SIGKILL)
        until(lambda least=restarts: probe.is_up and probe.counters().get("daemon_restarts", 0) >= least)  # type: ignore[misc]
    time.sleep(0.2)
    over.set()
    for thread in threads:
        thread.join()
    for keys in stored:
        assert len(keys) > 32
        for at in range(0, len(keys), 40):  # a read may time out on a busy machine; what is lost stays a miss
            part = keys[at : at + 40]
            until(lambda part=part: get(probe, part) == [OK] * len(part))  # type: ignore[misc]
    probe.close()
    assert keeper.stop()[0] == 0


@pytest.mark.parametrize(("end", "code"), [("exit 2", 2), ("kill -9 $$", 137)])
def test_the_keeper_gives_up_on_a_daemon_that_cannot_run(tmp_path: Path, end: str, code: int) -> None:
    script = (
        "import sys; from pathlib import Path; from kvstore.daemon import keeper\n"
        "from tests.kvstore.daemon import kit\n"
        "keeper._PAUSE_SECONDS = 0.01\n"
        "sys.exit(keeper.Keeper(kit.settings(Path(sys.argv[1])), ['/bin/sh', '-c', sys.argv[2]]).run())"
    )
    command = [sys.executable, "-c", script, str(tmp_path), f"echo run; {end}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout.count("run") == (1 if code == 2 else 5)


def test_what_was_being_written_is_never_found_and_its_segment_waits_for_its_writer(
    store: FdStore, tmp_path: Path
) -> None:
    config = settings(tmp_path, 512 << 10, segment_bytes=256 << 10)
    first = store.daemon(config)
    writer = RawClient(config.socket_path)
    writer.form()
    ((_, _, _, lease),) = writer.reserve([key_of(1)])
    assert writer.ask(protocol.Publish, [lease]).flags == b"\x01"  # no frame is there: must not be taken over
    writer.reserve([key_of(2)])
    first.stop()
    second = store.daemon(config)
    report = taken_over(second)
    assert (report["copies"], report["dropped"]) == (0, {"frame": 1})
    assert second.stats()["leases"]["quarantined_clients"] == 1
    tier = tier_at(config.socket_path)
    assert tier.contains([key_of(1), key_of(2)]) == [False, False]
    many = [key_of(100 + n) for n in range(100)]
    assert put(tier, many).count(OK) > 0
    (held,) = [one for one in second.core.arenas[""].segments.values() if one.holder is not None and not one.entries]
    assert held.holder is not None
    assert held.holder.is_quarantined, "the old writer's, and nobody got a slot there"
    fresh = RawClient(config.socket_path)
    assert writer.welcome is not None
    assert fresh.ask(protocol.Disown, writer.welcome.token).count == 1
    assert second.core.arenas[""].is_free(held)
    for one in (writer, fresh, tier):
        one.close()
    checked_stop(second)


def test_the_segment_of_a_writer_that_died_meanwhile_is_nobodys(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path)
    first = store.daemon(config)
    script = (
        "import sys; from tests.kvstore.daemon.kit import *; t = tier_at(sys.argv[1])\n"
        "print(put(t, [key_of(n) for n in range(40)]).count(0), flush=True); sys.stdin.read()"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", script, config.socket_path],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert client.stdout is not None
    client.stdout.readline()
    first.stop()
    client.kill()
    client.communicate()
    second = store.daemon(config)
    assert taken_over(second)["copies"] == 40
    assert second.stats()["leases"]["quarantined_clients"] == 0
    tier = tier_at(config.socket_path)
    assert get(tier, KEYS) == [OK] * 40
    tier.close()
    checked_stop(second)


def test_a_segment_whose_writer_cannot_be_seen_is_not_taken(store: FdStore, tmp_path: Path) -> None:
    first = store.daemon(settings(tmp_path))
    holder = first.core.join("of another pid namespace", os.geteuid(), 0, -1)
    form = form_of(plain_specs(key_of(1), 4096))
    first.core.reserve(holder, form, (key_of(1).hash,), (key_of(1).root,), [4352])
    first.stop()
    second = store.daemon(settings(tmp_path))
    assert taken_over(second)["dropped"] == {"segment_unseen_writer": 1}
    assert taken_over(second)["segments"] == 0
    checked_stop(second)


def test_memory_that_changed_meanwhile_is_a_miss(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path)
    filled(store, config)
    (segment,) = [name for name in store.kept if name != LEDGER_NAME and any(_start(store, name))]
    slot = 4352
    offsets = [at for at in range(0, 40 * slot, slot)]
    written(store, segment, offsets[3] + 20, b"\x01")  # a header
    written(store, segment, offsets[7] + 2000, b"\x01")  # a payload
    second = store.daemon(config)
    assert taken_over(second)["copies"] == 39
    assert taken_over(second)["dropped"] == {"frame": 1}
    tier = tier_at(config.socket_path)
    results = get(tier, KEYS)
    assert sorted((results.count(OK), results.count(MISS), results.count(CORRUPT))) == [1, 1, 38]
    until(lambda: second.stats()["counts"].get("corrupt_payload_checksum") == 1)
    assert get(tier, KEYS).count(OK) == 38
    tier.close()
    checked_stop(second)


def test_a_row_that_was_being_written_is_none(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path)
    filled(store, config)
    rows_at = ledger._places(*ledger._limits(config))[3]
    written(store, LEDGER_NAME, rows_at + 104 + 60, b"\x10")  # in the hash of the second one
    second = store.daemon(config)
    assert taken_over(second)["dropped"] == {"torn_row": 1}
    assert taken_over(second)["copies"] == 39
    checked_stop(second)


def _start(store: FdStore, name: str) -> bytes:
    return os.pread(store.kept[name][0], 64, 0)


def test_whatever_happens_to_the_ledger_nothing_wrong_is_served(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path)
    rng = random.Random(5)
    lost = 0
    size = os.sysconf("SC_PAGE_SIZE")
    for turn in range(12):
        filled(store, config)
        (descriptor,) = store.kept[LEDGER_NAME]
        end, at, places = os.fstat(descriptor).st_size, 0, []
        while at < end:  # where there is something
            try:
                at = os.lseek(descriptor, at, os.SEEK_DATA)
            except OSError:
                break
            stop = os.lseek(descriptor, at, os.SEEK_HOLE)
            places += range(at, stop, size)
            at = stop
        pages = [page for page in places if any(os.pread(descriptor, size, page))]
        for _ in range(1 + turn % 5):
            page = rng.choice(pages)
            written(store, LEDGER_NAME, page + rng.randrange(size), rng.randbytes(rng.choice((1, 8, 200))))
        second = store.daemon(config)
        tier = tier_at(config.socket_path)
        lost += 40 - get(tier, KEYS).count(OK)  # wrong bytes would fail there
        tier.delete(KEYS)
        tier.close()
        checked_stop(second)
    assert lost > 0


@pytest.mark.parametrize("change", ["version", "host_bytes", "secret", "domains", "unfinished", "torn", "no_ledger"])
def test_what_is_not_ours_is_dropped_as_a_whole(
    store: FdStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    config = settings(tmp_path)
    filled(store, config)
    assert len(store.given()) >= 2
    own = {"host_bytes": 4 << 20, "spill_policy": "everything", "secret": ""}
    expected, domains = change, {}
    if change == "version":
        monkeypatch.setattr(ledger, "VERSION", ledger.VERSION + 1)
    elif change == "unfinished":
        written(store, LEDGER_NAME, 8 * 256, bytes([ledger.TAKING_OVER]))
    elif change == "torn":
        written(store, LEDGER_NAME, 30, b"\x01")
    elif change == "no_ledger":
        os.close(store.kept.pop(LEDGER_NAME)[0])
    else:
        expected = "settings"
        domains = {"team": (54321,)} if change == "domains" else {}
        own |= {"host_bytes": 8 << 20} if change == "host_bytes" else {}
        own |= {"secret": "another secret of ours"} if change == "secret" else {}
    other = DaemonSettings(store=KVStoreConfig(**own), socket_path=config.socket_path, domains=domains)  # type: ignore[arg-type]
    second = store.daemon(other)
    report = taken_over(second)
    assert (report["refused"], report["copies"], report["segments"]) == (expected, 0, 0)
    tier = tier_at(config.socket_path)
    assert tier.contains(KEYS) == [False] * 40
    assert put(tier, KEYS) == [OK] * 40
    tier.close()
    checked_stop(second)
    assert len(store.given()) == 1 + second.core.pool.made, "the keeper let go of the old ones"


def test_epochs_hold_over_a_restart(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path)
    first = store.daemon(config)
    assert first.core.epochs.of("").rise(7) == 7
    assert first.core.epochs.of("uid-5").rise(3) == 3
    first.stop()
    second = store.daemon(config)
    assert (second.core.epochs.of("").value, second.core.epochs.of("uid-5").value) == (7, 3)
    assert second.core.epochs.of("uid-6").value == 0
    checked_stop(second)


def test_domains_stay_apart_and_one_that_may_connect_no_more_is_dropped(store: FdStore, tmp_path: Path) -> None:
    config = settings(tmp_path, segment_bytes=256 << 10, allowed_uids=(54321,))
    first = store.daemon(config)
    spec = plain_specs(key_of(1), 4096)
    for uid in (os.geteuid(), 54321):
        holder = first.core.join("client", uid, os.getpid(), -1)
        form = form_of(spec, "t", config.domain_of(uid))
        places = first.core.reserve(holder, form, (key_of(1).hash,), (key_of(1).root,), [4352])
        _, number, offset, lease = protocol.PLACE.unpack(places)
        memory = holder.arena.segments[number].memory.memory
        from kvstore.daemon.frames import FrameForm
        from kvstore.testing.transfer_contract import payload_of

        FrameForm(spec).write(key_of(1), memory, offset, [payload_of(key_of(1), 4096)])
        assert first.core.publish(holder, [lease]) == b"\x01"
    first.stop()
    second = store.daemon(config)
    assert {name: arena.copy_count for name, arena in second.core.arenas.items()} == {"": 1, "uid-54321": 1}
    checked_stop(second)
    third = store.daemon(settings(tmp_path, segment_bytes=256 << 10))
    assert {name: arena.copy_count for name, arena in third.core.arenas.items()} == {"": 1}
    assert taken_over(third)["dropped"] == {"segment_domain": 1, "place": 1}
    checked_stop(third)


def test_descriptors_are_taken_only_by_the_process_they_were_meant_for() -> None:
    environ = {"LISTEN_PID": str(os.getpid() + 1), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a", "HOME": "/"}
    assert received(environ) == {}
    assert environ == {"HOME": "/"}


def test_a_keeper_that_cannot_be_told_for_want_of_a_descriptor_is_counted(tmp_path: Path) -> None:
    """It was an error instead, and the segment that was to be kept stayed open and in memory with nobody to use it."""
    notify = NotifySocket(str(tmp_path / "notify"))
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, usual[1]))
    try:
        kept = notify.keep("a", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    assert not kept
    assert notify.counts == {f"not_told_{errno.EMFILE}": 1}
