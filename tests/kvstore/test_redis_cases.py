"""The remote tier against public bug reports and hostile values; its keys, times to live, caps and epochs."""

from __future__ import annotations

import io
import logging
import pickle
import time
import tracemalloc

import pytest
import zstandard

from allocator.errors import ConfigError
from kvstore.copy_key import CopyKey
from kvstore.frame.parsing import FrameSpec, build_scatter
from kvstore.frame.specs import plain_specs
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import ResultCode
from tests.kvstore.redis_kit import SIZE_BYTES, get, options, put, remote_tier
from tests.servers import Server, shared_server

OK, MISS, CORRUPT, FAILED = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT, ResultCode.FAILED
SECRET = b"a secret of more than sixteen bytes"


def name_of(tier: RedisTier, key: CopyKey) -> bytes:
    return tier._names.of(key)


def frame_of(key: CopyKey, secret: bytes | None = None, size: int = SIZE_BYTES) -> bytes:
    return b"".join(build_scatter(plain_specs(key, size), [payload_of(key, size)], secret=secret))


# what others write ------------------------------------------------------------------------------------------


def test_case_012_a_copy_of_another_dtype_is_a_miss() -> None:
    def specs(dtype: str):  # type: ignore[no-untyped-def]
        return lambda key, size: FrameSpec(key, 16, 8, 8, dtype, size)

    server, namespace = shared_server(), "?namespace=dtypes"
    with remote_tier(server.unix_url + namespace, spec_of=specs("bfloat16")) as writer:
        assert put(writer, [key_of(1)]) == [OK]
    for dtype in ("float8_e4m3fn", "float16", "int4"):
        with remote_tier(server.unix_url + namespace, spec_of=specs(dtype)) as reader:
            assert get(reader, [key_of(1)])[0] in (CORRUPT, MISS)
        with remote_tier(server.unix_url + namespace, spec_of=specs("bfloat16")) as writer:
            put(writer, [key_of(1)])
            assert get(writer, [key_of(1)]) == [OK]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksum", "signed"])
def test_case_019_hostile_values_are_misses_and_cost_no_memory(secret: bytes | None) -> None:
    server, key, other = shared_server(), key_of(1), key_of(2)
    good = frame_of(key, secret)
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    hostile = {
        "pickle": pickle.dumps(print),
        "bomb": bomb,
        "another block's frame": frame_of(other, secret),
        "nothing": b"",
        "one byte": b"\x00",
        "huge": bytes(3_000_000),
        "huge frame": good + bytes(3_000_000),
        "no header": bytes(len(good)),
    }
    for place in (8, 10, 12, 16, 48, 64, 80, 96, 104, 112, 120, 128, 136, 140, 144, len(good) - SIZE_BYTES - 1, -1):
        bad = bytearray(good)
        bad[place] ^= 0xFF
        hostile[f"byte {place}"] = bytes(bad)
    if secret is not None:
        hostile["unsigned"] = frame_of(key)
        hostile["signed by another"] = frame_of(key, b"another secret of some bytes")
    with remote_tier(server.unix_url, secret=secret) as tier, server.client() as client:
        get(tier, [key])
        for what, value in hostile.items():
            client.set(name_of(tier, key), value)
            tracemalloc.start()
            code = get(tier, [key, other])[0]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert code in (CORRUPT, MISS), what
            assert peak < 1_000_000, what
            assert what in ("unsigned",) or not client.exists(name_of(tier, key)), f"{what} is still there"
        client.set(name_of(tier, key), good)
        assert get(tier, [key]) == [OK]
        assert sum(count for cause, count in tier.counters().items() if cause.startswith("fault_")) >= len(hostile) - 1


def test_without_the_secret_signed_copies_are_misses_that_stay() -> None:
    server, namespace = shared_server(), "?namespace=signed"
    with remote_tier(server.unix_url + namespace, secret=SECRET) as tier:
        assert put(tier, [key_of(1)]) == [OK]
        with remote_tier(server.unix_url + namespace) as stranger:
            assert get(stranger, [key_of(1)]) == [MISS]
            assert stranger.counters()["fault_no_secret"] == 1
        assert get(tier, [key_of(1)]) == [OK]


def test_case_041_one_value_a_block_and_broken_ones_go() -> None:
    server = shared_server()
    with remote_tier(server.unix_url) as tier, server.client() as client:
        keys = [key_of(n) for n in range(6)]
        put(tier, keys)
        names = [name_of(tier, key) for key in keys]
        value = client.get(names[0])
        client.set(names[0], value[:-1])
        client.set(names[1], b"")
        client.delete(names[2])
        client.delete(names[3])
        client.hset(names[3], "a", "b")
        client.delete(names[4])
        client.rpush(names[4], *[b"x" * 100] * 50)
        assert get(tier, keys) == [CORRUPT, CORRUPT, MISS, CORRUPT, CORRUPT, OK]
        assert [client.exists(name) for name in names] == [0, 0, 0, 0, 0, 1]
        assert tier.contains(keys) == [False] * 5 + [True]


def test_a_huge_name_in_the_namespace_does_not_block_a_reset() -> None:
    patient = options(timeout_seconds=5.0)
    with Server() as server, remote_tier(server.unix_url, options=patient) as tier, server.client() as client:
        assert put(tier, [key_of(1)]) == [OK]
        client.set(f"{tier.address.namespace}:" + "x" * 3_000_000, "x")
        tracemalloc.start()
        tier.clear()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000
        assert get(tier, [key_of(1)]) == [MISS]


def test_every_truncation_is_a_miss() -> None:
    server, key, size = shared_server(), key_of(1), 40
    whole = frame_of(key, size=size)
    with remote_tier(server.unix_url) as tier, server.client() as client:
        for length in range(len(whole)):
            client.set(name_of(tier, key), whole[:length])
            assert get(tier, [key], size) == [CORRUPT], length
        client.set(name_of(tier, key), whole)
        assert get(tier, [key], size) == [OK]


def test_case_033_another_tenants_copies_are_unseen() -> None:
    with remote_tier(shared_server().unix_url) as tier:
        ours = [key_of(n) for n in range(4)]
        theirs = [key_of(n, root=b"\x09" * 32) for n in range(4)]
        nobodys = [key_of(n, root=b"\x0a" * 32) for n in range(4)]
        put(tier, ours)
        counts = []
        for keys in (theirs, nobodys):
            before = tier.counters()
            assert tier.contains(keys) == [False] * 4
            assert get(tier, keys) == [MISS] * 4
            after = tier.counters()
            counts.append({cause: after[cause] - before.get(cause, 0) for cause in after})
        assert counts[0] == counts[1]
        assert get(tier, ours) == [OK] * 4


# times to live ----------------------------------------------------------------------------------------------


def test_case_139_every_key_expires_hits_renew_and_a_purge_leaves_nothing() -> None:
    with Server() as server, remote_tier(server.unix_url, ttl_seconds=1000) as tier, server.client() as client:
        keys = [key_of(n) for n in range(5)]
        tier.describe_root(keys[0].root, {"model": "toy", "tenant": "a"})
        put(tier, keys)
        tier.read_epoch()
        names = list(client.scan_iter("*"))
        assert len(names) == 5 + 2  # one a block; the epoch and the root's words beside them
        assert all(client.pttl(name) > 0 for name in names)
        assert all(client.pttl(name_of(tier, key)) <= 1_000_000 for key in keys)
        assert client.get(tier._names.root(keys[0].root)) == b'{"model": "toy", "tenant": "a"}'
        client.pexpire(name_of(tier, keys[0]), 10_000)
        assert get(tier, keys[:1]) == [OK]
        assert client.pttl(name_of(tier, keys[0])) > 900_000
        tier.clear()
        assert sorted(client.scan_iter("*")) == sorted(name for name in names if b":epoch" in name or b":root:" in name)


def test_a_touch_renews_a_time_to_live_that_has_run_down() -> None:
    now = [1000.0]
    server = shared_server()
    settings = options(clock=lambda: now[0])
    with remote_tier(server.unix_url, ttl_seconds=800, options=settings) as tier, server.client() as client:
        put(tier, [key_of(1)])
        client.pexpire(name_of(tier, key_of(1)), 5_000)
        tier.touch([key_of(1)])
        assert client.pttl(name_of(tier, key_of(1))) <= 5_000  # set just now, as far as the tier knows: no traffic
        now[0] += 200
        tier.touch([key_of(1)])
        assert client.pttl(name_of(tier, key_of(1))) > 700_000


def test_an_expired_copy_is_a_miss_and_not_believed_in() -> None:
    now = [1000.0]
    server, settings = shared_server(), options(clock=lambda: now[0])
    with remote_tier(server.unix_url, ttl_seconds=100, options=settings) as tier, server.client() as client:
        put(tier, [key_of(1)])
        assert tier.contains([key_of(1)]) == [True]
        assert client.pexpire(name_of(tier, key_of(1)), 0)
        assert tier.contains([key_of(1)]) == [True], "as far as anybody here can know"
        now[0] += 101
        assert tier.contains([key_of(1)]) == [False]
        assert get(tier, [key_of(1)]) == [MISS]
        assert put(tier, [key_of(1)]) == [OK]
        assert get(tier, [key_of(1)]) == [OK]


def test_case_108_wall_time_may_jump(monkeypatch: pytest.MonkeyPatch) -> None:
    with remote_tier(shared_server().unix_url) as tier:
        put(tier, [key_of(1)])
        true_time = time.time
        for jump in (365 * 86400, -365 * 86400):
            monkeypatch.setattr(time, "time", lambda jump=jump: true_time() + jump)
            assert tier.contains([key_of(1)]) == [True]
            assert get(tier, [key_of(1)]) == [OK]
            assert put(tier, [key_of(2)]) == [OK]
            tier.check_invariants()
        monkeypatch.undo()
        assert get(tier, [key_of(1), key_of(2)]) == [OK, OK]


# what others do, and what is believed -----------------------------------------------------------------------


def test_what_another_process_stored_is_found_after_asking() -> None:
    server, namespace = shared_server(), "?namespace=together"
    with remote_tier(server.unix_url + namespace) as one, remote_tier(server.unix_url + namespace) as two:
        put(one, [key_of(1)])
        assert two.contains([key_of(1), key_of(2)]) == [True, False]
        assert get(two, [key_of(1)]) == [OK]
        one.delete([key_of(1)])
        assert get(two, [key_of(1)]) == [MISS]
        assert two.contains([key_of(1)]) == [False]
        assert two.pending_count([key_of(1), key_of(2)]) == 0


def test_the_epoch_is_shared_raised_and_never_comes_back() -> None:
    server, namespace = shared_server(), "?namespace=epochs"
    with remote_tier(server.unix_url + namespace) as one, remote_tier(server.unix_url + namespace) as two:
        first = one.read_epoch()
        assert two.read_epoch() == first
        second = two.raise_epoch()
        assert second > first
        assert one.read_epoch() == second
        server.command("DEL", "epochs:epoch")  # evicted
        assert one.read_epoch() not in (first, second)
        server.command("SET", "epochs:epoch", "no number")
        assert one.raise_epoch() == two.read_epoch()


def test_the_cap_holds_across_a_restart() -> None:
    server, namespace, cap = shared_server(), "?namespace=capped", 40_000

    def stored_bytes() -> int:
        with server.client() as client:
            return sum(client.strlen(name) for name in client.scan_iter("capped:*"))

    for life in range(3):
        with remote_tier(server.unix_url + namespace, capacity_bytes=cap) as tier:
            for number in range(30):
                key = key_of(100 * life + number)
                assert put(tier, [key]) == [OK]
                assert tier.used_bytes <= cap
                assert stored_bytes() <= cap
            assert tier.used_bytes > cap * 0.8
            assert get(tier, [key]) == [OK]
            tier.check_invariants()
    with remote_tier(server.unix_url + namespace, capacity_bytes=cap // 2) as tier:
        put(tier, [key_of(9999)])
        assert stored_bytes() <= cap // 2


# access -----------------------------------------------------------------------------------------------------


def test_an_acl_user_with_the_documented_rules_can_do_everything() -> None:
    with Server() as server:
        rules = "~kv1:* resetchannels -@all +get +getex +set +strlen +pexpire +unlink +scan +ping +client|setinfo"
        server.command("ACL", "SETUSER", "kv", "on", ">pass word", *rules.split())
        with remote_tier(f"redis://kv:pass%20word@127.0.0.1:{server.port}?namespace=kv1") as tier:
            keys = [key_of(n) for n in range(3)]
            assert tier.contains(keys) == [False] * 3
            assert put(tier, keys) == [OK] * 3
            assert get(tier, keys) == [OK] * 3
            assert tier.raise_epoch() == tier.read_epoch()
            tier.touch(keys)
            tier.clear()
            assert get(tier, keys) == [MISS] * 3
            assert not [cause for cause in tier.counters() if cause.startswith(("refused", "down"))]
        with remote_tier(f"redis://kv:pass%20word@127.0.0.1:{server.port}?namespace=other") as tier:
            assert put(tier, keys) == [FAILED] * 3
            assert tier.counters()["refused_NOPERM"] == 3


def test_passwords_and_secrets_are_nowhere_to_be_read(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    url = "redis://user:hunter2@127.0.0.1:1?namespace=x"
    text = io.StringIO()
    with remote_tier(url, secret=b"hunter2hunter2hunter2") as tier:
        put(tier, [key_of(1)])
        for one in (tier, tier.address, tier.links, tier.space, tier.counters(), tier.submit_get([])):
            print(repr(one), str(one), file=text)
    for bad in ("redis://u:hunter2@h:99999", "http://u:hunter2@h", "redis://u:hunter2@h?password=hunter2"):
        with pytest.raises(ConfigError) as error:
            remote_tier(bad).__enter__()
        text.write(str(error.value))
    assert "hunter2" not in text.getvalue() + caplog.text


def test_the_options_of_a_tier_are_checked() -> None:
    for settings in ({"ttl_seconds": 0}, {"secret": b"short"}, {"ttl_seconds": float("nan")}):
        with pytest.raises(ConfigError):
            remote_tier("redis://h", **settings).__enter__()  # type: ignore[arg-type]
    with remote_tier(shared_server().unix_url) as tier:
        assert tier.submit_put([(key_of(1), [b""])]).done
        assert tier.poll()[0].results == (FAILED,)
