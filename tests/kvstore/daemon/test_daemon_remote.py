"""A real Valkey below the daemon: what it holds comes back after kill -9; a server that hangs or dies slows nobody."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, DaemonTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import ServeProcess, get, put, tier_at, until
from tests.servers import Server, shared_server

OK, MISS = ResultCode.OK, ResultCode.MISS
KEYS = [key_of(number) for number in range(64)]


def found(tier: DaemonTier, count: int) -> bool:
    """A remote tier is asked, and answers soon after."""
    return tier.leading_run(KEYS[0], [key.hash for key in KEYS]) == count


def test_what_a_killed_daemon_had_on_the_server_the_next_one_reads(tmp_path: Path) -> None:
    path, server = tmp_path / "d.sock", shared_server()
    arguments = ("--host-bytes", "8 MiB", "--redis-url", f"{server.unix_url}?namespace=daemonkilled")
    first = ServeProcess(path, *arguments)
    tier = tier_at(path, fetch_seconds=60)
    assert put(tier, KEYS) == [OK] * 64
    assert put(tier, KEYS) == [OK] * 64
    assert get(tier, KEYS) == [OK] * 64
    until(lambda: len(server.command("KEYS", "daemonkilled:*")) >= 64, what="all of it is written")
    first.kill()
    until(lambda: not tier.is_up)
    second = ServeProcess(path, *arguments)
    until(lambda: tier.is_up and found(tier, 64))
    assert get(tier, KEYS) == [OK] * 64
    tier.close()
    assert second.stop() == (0, "")


def test_a_server_that_hangs_or_dies_slows_nobody(tmp_path: Path) -> None:
    with Server() as server:
        store = KVStoreConfig(host_bytes=4 << 20, redis_url=server.unix_url, spill_policy="everything")
        daemon = Daemon(DaemonSettings(store=store, socket_path=str(tmp_path / "d.sock"), drain_seconds=0))
        daemon.start()
        tier = tier_at(daemon.settings.socket_path, fetch_seconds=0.2)
        assert put(tier, KEYS) == [OK] * 64
        absent = [key_of(5000 + number) for number in range(2000)]

        def median_seconds(rounds: int = 100) -> float:
            took = []
            for number in range(rounds):
                started = time.perf_counter()
                assert get(tier, KEYS[number % 64 :][:1]) == [OK]
                tier.leading_run(absent[0], [key.hash for key in absent[16 * number :][:16]])
                took.append(time.perf_counter() - started)
            return statistics.median(took)

        quiet = median_seconds()
        with server.hung():
            assert median_seconds() < 10 * quiet + 0.02, "a lookup does not wait for the server"
            assert put(tier, absent[:50]) == [OK] * 50
            assert get(tier, absent[100:101]) == [MISS]
        server.kill()
        assert median_seconds() < 10 * quiet + 0.02
        assert put(tier, absent[50:100]) == [OK] * 50
        tier.close()
        daemon.stop()
