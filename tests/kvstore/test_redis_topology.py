"""The remote tier on a real Cluster and a real Sentinel: nodes that die, slots that move, masters that change."""

from __future__ import annotations

import threading
import time

import pytest
from redis.crc import key_slot

from allocator.errors import TierError
from kvstore.copy_key import CopyKey
from kvstore.executor import ThreadExecutor
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.redis_kit import get, options, put, remote_tier, until_ok
from tests.servers import Cluster, SentinelGroup, shared_cluster, shared_sentinel
from tests.stopwatch import Stopwatch

OK, MISS, FAILED = ResultCode.OK, ResultCode.MISS, ResultCode.FAILED


def name_of(tier: RedisTier, key: CopyKey) -> bytes:
    return tier._names.of(key)


def test_keys_spread_over_all_nodes() -> None:
    cluster = shared_cluster()
    with remote_tier(cluster.url) as tier:
        keys = [key_of(n) for n in range(60)]
        assert put(tier, keys) == [OK] * 60
        counts = [0, 0, 0]
        for key in keys:
            counts[cluster.owner(key_slot(name_of(tier, key)))] += 1
        assert min(counts) > 5
        assert get(tier, keys) == [OK] * 60
        tier.clear()
        assert get(tier, keys) == [MISS] * 60


@pytest.mark.parametrize("way", ["killed", "hung"])
@pytest.mark.parametrize("plain", [False, True], ids=["direct", "plain"])
def test_one_dead_node_costs_only_its_keys(way: str, plain: bool) -> None:
    with Cluster() as cluster, remote_tier(cluster.url, options=options(0.3, plain=plain)) as tier:
        keys = [key_of(n) for n in range(60)]
        assert put(tier, keys) == [OK] * 60
        dead = [cluster.owner(key_slot(name_of(tier, key))) == 1 for key in keys]
        expected = [FAILED if lost else OK for lost in dead]
        if way == "killed":
            cluster.nodes[1].kill()
        else:
            cluster.nodes[1].signal(19)
        with Stopwatch() as watch:
            assert get(tier, keys) == expected
        assert watch.seconds < 3
        with Stopwatch() as watch:
            assert get(tier, keys) == expected
            assert put(tier, [key_of(100 + n) for n in range(9)]).count(OK) > 0
        assert watch.seconds < 1.5
        if way == "killed":
            with pytest.raises(TierError):
                tier.clear()
            cluster.nodes[1].start()
        else:
            cluster.nodes[1].signal(18)
        until_ok(tier, [key_of(200 + n) for n in range(9)])


def test_a_slot_that_is_being_moved_is_asked_at_both_ends() -> None:
    cluster = shared_cluster()
    for plain in (False, True):
        with remote_tier(cluster.url, options=options(plain=plain)) as tier:
            stays, fresh = key_of(1), None
            slot = key_slot(name_of(tier, stays))
            for number in range(2, 400_000):
                if key_slot(name_of(tier, key_of(number))) == slot:
                    fresh = key_of(number)
                    break
            assert fresh is not None
            absent = key_of(number + 1)
            source = cluster.owner(slot)
            target = (source + 1) % 3
            assert put(tier, [stays]) == [OK]
            cluster.nodes[target].command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.ids[source])
            cluster.nodes[source].command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.ids[target])
            try:
                assert get(tier, [stays, fresh, absent]) == [OK, MISS, MISS]
                assert put(tier, [fresh]) == [OK]  # ASK: it lands at the new end
                assert get(tier, [stays, fresh]) == [OK, OK]
                name = name_of(tier, stays)
                port = cluster.nodes[target].port
                assert cluster.nodes[source].command("MIGRATE", "127.0.0.1", port, name, 0, 5000) == b"OK"
                assert get(tier, [stays, fresh]) == [OK, OK]
            finally:
                for node in cluster.nodes:
                    node.command("CLUSTER", "SETSLOT", slot, "NODE", cluster.ids[target])
            assert get(tier, [stays, fresh]) == [OK, OK]  # MOVED
            tier._ledger.clear()
            assert tier.contains([stays, fresh]) == [True, True]
            tier.clear()
        for one, other in ((target, source), (source, target)):  # back, empty
            cluster.nodes[one].command("CLUSTER", "SETSLOT", slot, "NODE", cluster.ids[source])
            cluster.nodes[other].command("CLUSTER", "SETSLOT", slot, "NODE", cluster.ids[source])


def test_an_acl_user_with_the_documented_rules_on_a_cluster() -> None:
    cluster = shared_cluster()
    rules = "~kv1:* resetchannels -@all +get +getex +set +strlen +pexpire +unlink +scan +ping +client|setinfo +asking"
    for node in cluster.nodes:
        node.command("ACL", "SETUSER", "kv", "on", ">right", *rules.split(), "+cluster|slots", "+command")
    with remote_tier(cluster.url.replace("://", "://kv:right@") + "?namespace=kv1") as tier:
        keys = [key_of(n) for n in range(20)]
        assert put(tier, keys) == [OK] * 20
        assert get(tier, keys) == [OK] * 20
        assert tier.raise_epoch() == tier.read_epoch()
        tier.clear()
        assert get(tier, keys) == [MISS] * 20


def test_sentinel_names_the_master() -> None:
    group = shared_sentinel()
    with remote_tier(group.url) as tier:
        assert put(tier, [key_of(1)]) == [OK]
        assert group.master.command("DBSIZE") >= 1
        assert get(tier, [key_of(1)]) == [OK]


@pytest.mark.faults
@pytest.mark.parametrize("plain", [False, True], ids=["direct", "plain"])
def test_failover_gives_misses_and_then_the_new_master(plain: bool) -> None:
    with SentinelGroup() as group, remote_tier(group.url, options=options(0.3, plain=plain)) as tier:
        keys = [key_of(n) for n in range(8)]
        assert put(tier, keys) == [OK] * 8
        time.sleep(1)  # replication
        group.master.kill()
        assert set(get(tier, keys)) == {FAILED}
        took = until_ok(tier, [key_of(100)], seconds=30)
        assert took < 20
        assert get(tier, [key_of(100)]) == [OK]
        assert set(get(tier, keys)) <= {OK, MISS}
        assert group.replica.command("ROLE")[0] == b"master"


@pytest.mark.faults
def test_a_planned_failover_under_load_never_gives_wrong_bytes() -> None:
    with SentinelGroup() as group, remote_tier(group.url, executor=ThreadExecutor(), options=options(0.5)) as tier:
        keys = [key_of(n) for n in range(16)]
        put(tier, keys)
        ordered = threading.Timer(1.0, _fail_over, [group])
        ordered.start()
        end = time.monotonic() + 8
        codes: set[ResultCode] = set()
        while time.monotonic() < end:
            codes |= set(get(tier, keys))  # checks bytes
            codes |= set(put(tier, [key_of(int(time.monotonic() * 1000))]))
        ordered.join()
        assert codes <= {OK, MISS, FAILED}
        until_ok(tier, keys)


def _fail_over(group: SentinelGroup) -> None:
    with group.sentinel.client(unix_socket_path=None, host="127.0.0.1", port=group.sentinel.port) as client:
        client.execute_command("SENTINEL", "FAILOVER", "kv")
