"""Starts, stops, deaths and forks: clients never hang, never get a wrong byte, and come back by themselves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from allocator.errors import TierError, UsageError
from kvstore.daemon import Daemon, DaemonTier, protocol
from kvstore.daemon.segments import SegmentMemory
from kvstore.executor import ThreadExecutor
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import PutItem, ResultCode
from tests.kvstore.daemon.kit import RawClient, ServeProcess, get, put, settings, tier_at, until

OK, MISS, FAILED = ResultCode.OK, ResultCode.MISS, ResultCode.FAILED
KILLS = 3


def kill_rounds(directory: Path, rounds: int) -> tuple[list[float], list[float]]:
    """kill -9 of the daemon under load: noticed, no hang, back, disk's copies too. Seconds until noticed and back."""
    all_noticed, all_back = list[float](), list[float]()
    path, disk = directory / "d.sock", directory / "disk"
    arguments = ("--host-bytes", "8 MiB", "--disk-path", str(disk), "--disk-bytes", "256 MiB")
    server = ServeProcess(path, *arguments)
    tier = tier_at(path, ThreadExecutor("load"), fetch_seconds=2)
    other = tier_at(path)
    stored = [key_of(n) for n in range(32)]
    assert put(other, stored) == [OK] * 32
    assert server.stop() == (0, "")  # all of it is written down
    server = ServeProcess(path, *arguments)
    for number in range(rounds):
        until(lambda: other.contains(stored) == [True] * 32)
        stop, slowest = threading.Event(), [0.0]

        def load(stop: threading.Event = stop, slowest: list[float] = slowest, number: int = number) -> None:
            at = 0
            while not stop.is_set():
                started = time.monotonic()
                at += 1
                tier.submit_put([PutItem(key_of(10_000 + 500 * number + at % 400), [payload_of(key_of(1), 20_000)])])
                tier.leading_run(stored[0], [key.hash for key in stored])
                tier.poll()
                slowest[0] = max(slowest[0], time.monotonic() - started)
                time.sleep(0.0005)

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(0.05)
        server.kill()
        all_noticed.append(until(lambda: not tier.is_up and not other.is_up))
        assert other.contains(stored) == [False] * 32
        assert set(get(other, stored[:4])) == {MISS}
        assert set(put(other, [key_of(77)])) == {FAILED}
        server = ServeProcess(path, *arguments)
        all_back.append(until(lambda: tier.is_up and other.is_up))
        stop.set()
        thread.join()
        assert slowest[0] < tier.link.timeout_seconds / 2, f"round {number}: a call hung for {slowest[0]} s"
        assert get(other, stored) == [OK] * 32, "what was on disk is back"
    assert other.counters()["daemon_restarts"] == rounds + 1
    tier.close()
    other.close()
    assert server.stop()[0] == 0
    return all_noticed, all_back


def test_kill_9_of_the_daemon_under_load(tmp_path: Path) -> None:
    kill_rounds(tmp_path, KILLS)


@pytest.mark.faults
def test_kill_9_of_the_daemon_50_times(tmp_path: Path) -> None:
    """With the bounds that a machine of one's own keeps."""
    noticed, back = kill_rounds(tmp_path, 50)
    print(f"noticed after at most {max(noticed):.3f} s, back after at most {max(back):.3f} s")
    assert sorted(noticed)[45] < 0.1
    assert sorted(back)[45] < 1.0


def test_case_121_without_a_daemon_everything_is_a_counted_miss_and_misuse_is_still_refused(tmp_path: Path) -> None:
    tier = tier_at(tmp_path / "none.sock")
    keys = [key_of(1), key_of(2)]
    assert not tier.is_up
    assert tier.contains(keys) == [False, False]
    assert tier.leading_run(keys[0], [key.hash for key in keys]) == 0
    assert put(tier, keys) == [FAILED, FAILED]
    assert get(tier, keys) == [MISS, MISS]
    assert tier.pin(keys) == [False, False]
    assert tier.delete(keys) == 0
    tier.touch(keys)
    assert (tier.used_bytes, tier.capacity_bytes, tier.pending_count(keys)) == (0, 0, 0)
    with pytest.raises(TierError, match="could not be cleared"):
        tier.clear()
    with pytest.raises(UsageError, match="pinned 0 times"):
        tier.unpin(keys)
    found = tier.counters()
    assert found["without_daemon"] >= 11
    assert found["connect_failed"] >= 1
    tier.close()


def test_case_101_a_restart_between_two_calls_is_seen_and_old_handles_mean_nothing(tmp_path: Path) -> None:
    first = Daemon(settings(tmp_path))
    first.start()
    tier = tier_at(first.settings.socket_path)
    keys = [key_of(n) for n in range(4)]
    assert put(tier, keys) == [OK] * 4
    assert tier.pin(keys[:2]) == [True, True]
    first.stop()
    second = Daemon(settings(tmp_path))
    second.start()
    until(lambda: tier.is_up)
    assert tier.link.boot == second.core.boot
    assert tier.contains(keys) == [False] * 4
    assert get(tier, keys) == [MISS] * 4
    tier.unpin(keys[:2])  # granted by a daemon that is gone: nothing to give back, and no error
    assert put(tier, keys) == [OK] * 4
    assert get(tier, keys) == [OK] * 4
    assert second.stats()["leases"]["pinned_copies"] == 0
    assert tier.counters()["daemon_restarts"] == 1
    tier.close()
    second.stop()


def test_case_132_a_daemon_that_does_not_answer_costs_no_call_more_than_the_timeout(tmp_path: Path) -> None:
    path = str(tmp_path / "d.sock")
    hole = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hole.bind(path)
    hole.listen(64)
    tier = DaemonTier(path, timeout_seconds=0.5)
    started = time.monotonic()
    for _ in range(200):
        assert tier.contains([key_of(1)]) == [False]
    assert time.monotonic() - started < 50, "calls return at once while the link is made anew: each its time were 100 s"
    hole.close()
    daemon = Daemon(settings(tmp_path))
    daemon.start()
    until(lambda: tier.is_up)
    until(lambda: put(tier, [key_of(1)]) == [OK])
    tier.close()
    daemon.stop()


def test_a_stopped_daemon_costs_one_timeout_and_then_nothing(tmp_path: Path) -> None:
    server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB")
    tier = DaemonTier(str(tmp_path / "d.sock"), timeout_seconds=0.5)
    until(lambda: put(tier, [key_of(1)]) == [OK])
    server.process.send_signal(signal.SIGSTOP)
    until(lambda: Path(f"/proc/{server.process.pid}/stat").read_text().split()[2] == "T")
    started = time.monotonic()
    for _ in range(200):
        assert tier.contains([key_of(1)]) == [False]
    assert time.monotonic() - started < 50, "two hundred calls cost one timeout of 0.5 s, not two hundred"
    server.process.send_signal(signal.SIGCONT)
    until(lambda: tier.is_up and tier.contains([key_of(1)]) == [True])
    assert get(tier, [key_of(1)]) == [OK]
    tier.close()
    assert server.stop() == (0, "")


def test_a_client_that_was_cut_off_gets_its_segments_back(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path, segment_bytes=1 << 20))
    daemon.start()
    tier = tier_at(daemon.settings.socket_path)
    for turn in range(12):  # more often than there are segments
        assert put(tier, [key_of(100 * turn + n) for n in range(10)]) == [OK] * 10, turn
        until(lambda: len(daemon._sessions) == 1)
        next(iter(daemon._sessions)).interrupt()
        until(lambda wanted=turn + 2: tier.is_up and tier.counters()["connected"] == wanted)  # type: ignore[misc]
        until(lambda: daemon.stats()["leases"]["quarantined_clients"] == 0, what="what was cut off came to its end")
    assert len(daemon.stats()["clients"]) == 1
    assert get(tier, [key_of(1100 + n) for n in range(10)]) == [OK] * 10
    stranger = RawClient(daemon.settings.socket_path)
    (holder,) = [one for one in daemon.core.holders.values() if one.name != "raw"]
    assert stranger.ask(protocol.Disown, holder.token).count == 0, "a connection that lives"
    stranger.close()
    tier.close()
    daemon.stop()


def test_two_daemons_on_one_socket_are_refused_and_a_dead_ones_socket_is_taken_over(tmp_path: Path) -> None:
    server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB")
    second = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB", wait=False)
    code, errors = second.stop() if second.process.wait(20) is None else (second.process.returncode, "")
    _, errors = second.process.communicate()
    assert code == 1
    assert f"a daemon runs there already, process {server.process.pid}" in errors
    server.kill()
    assert (tmp_path / "d.sock").exists()
    third = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB")
    tier = tier_at(tmp_path / "d.sock")
    assert put(tier, [key_of(1)]) == [OK]
    tier.close()
    assert third.stop()[0] == 0
    assert not (tmp_path / "d.sock").exists()


def test_a_graceful_stop_writes_down_what_waits(tmp_path: Path) -> None:
    arguments = ("--host-bytes", "16 MiB", "--disk-path", str(tmp_path / "disk"), "--disk-bytes", "64 MiB")
    server = ServeProcess(tmp_path / "d.sock", *arguments)
    tier = tier_at(tmp_path / "d.sock")
    keys = [key_of(n) for n in range(60)]
    assert put(tier, keys, 60_000) == [OK] * 60
    assert server.stop() == (0, "")
    server = ServeProcess(tmp_path / "d.sock", *arguments)
    until(lambda: tier.is_up)
    assert tier.contains(keys) == [True] * 60
    assert get(tier, keys, 60_000) == [OK] * 60
    tier.close()
    assert server.stop()[0] == 0


def _child(tier: DaemonTier, keys: list[Any], answers: Any) -> None:
    until(lambda: tier.is_up)
    answers.put((get(tier, keys), put(tier, [key_of(500)]), tier.leading_run(keys[0], [key.hash for key in keys])))
    tier.close()


def test_a_forked_child_makes_its_own_connection(tmp_path: Path) -> None:
    server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "4 MiB")
    tier = tier_at(tmp_path / "d.sock")
    keys = [key_of(n) for n in range(8)]
    assert put(tier, keys) == [OK] * 8
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads beside a fork
        child = context.Process(target=_child, args=(tier, keys, answers))
        child.start()
    assert answers.get(timeout=20) == ([OK] * 8, [OK], 8)
    child.join(10)
    assert child.exitcode == 0
    assert get(tier, [*keys, key_of(500)]) == [OK] * 9, "the parent's connection is as it was"
    assert tier.counters()["connected"] == 1
    tier.close()
    assert server.stop()[0] == 0


def test_several_clients_in_one_process_do_not_disturb_each_other(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path, 16 << 20))
    daemon.start()
    tiers = [tier_at(daemon.settings.socket_path, name=f"daemon{n}") for n in range(3)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                keys = [key_of(1000 * number + turn * 8 + n) for n in range(8)]
                assert put(tiers[number], keys) == [OK] * 8
                assert get(tiers[number], keys) == [OK] * 8
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert get(tiers[0], [key_of(2000 + n) for n in range(8)]) == [OK] * 8
    assert len(daemon.stats()["clients"]) == 3
    for tier in tiers:
        tier.close()
    until(lambda: not daemon.stats()["clients"])
    daemon.stop()


def test_the_budget_holds_and_readiness_does_not_wait_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, made = threading.Event(), [0]

    def slow(size_bytes: int, at_leisure: bool) -> SegmentMemory:
        made[0] += 1
        if made[0] > 1:
            may_go_on.wait(60)
        return SegmentMemory(size_bytes, at_leisure)

    monkeypatch.setattr("kvstore.daemon.core.SegmentMemory", slow)
    daemon = Daemon(settings(tmp_path, 256 << 20))
    daemon.start()
    assert daemon.is_ready
    assert not may_go_on.is_set(), "one segment is there"
    may_go_on.set()
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(1)]) == [OK]
    for at in range(0, 320, 40):
        put(tier, [key_of(10 + n) for n in range(at, at + 40)], 1 << 20)
        budget = daemon.stats()["budget"]
        assert budget["reserved_bytes"] <= budget["limit_bytes"] <= 256 << 20
        assert daemon.stats()["tiers"]["host"]["used_bytes"] <= 256 << 20
    tier.close()
    daemon.stop()


def test_case_044_killed_daemons_and_clients_leave_no_memory_behind(tmp_path: Path) -> None:
    before = shared_kib()
    for _ in range(3):
        server = ServeProcess(tmp_path / "d.sock", "--host-bytes", "64 MiB")
        tier = tier_at(tmp_path / "d.sock")
        assert put(tier, [key_of(1)]) == [OK]
        server.kill()
        tier.close()
    until(lambda: shared_kib() < before + (32 << 10), what="the memory of killed daemons is given back")
    assert not [name for name in os.listdir("/dev/shm") if "kvstore" in name]


def shared_kib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Shmem:")).split()[1])


def test_a_daemon_that_stops_refuses_new_clients(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path))
    daemon.start()
    tier = tier_at(daemon.settings.socket_path)
    client = RawClient(daemon.settings.socket_path)
    daemon.stop()
    assert client.answer() is None
    assert not daemon.is_ready
    until(lambda: not tier.is_up)
    assert tier.contains([key_of(1)]) == [False]
    tier.close()
    client.close()


def test_a_store_finds_the_last_segment_that_is_only_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in use: it was counted against the budget and not there yet, so a store was told of no room."""
    is_making, is_asked, made = threading.Event(), threading.Event(), [0]

    def slow(size_bytes: int, at_leisure: bool) -> SegmentMemory:
        made[0] += 1
        if made[0] == 2:
            is_making.set()
            is_asked.wait(60)
            time.sleep(0.02)
        return SegmentMemory(size_bytes, at_leisure)

    monkeypatch.setattr("kvstore.daemon.core.SegmentMemory", slow)
    daemon = Daemon(settings(tmp_path, 2 << 20, segment_bytes=1 << 20))
    daemon.start()
    tier, reserve = tier_at(daemon.settings.socket_path), daemon.core.reserve

    def asked(*arguments: Any) -> bytes:
        is_asked.set()
        return reserve(*arguments)

    monkeypatch.setattr(daemon.core, "reserve", asked)
    monkeypatch.setattr("kvstore.daemon.core.MAKING_SECONDS", 60)
    assert is_making.wait(60)
    assert put(tier, [key_of(n) for n in range(300)]) == [OK] * 300, "more than one segment holds"
    tier.close()
    daemon.stop()


def test_the_first_store_finds_room_however_long_memory_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(size_bytes: int, at_leisure: bool) -> SegmentMemory:
        time.sleep(0.1)
        return SegmentMemory(size_bytes, at_leisure)

    monkeypatch.setattr("kvstore.daemon.core.SegmentMemory", slow)
    daemon = Daemon(settings(tmp_path, 1 << 20, segment_bytes=1 << 20))
    daemon.start()
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, [key_of(1)]) == [ResultCode.OK]
    tier.close()
    daemon.stop()
