"""The remote tier and real servers that die, hang, refuse and cut: right bytes or a counted miss, and recovery."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from allocator.errors import TierError
from kvstore import page_pipe
from kvstore.executor import ThreadExecutor
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import ResultCode
from tests.kvstore.redis_kit import SIZE_BYTES, ended, get, options, put, remote_tier, until_ok
from tests.servers import Server, free_port, shared_server
from tests.stopwatch import Stopwatch
from tests.tcp_proxy import CuttingProxy

OK, MISS, FULL, FAILED, CANCELLED = (
    ResultCode.OK,
    ResultCode.MISS,
    ResultCode.FULL,
    ResultCode.FAILED,
    ResultCode.CANCELLED,
)


def test_a_refused_connection_is_noticed_at_once_and_then_costs_nothing() -> None:
    """redis-py itself would try for seconds."""
    with remote_tier(f"redis://127.0.0.1:{free_port()}") as tier, Stopwatch() as watch:
        assert put(tier, [key_of(n) for n in range(100)]) == [FAILED] * 100
        assert get(tier, [key_of(1)]) == [FAILED]
        assert watch.seconds < 0.5
        counts = tier.counters()
        assert counts["down_unreachable"] == 100
        assert counts["down_breaker_open"] == 1


def test_a_killed_server_is_used_again_when_it_is_back() -> None:
    with Server() as server, remote_tier(server.unix_url) as tier:
        assert put(tier, [key_of(1)]) == [OK]
        server.kill()
        assert get(tier, [key_of(1)]) == [FAILED]
        server.start()
        assert until_ok(tier, [key_of(2)]) < 10
        assert get(tier, [key_of(2), key_of(1)]) == [OK, MISS]
        assert tier.contains([key_of(1)]) == [False]


@pytest.mark.parametrize("plain", [False, True], ids=["direct", "plain"])
def test_a_hung_server_costs_its_timeout_once(plain: bool) -> None:
    with Server() as server, remote_tier(server.url, options=options(0.5, plain=plain)) as tier:
        assert put(tier, [key_of(n) for n in range(4)]) == [OK] * 4
        with server.hung():
            start = time.monotonic()
            with Stopwatch() as watch:
                assert get(tier, [key_of(n) for n in range(4)]) == [FAILED] * 4
            assert time.monotonic() - start > 0.4
            assert watch.seconds < 1.5, "of four keys each would cost it"
            with Stopwatch() as watch:
                assert get(tier, [key_of(1)]) == [FAILED]
                assert put(tier, [key_of(9)], 1 << 20) == [FAILED]
            assert watch.seconds < 0.4
        until_ok(tier, [key_of(5)])
        assert get(tier, [key_of(n) for n in range(4)]) == [OK] * 4


def test_callers_never_wait_for_a_hung_server() -> None:
    with Server() as server, remote_tier(server.url, executor=ThreadExecutor(), options=options(1.0)) as tier:
        assert put(tier, [key_of(1)]) == [OK]
        buffer = bytearray(SIZE_BYTES)
        with server.hung(), Stopwatch() as watch:
            slowest = 0.0
            for number in range(200):
                start = watch.seconds
                tier.contains([key_of(n) for n in range(number, number + 32)])
                tier.submit_get([(key_of(1), buffer)])
                tier.submit_put([(key_of(1000 + number), [payload_of(key_of(2), 100)])])
                tier.touch([key_of(1)])
                tier.delete([key_of(5000 + number)])
                tier.poll()
                slowest = max(slowest, watch.seconds - start)
            assert slowest < 0.5  # far below the timeout; a busy machine, not the server, is what it may wait for


def test_a_wrong_password_fails_fast_and_is_named() -> None:
    with Server("requirepass right") as server:
        url = server.url.replace("redis://", "redis://default:wrong@")
        with remote_tier(url) as tier:
            with Stopwatch() as watch:
                assert put(tier, [key_of(1)]) == [FAILED]
            assert watch.seconds < 1.0, "redis-py itself would try for four"
            assert tier.counters()["down_auth"] == 1
            assert "wrong" not in f"{tier.address!r} {tier.address} {tier.counters()}"
        with remote_tier(url.replace("wrong", "right")) as tier:
            assert put(tier, [key_of(1)]) == [OK]


def test_server_out_of_memory_without_eviction_is_full_and_reads_go_on() -> None:
    with Server("maxmemory 12mb", "maxmemory-policy noeviction") as server, remote_tier(server.unix_url) as tier:
        keys = [key_of(n) for n in range(24)]
        results = put(tier, keys, 1 << 20)
        assert set(results) == {OK, FULL}
        stored = [key for key, code in zip(keys, results, strict=True) if code is OK]
        assert get(tier, stored, 1 << 20) == [OK] * len(stored)  # GETEX is allowed when memory is full
        assert tier.counters()["refused_OOM"] == results.count(FULL)
        tier.delete(stored)
        assert put(tier, [key_of(100)], 1 << 20) == [OK]


def test_a_server_that_evicts_by_itself_gives_misses_not_errors() -> None:
    with Server("maxmemory 12mb", "maxmemory-policy allkeys-lru") as server, remote_tier(server.unix_url) as tier:
        keys = [key_of(n) for n in range(24)]
        assert put(tier, keys, 1 << 20) == [OK] * 24
        codes = get(tier, keys, 1 << 20)
        assert set(codes) == {OK, MISS}
        assert tier.contains(keys) == [code is OK for code in codes]


def test_a_value_over_the_clients_limit_never_reaches_the_server() -> None:
    with remote_tier(shared_server().unix_url, options=options(value_limit_bytes=10_000)) as tier:
        assert put(tier, [key_of(1)], 20_000) == [ResultCode.TOO_LARGE]
        assert put(tier, [key_of(2)], 5_000) == [OK]


def test_a_value_over_the_servers_limit_costs_itself_only() -> None:
    with Server("proto-max-bulk-len 1mb") as server, remote_tier(server.unix_url) as tier:
        assert put(tier, [key_of(1)], 3 << 20) == [FAILED]
        until_ok(tier, [key_of(2)])
        assert get(tier, [key_of(2)]) == [OK]


def test_a_server_killed_while_a_value_is_on_its_way() -> None:
    size = 24 << 20
    key = key_of(1)
    payload = payload_of(key, size)
    for pause in (0.0, 0.004, 0.02):
        with Server() as server, remote_tier(server.url, executor=ThreadExecutor()) as tier:
            transfer = tier.submit_put([(key, [payload])])
            time.sleep(pause)
            server.kill()
            assert ended(tier, transfer)[0] in (OK, FAILED)
            server.start()
            until_ok(tier, [key_of(2)])
            assert get(tier, [key], size)[0] in (MISS, FAILED)
            assert put(tier, [key], size) == [OK]
            buffer = np.zeros(size, np.uint8)
            transfer = tier.submit_get([(key, buffer)])
            time.sleep(pause)
            server.kill()
            code = ended(tier, transfer)[0]
            assert code is FAILED or (code is OK and np.array_equal(buffer, payload))


HANDSHAKE_BYTES = 10
"""Two +OK: cut right after them, the client sees a closed connection before it is used and takes another."""


@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.faults)])
def test_case_072_a_reply_cut_at_every_byte_is_a_miss_and_the_next_call_is_right(stride: int) -> None:
    keys = [key_of(n) for n in range(3)]
    size = 150
    with CuttingProxy(shared_server().port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}?namespace=cut{stride}"
        with remote_tier(url, options=options(2.0, pause_seconds=0.002)) as tier:
            assert put(tier, keys, size) == [OK] * 3
            before = proxy.forwarded_bytes
            assert get(tier, keys, size) == [OK] * 3
            total = proxy.forwarded_bytes - before
            assert total > 3 * size
            for place in range(1, total, stride):
                cuts = proxy.cut_count
                proxy.arm(place)  # the kept connection is replaced once
                assert get(tier, keys, size) == [OK] * 3, place
                proxy.arm(place, times=2)  # and the second cut is a failure, not a wait
                codes = get(tier, keys, size)
                assert codes == [FAILED] * 3 or place == HANDSHAKE_BYTES, (place, codes)
                assert proxy.cut_count == cuts + 3
                deadline = time.monotonic() + 10
                while get(tier, keys, size) != [OK] * 3:  # the breaker's pause
                    assert time.monotonic() < deadline
                    time.sleep(0.002)


def test_a_cancelled_calls_reply_never_answers_the_next() -> None:
    size = 300_000
    with CuttingProxy(shared_server().port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with remote_tier(url, executor=ThreadExecutor(), options=options(0.5)) as tier:
            keys = [key_of(n) for n in range(6)]
            assert put(tier, keys, size) == [OK] * 6
            for place in (1, 9, 400, size // 2, size + 500, 3 * size):
                proxy.arm(place, stall=True)
                transfer = tier.submit_get([(key, np.zeros(size, np.uint8)) for key in keys])
                threading.Timer(0.02, transfer.cancel).start()
                codes = ended(tier, transfer)
                assert codes[-1] in (CANCELLED, FAILED), codes
                proxy.arm(1 << 40)
                deadline = time.monotonic() + 10
                while (codes := get(tier, list(reversed(keys)), size)) != [OK] * 6:
                    assert set(codes) <= {FAILED, OK}
                    assert time.monotonic() < deadline
                    time.sleep(0.02)


@pytest.mark.parametrize("plain", [False, True], ids=["direct", "plain"])
def test_case_125_pooled_connections_killed_by_the_server(plain: bool) -> None:
    with Server() as server, remote_tier(server.url, options=options(plain=plain)) as tier:
        for number in range(5):
            assert put(tier, [key_of(number)]) == [OK]
            server.command("CLIENT", "KILL", "TYPE", "normal")
            assert get(tier, [key_of(number)]) == [OK]
            server.command("CLIENT", "KILL", "TYPE", "normal")


def test_clear_raises_when_the_server_cannot_be_reached() -> None:
    with Server() as server, remote_tier(server.url) as tier:
        put(tier, [key_of(1)])
        server.kill()
        with pytest.raises(TierError, match="cannot be reached"):
            tier.clear()
        with pytest.raises(TierError):
            tier.raise_epoch()
        server.start()
        tier.clear()
        assert put(tier, [key_of(1)]) == [OK]


def test_a_server_without_getex_is_read_all_the_same() -> None:
    with Server('rename-command GETEX ""') as server, remote_tier(server.unix_url, ttl_seconds=100) as tier:
        assert put(tier, [key_of(1), key_of(2)]) == [OK] * 2
        name = next(iter(server.command("SCAN", 0)[1]))
        server.command("PEXPIRE", name, 5000)
        assert get(tier, [key_of(1), key_of(2), key_of(3)]) == [OK, OK, MISS]
        assert server.command("PTTL", name) > 50_000
        assert get(tier, [key_of(2), key_of(3)]) == [OK, MISS]


@pytest.mark.parametrize("size", [70_000, 150_000, 3_000_000])
@pytest.mark.parametrize("way", ["unix", "tcp"])
def test_bytes_that_change_after_a_failed_put_are_never_read_back(way: str, size: int) -> None:
    """Pages are lent to the socket: a server that wakes up later may store what has changed since."""
    key = key_of(1)
    buffer = payload_of(key, size).copy()
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        url = server.unix_url if way == "unix" else server.url
        tier = stack.enter_context(remote_tier(url, options=options(0.2)))
        assert put(tier, [key_of(2)]) == [OK]
        with server.hung():
            assert ended(tier, tier.submit_put([(key, [buffer])])) == [FAILED]
            buffer[: size // 2] ^= 0xFF
        until_ok(tier, [key_of(3)])
        code = get(tier, [key], size)[0]  # on TCP they were copied: what was given may have arrived
        assert code in (MISS, ResultCode.CORRUPT) or (way == "tcp" and code is OK)
        assert put(tier, [key], size) == [OK]
        assert get(tier, [key], size) == [OK]


def test_where_pages_cannot_be_lent_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []

    def refuse(*_: object) -> int:
        refused.append(1)
        return -1

    monkeypatch.setattr(page_pipe, "_vmsplice", lambda: refuse)
    with remote_tier(shared_server().unix_url, options=options(5.0)) as tier:
        keys = [key_of(n) for n in range(3)]
        assert put(tier, keys, 500_000) == [OK] * 3
        assert get(tier, keys, 500_000) == [OK] * 3
    assert len(refused) == 1
    monkeypatch.setattr(page_pipe, "_vmsplice", lambda: None)
    with remote_tier(shared_server().unix_url, options=options(5.0)) as tier:
        assert put(tier, keys, 500_000) == [OK] * 3
        assert get(tier, keys, 500_000) == [OK] * 3
    assert len(refused) == 1
