"""The remote tier when the way to a real server is bad: black holes, drips, lost pools, a full server, a promotion."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import redis.connection
from redis.crc import key_slot

from kvstore.executor import ThreadExecutor
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.redis_kit import get, options, put, remote_tier, until_ok
from tests.servers import Cluster, Server, free_port, shared_server
from tests.stopwatch import Stopwatch
from tests.tcp_proxy import CuttingProxy

OK, MISS, FAILED = ResultCode.OK, ResultCode.MISS, ResultCode.FAILED


@contextmanager
def black_hole(port: int) -> Iterator[None]:
    """A port that answers no connection attempt: its queue of them is full and nobody takes any."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        probe = stack.enter_context(socket.socket())
        probe.settimeout(0.1)
        with pytest.raises(TimeoutError):
            probe.connect(("127.0.0.1", port))
        yield


@pytest.mark.parametrize("seconds", [1.2, pytest.param(5.0, marks=pytest.mark.faults)])
def test_case_132_a_black_hole_costs_its_connect_timeout_and_is_left_soon(seconds: float) -> None:
    port = free_port()
    with remote_tier(f"redis://127.0.0.1:{port}", options=options(0.3)) as tier:
        with black_hole(port), Stopwatch() as watch:
            spent, calls, slowest = 0.0, 0, 0.0
            while watch.seconds < seconds:
                start = watch.seconds
                assert get(tier, [key_of(1)]) == [FAILED]
                took = watch.seconds - start
                spent, calls, slowest = spent + took, calls + 1, max(slowest, took)
                time.sleep(0.005)
            assert slowest < 0.6  # one attempt at a time, and none waits for the system's own minutes
            assert spent < 0.75 * seconds
            counts = tier.counters()
            assert counts["down_breaker_open"] > calls / 2
            assert counts["down_timeout"] >= 2
        with Server(port=port):
            assert until_ok(tier, [key_of(2)]) < 2
            assert get(tier, [key_of(2), key_of(1)]) == [OK, MISS]


def test_callers_never_wait_for_a_black_hole() -> None:
    port = free_port()
    with (
        black_hole(port),
        remote_tier(f"redis://127.0.0.1:{port}", executor=ThreadExecutor(), options=options(0.3)) as tier,
        Stopwatch() as watch,
    ):
        slowest = 0.0
        for number in range(100):
            start = watch.seconds
            tier.contains([key_of(number)])
            tier.submit_get([(key_of(number), bytearray(100))])
            tier.poll()
            slowest = max(slowest, watch.seconds - start)
        assert slowest < 0.2  # below the connect timeout


@pytest.mark.parametrize("place", [3, 300, 1_900])
def test_a_reply_that_drips_ends_at_the_deadline(place: int) -> None:
    size = 2_000
    with ExitStack() as stack:
        proxy = stack.enter_context(CuttingProxy(shared_server().port))
        tier = stack.enter_context(remote_tier(f"redis://127.0.0.1:{proxy.port}", options=options(0.3)))
        assert put(tier, [key_of(1)], size) == [OK]
        proxy.arm(place, drip_seconds=0.02)
        with Stopwatch() as watch:
            assert get(tier, [key_of(1)], size) == [FAILED]  # no second try: the time is over
        assert watch.seconds < 1.0
        assert tier.counters()["down_timeout"] == 1
        until_ok(tier, [key_of(2)])
        assert get(tier, [key_of(1)], size) == [OK]


def test_an_answer_to_a_put_cut_at_every_byte_leaves_a_copy_or_none() -> None:
    with CuttingProxy(shared_server().port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        with remote_tier(url, options=options(2.0, pause_seconds=0.002)) as tier:
            assert put(tier, [key_of(0)]) == [OK]
            for place in range(1, 15):  # three times +OK and two bytes
                keys = [key_of(100 * place + n) for n in range(3)]
                proxy.arm(place)  # the kept connection is replaced once, and a SET may come twice
                assert put(tier, keys) == [OK] * 3, place
                keys = [key_of(100 * place + 50 + n) for n in range(3)]
                proxy.arm(place, times=2)
                codes = put(tier, keys)
                assert codes == [FAILED] * 3 or place == 10, (place, codes)  # 10: cut where a handshake ends
                until_ok(tier, [key_of(0)])
                assert set(get(tier, keys)) <= {OK, MISS}
                assert put(tier, keys) == [OK] * 3
                assert get(tier, keys) == [OK] * 3
            tier.check_invariants()


@pytest.mark.parametrize("way", ["direct", "plain", "plain without hiredis"])
def test_case_125_every_pooled_connection_killed_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "plain without hiredis":
        monkeypatch.setattr(redis.connection, "DefaultParser", redis._parsers._RESP2Parser)
    with Server() as server, remote_tier(server.url, options=options(2.0, plain=way != "direct")) as tier:
        together = threading.Barrier(3)

        def hold(number: int) -> None:
            node = tier.links.node_for(b"any")
            node.run(lambda wire: (together.wait(5), wire.call([[b"PING"]])))

        keys = [key_of(n) for n in range(5)]
        assert put(tier, keys) == [OK] * 5
        for _ in range(3):
            threads = [threading.Thread(target=hold, args=[n]) for n in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            pooled = [one for one in server.command("CLIENT", "LIST", "TYPE", "normal").split(b"\n") if one]
            assert len(pooled) >= (4 if way == "direct" else 2), "nothing pooled"
            server.command("CLIENT", "KILL", "TYPE", "normal")
            assert get(tier, keys) == [OK] * 5
            server.command("CLIENT", "KILL", "TYPE", "normal")
            assert put(tier, [key_of(int(time.monotonic() * 1e6))]) == [OK]
        assert not [cause for cause in tier.counters() if cause.startswith("down")]


def until_taken(client: redis.Redis, seconds: float = 10.0) -> None:
    """Those who asked whether the server is up are still leaving."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(redis.ConnectionError):
            client.ping()
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_that_takes_no_more_clients_is_used_when_it_does() -> None:
    with Server("maxclients 1") as server, remote_tier(server.url) as tier, server.client() as only:
        until_taken(only)
        assert put(tier, [key_of(1)]) == [FAILED]
        assert [cause for cause in tier.counters() if cause.startswith("down_")]
        only.connection_pool.disconnect()
        assert until_ok(tier, [key_of(1)]) < 2
        assert get(tier, [key_of(1)]) == [OK]


def test_a_server_emptied_by_others_gives_misses() -> None:
    with Server() as server, remote_tier(server.unix_url) as tier:
        keys = [key_of(n) for n in range(4)]
        assert put(tier, keys) == [OK] * 4
        server.command("FLUSHALL")
        assert get(tier, keys[:2]) == [MISS, MISS]
        assert tier.contains(keys[:2]) == [False, False]
        assert put(tier, keys[2:]) == [OK, OK]  # believed in, asked for, and written again
        assert get(tier, keys[2:]) == [OK, OK]


def test_a_dead_cluster_node_is_replaced_by_its_replica() -> None:
    with Cluster() as cluster, remote_tier(cluster.url, options=options(0.3)) as tier:
        replica = _replica_of(cluster, 1)
        try:
            keys = [key_of(n) for n in range(30)]
            assert put(tier, keys) == [OK] * 30
            theirs = [key for key in keys if cluster.owner(key_slot(_name_of(tier, key))) == 1]
            assert theirs
            deadline = time.monotonic() + 15
            while replica.command("DBSIZE") < len(theirs):
                assert time.monotonic() < deadline
                time.sleep(0.02)
            cluster.nodes[1].kill()
            codes = get(tier, keys)
            assert codes == [FAILED if key in theirs else OK for key in keys]
            assert until_ok(tier, [key_of(1000 + n) for n in range(9)], 30) < 30
            assert get(tier, keys) == [OK] * 30  # from the replica, by the same tier
            assert replica.command("ROLE")[0] == b"master"
        finally:
            replica.close()


def _name_of(tier: RedisTier, key: object) -> bytes:
    return tier._names.of(key)  # type: ignore[arg-type]


def _replica_of(cluster: Cluster, number: int) -> Server:
    replica = Server("cluster-enabled yes", "cluster-node-timeout 1000", "cluster-replica-validity-factor 0")
    replica.command("CLUSTER", "MEET", "127.0.0.1", cluster.nodes[0].port)
    deadline = time.monotonic() + 20
    while True:
        with suppress(redis.ResponseError):
            replica.command("CLUSTER", "REPLICATE", cluster.ids[number])
            break
        assert time.monotonic() < deadline, "the replica does not know its primary"
        time.sleep(0.05)
    known = [cluster.nodes[place] for place in range(len(cluster.nodes)) if place != number]
    while not all(bytes(node.command("CLUSTER", "NODES")).count(b" connected") >= 4 for node in known):
        assert time.monotonic() < deadline, "the replica is not known"
        time.sleep(0.05)
    return replica
