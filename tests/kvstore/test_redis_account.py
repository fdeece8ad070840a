"""What a remote tier knows and counts while its server is full, only read, hung, or renewed by somebody else."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.clock import ManualClock
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.driving import check_bytes, run_prompt
from tests.kvstore.redis_kit import get, options, put, remote_tier, until_ok
from tests.kvstore.writing_kit import prompt, settle
from tests.servers import Server, shared_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16


def bytes_there(server: Server) -> int:
    """What the copies on a server take, as a tier counts them."""
    with server.client() as client:
        names = [name for name in client.scan_iter(count=1000) if client.type(name) == b"string"]
        return sum(client.strlen(name) + 256 for name in names if not name.endswith(b":epoch"))


def test_a_store_that_starts_on_a_full_server_reuses_what_is_there(make_store: Callable[..., KVStore]) -> None:
    """The epoch is read although it cannot be written."""
    with Server("maxmemory-policy noeviction") as server:
        settings = {"redis_url": server.unix_url, "load_always": True, "io_threads": "thread"}
        first = make_store(blocks=16, spill_policy="everything", **settings)
        run_prompt(first, "a", prompt(1, 8))
        first.finish("a")
        settle(first)
        server.command("CONFIG", "SET", "maxmemory", "1")
        second = make_store(blocks=16, **settings)
        assert run_prompt(second, "b", prompt(1, 8)) == 8 * B
        check_bytes(second, "b", prompt(1, 8))
        server.command("CONFIG", "SET", "maxmemory", "0")


def test_a_copy_that_others_keep_alive_is_found_beyond_our_own_time_to_live() -> None:
    clock = ManualClock()
    with remote_tier(shared_server().unix_url, options=options(clock=clock), ttl_seconds=20.0) as tier:
        assert put(tier, [key_of(1)]) == [ResultCode.OK]
        other = RedisTier(tier.address, options=options(), ttl_seconds=1000.0)
        assert get(other, [key_of(1)]) == [ResultCode.OK]
        other.close()
        clock.advance(21.0)
        tier.contains([key_of(1)])
        assert tier.contains([key_of(1)]) == [True]


def test_what_a_hung_server_holds_stays_counted() -> None:
    """With a cap, a lookup that nobody answers says nothing about what is there."""
    clock = ManualClock()
    settings = {"options": options(0.1, clock=clock), "capacity_bytes": 30_000}
    with Server() as server, remote_tier(server.unix_url, **settings) as tier:
        keys = [key_of(number) for number in range(10)]
        assert put(tier, keys) == [ResultCode.OK] * 10
        held = tier.used_bytes
        clock.advance(61.0)
        with server.hung():
            tier.contains(keys)
        assert tier.used_bytes == held
        clock.advance(5.0)
        until_ok(tier, [key_of(number) for number in range(100, 110)])
        assert bytes_there(server) <= 30_000
        tier.check_invariants()


def test_puts_that_a_hung_server_takes_later_are_counted() -> None:
    settings = {"options": options(0.1, pause_seconds=0.01), "capacity_bytes": 45_000}
    with Server() as server, remote_tier(server.unix_url, **settings) as tier:
        until_ok(tier, [key_of(0)])
        came = 0
        for number in range(1, 7):
            with server.hung():
                put(tier, [key_of(100 * number + one) for one in range(8)])
            time.sleep(0.1)
            came += bytes_there(server) > 10_000
            assert bytes_there(server) <= tier.used_bytes <= 45_000
            tier.check_invariants()
            until_ok(tier, [key_of(1)])
        assert came, "the server took none of them"
        keys = [key_of(7000 + one) for one in range(10)]
        until_ok(tier, keys)
        assert get(tier, keys) == [ResultCode.OK] * 10
        assert bytes_there(server) <= 45_000


def test_what_a_server_refuses_to_drop_stays_counted_and_goes_later() -> None:
    """Found by reading: a corrupt or deleted copy was forgotten at once, and the cap no longer knew of its bytes."""
    with Server() as server, remote_tier(server.unix_url, capacity_bytes=30_000) as tier:
        keys = [key_of(number) for number in range(10)]
        assert put(tier, keys) == [ResultCode.OK] * 10
        held = bytes_there(server)
        with server.client() as client:
            name = next(client.scan_iter(f"*{keys[0].hash.hex()}"))
            client.setrange(name, client.strlen(name) - 9, b"\0\1\2\3\4\5\6\7\x08")
        server.command("ACL", "SETUSER", "default", "-unlink")
        assert get(tier, keys[:1]) == [ResultCode.CORRUPT]
        assert tier.delete(keys[1:3]) == 2
        assert put(tier, [key_of(100)]) == [ResultCode.OK], "by another thread's time the delete was refused"
        tier.check_invariants()
        assert tier.used_bytes == bytes_there(server) > held
        assert get(tier, keys[3:4]) == [ResultCode.OK]
        server.command("ACL", "SETUSER", "default", "+unlink")
        fresh = [key_of(number) for number in range(200, 212)]
        assert put(tier, fresh) == [ResultCode.OK] * 12
        assert bytes_there(server) <= 30_000
        assert tier.used_bytes == bytes_there(server)
        assert not any(tier.contains(keys[:3]))
        tier.check_invariants()


def test_a_url_that_names_a_replica_reads_and_says_that_it_cannot_write() -> None:
    """A standalone URL on a read-only replica: what is there is served (without new times to live), puts fail."""
    with Server() as master, Server() as replica, remote_tier(f"{master.unix_url}?namespace=two") as writer:
        assert put(writer, [key_of(1), key_of(2)]) == [ResultCode.OK] * 2
        replica.command("REPLICAOF", "127.0.0.1", master.port)
        deadline = time.monotonic() + 30
        while replica.command("DBSIZE") < master.command("DBSIZE"):
            assert time.monotonic() < deadline, "the replica has not caught up"
            time.sleep(0.05)
        with remote_tier(f"{replica.unix_url}?namespace=two") as tier:
            assert get(tier, [key_of(1), key_of(2), key_of(3)]) == [ResultCode.OK] * 2 + [ResultCode.MISS]
            assert put(tier, [key_of(4)]) == [ResultCode.FAILED]
            assert get(tier, [key_of(1)]) == [ResultCode.OK], "a refused put says nothing of reads"
            assert tier.counters()["refused_READONLY"] > 0
            tier.check_invariants()
