"""Tenants: quotas, fair eviction, what a foreign prefix looks like; and what an operator may do."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocator.errors import UsageError
from kvstore.daemon import Daemon
from kvstore.daemon.forms import Form
from kvstore.daemon.protocol import PLACE, Place
from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import ThreadExecutor
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import get, put, settings, tier_at, until
from tests.kvstore.driving import HeldExecutor

OK, FULL, MISS = ResultCode.OK, ResultCode.FULL, ResultCode.MISS
SLOT_BYTES = 4352  # a frame of 4 KiB and its header, as a slot
ALICE, BOB = b"\x0a" * 32, b"\x0b" * 32


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    disk = DiskTier(tmp_path / "disk", 32 << 20, ThreadExecutor("disk"))
    daemon = Daemon(
        settings(
            tmp_path,
            segment_bytes=1 << 20,
        ),
        [disk],
    )
    daemon.start()
    yield daemon
    daemon.stop()
    for arena in daemon.core.arenas.values():
        arena.check()


def tenants(daemon: Daemon) -> dict[str, dict[str, int]]:
    return daemon.stats()["tenants"]  # type: ignore[no-any-return]


def test_a_quota_is_never_exceeded_and_its_tenants_own_oldest_copies_give_way(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path, segment_bytes=1 << 20, quotas={"alice": 40 * SLOT_BYTES}))
    daemon.start()
    alice = tier_at(daemon.settings.socket_path, tenant="alice")
    bob = tier_at(daemon.settings.socket_path, tenant="bob")
    theirs = [key_of(n, root=BOB) for n in range(30)]
    assert put(bob, theirs) == [OK] * 30
    own = [key_of(n, root=ALICE) for n in range(100)]
    for key in own:
        assert put(alice, [key]) == [OK]
        assert tenants(daemon)["alice"]["used_bytes"] <= 40 * SLOT_BYTES
    arena = daemon.core.arenas[""]
    assert [arena.find(key) is not None for key in own] == [False] * 60 + [True] * 40
    assert [arena.find(key) is not None for key in theirs] == [True] * 30
    alice.pin(own[60:])
    assert put(alice, [key_of(200, root=ALICE)]) == [FULL]
    assert tenants(daemon)["alice"]["counts"]["quota_refused"] == 1
    daemon.admin.set_quota("alice", 0)
    assert put(alice, [key_of(200, root=ALICE)]) == [OK]
    for tier in (alice, bob):
        tier.close()
    daemon.stop()


def test_who_is_over_the_fair_share_gives_way_first(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path, segment_bytes=1 << 20))
    daemon.start()
    engine = tier_at(daemon.settings.socket_path, tenant="small")
    small = [key_of(n, root=ALICE) for n in range(50)]
    assert put(engine, small) == [OK] * 50
    engine._tenant = "large"  # one engine that serves two tenants, in the same segments
    total = (4 << 20) // SLOT_BYTES
    for at in range(0, 2 * total, 100):
        put(engine, [key_of(n, root=BOB) for n in range(at, at + 100)])
    assert daemon.stats()["arenas"]["own"]["counts"]["evicted"] > total // 2
    assert engine.contains(small) == [True] * 50, "the small tenant's older copies stay"
    engine.close()
    daemon.stop()


def test_a_foreign_prefix_takes_the_time_of_a_miss(daemon: Daemon) -> None:
    alice = tier_at(daemon.settings.socket_path, tenant="bob")
    stranger = tier_at(daemon.settings.socket_path, tenant="eve")
    stored = [key_of(n, root=BOB) for n in range(16)]
    own = [key_of(500 + n, root=ALICE) for n in range(16)]
    put(alice, stored)
    put(stranger, own)
    foreign = [key.hash for key in stored]
    absent = [key_of(900 + n).hash for n in range(16)]

    def ratio() -> float:
        took: dict[str, list[float]] = {"foreign": [], "absent": []}
        for number in range(1500):
            for name, hashes in (("foreign", foreign), ("absent", absent))[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                assert stranger.leading_run(own[0], hashes) == 0
                took[name].append(time.perf_counter() - started)
        return statistics.median(took["foreign"]) / statistics.median(took["absent"])

    ratios: list[float] = []
    while not ratios or not 0.9 < ratios[-1] < 1.1:  # a busy machine may spoil one; a leak spoils all
        ratios.append(ratio())
        assert len(ratios) < 5, ratios
    for tier in (alice, stranger):
        tier.close()


def test_an_operator_flushes_pins_and_drops(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path, tenant="bob")
    bobs, others = [key_of(n, root=BOB) for n in range(20)], [key_of(n, root=ALICE) for n in range(5)]
    assert put(tier, bobs) == [OK] * 20
    assert put(tier, others) == [OK] * 5
    until(lambda: daemon.stats()["tiers"]["disk"]["counts"].get("spilled") == 25)

    pinned = daemon.admin.pin(bobs, seconds=0.3, budget_bytes=10 * SLOT_BYTES, name="prefix")
    assert (pinned["copies"], pinned["pinned_bytes"]) == (10, 10 * SLOT_BYTES)
    assert tier.delete(bobs[:2]) <= 2
    assert daemon.core.arenas[""].find(bobs[0]) is not None, "pinned: stays"
    assert daemon.admin.unpin("prefix")
    assert not daemon.admin.unpin("prefix")
    daemon.admin.pin(others, seconds=0.1, budget_bytes=1 << 20, name="others")
    entry = daemon.core.arenas[""].find(others[0])
    assert entry is not None
    until(lambda: entry.pin_count == 0, what="a pin ends at its time")

    assert daemon.admin.flush(BOB) == 20
    assert tier.contains(bobs) == [False] * 20, "gone from the disk too"
    assert get(tier, others) == [OK] * 5
    assert daemon.admin.flush_all() == 5
    assert tier.contains(others) == [False] * 5

    put(tier, bobs)
    until(lambda: daemon.stats()["tiers"]["disk"]["queues"]["spill"] == 0)
    daemon.admin.drop_tier("disk")
    assert daemon.stats()["tiers"]["disk"]["state"] == "dropped"
    assert get(tier, bobs) == [OK] * 20
    with pytest.raises(UsageError, match="expected one of disk"):
        daemon.admin.drop_tier("floppy")
    with pytest.raises(UsageError, match="quota"):
        daemon.admin.set_quota("alice", -1)
    tier.close()


def test_a_reload_keeps_quotas_that_an_operator_has_set(daemon: Daemon) -> None:
    """Found by a newcomer: SIGHUP and `reload` took them away without a word, where the handbook says that they end
    with the daemon."""
    tier = tier_at(daemon.settings.socket_path)
    put(tier, [key_of(1)])
    admin, quotas = daemon.admin, daemon.core.quotas
    admin.reload({"carol": 5, "dave": 6})
    admin.set_quota("alice", 4096)
    admin.set_quota("dave", 8192)
    admin.reload({"carol": 5})
    assert {name: quota for name, quota in quotas.items() if quota} == {"carol": 5, "alice": 4096, "dave": 8192}
    assert daemon.core.arenas[""].tenants["alice"].quota_bytes == 4096
    admin.reload({"alice": 7})
    assert {name: quota for name, quota in quotas.items() if quota} == {"alice": 7, "dave": 8192}, "the settings' word"
    assert daemon.core.arenas[""].tenants["alice"].quota_bytes == 7
    admin.reload({})
    assert {name: quota for name, quota in quotas.items() if quota} == {"dave": 8192}, "it was the settings' again"
    admin.set_quota("dave", 0)
    admin.reload({})
    assert not any(quotas.values())
    tier.close()


def test_what_left_the_arena_comes_back_from_the_disk(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path, tenant="bob", fetch_seconds=5)
    total = (4 << 20) // SLOT_BYTES
    keys = [key_of(n, root=BOB) for n in range(2 * total)]
    for at in range(0, len(keys), 64):
        assert put(tier, keys[at : at + 64])[0] is OK
        until(lambda: daemon.stats()["tiers"]["disk"]["queues"]["spill"] == 0)
    arena = daemon.core.arenas[""]
    assert arena.find(keys[0]) is None
    assert tier.leading_run(keys[0], [key.hash for key in keys]) == len(keys)
    assert get(tier, keys[:32]) == [OK] * 32
    assert daemon.stats()["tiers"]["disk"]["counts"]["fetched"] == 32
    assert arena.find(keys[0]) is not None
    tier.close()


def test_a_domain_below_its_share_gets_segments_from_the_largest(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path, segment_bytes=256 << 10, domains={"team": [4_000_000]}))
    daemon.start()
    tier = tier_at(daemon.settings.socket_path)
    count = (4 << 20) // SLOT_BYTES
    core = daemon.core

    def store_own() -> bool:
        for at in range(0, count + 100, 100):
            put(tier, [key_of(n) for n in range(at, at + 100)])
        return len(core.arenas[""].segments) == 16

    until(store_own, what="one domain alone may have all")
    holder = core.join("of the team", 4_000_000, 0, -1)
    form = Form(key_of(0).with_hash(bytes(32)), 1, 1, 0, "bytes")
    hashes = [key_of(n).hash for n in range(200)]

    def store() -> int:
        """Store what is not there yet; the domain's segments."""
        for hash in hashes:
            place = core.reserve(holder, form, (hash,), (form.template.root,), [4352])
            (kind, _, _, lease) = next(PLACE.iter_unpack(place))
            if kind == Place.GRANTED:
                core.publish(holder, [lease])
        return len(core.arenas["team"].segments)

    until(lambda: store() >= 3)
    stats = daemon.stats()
    assert stats["counts"]["segments_shed"] >= 3
    assert stats["budget"]["reserved_bytes"] <= 4 << 20
    assert len(core.arenas[""].segments) + len(core.arenas["team"].segments) <= 16
    kept = [key_of(n) for n in range(count + 100)]
    assert OK in get(tier, kept[-50:])
    core.leave(holder, is_dead=True)
    tier.close()
    daemon.stop()
    for arena in core.arenas.values():
        arena.check()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_clear_drops_nothing_of_other_roots_that_is_on_its_way_down(tmp_path: Path, is_own: bool) -> None:
    """Found here: whoever cleared, of any domain, had what all others were just writing to the disk dropped there."""
    held = HeldExecutor()
    disk = DiskTier(tmp_path / "disk", 32 << 20, held)
    daemon = Daemon(settings(tmp_path, segment_bytes=1 << 20), [disk])
    daemon.start()
    tier, keys = tier_at(daemon.settings.socket_path), [key_of(n, root=root) for root in (ALICE, BOB) for n in range(3)]
    assert put(tier, keys) == [OK] * 6
    lower = daemon.core.lowers[0]
    until(lambda: held.tasks)
    down = set(lower._spilling)
    assert down
    root = next(iter(down)).root if is_own else b"\x0c" * 32
    clearing = threading.Thread(target=lower.clear, args=({root},), kwargs={"all_allowed": False})
    clearing.start()
    if is_own:
        until(lambda: any(lower._spilling.values()), what="they are marked")
    else:
        clearing.join()
    while daemon.stats()["tiers"]["disk"]["queues"]["spill"]:
        held.run()
        time.sleep(0.002)
    clearing.join()
    until(lambda: disk.contains(list(down)) == [key.root != root for key in down])
    tier.close()
    daemon.stop()


def test_only_what_is_used_again_is_written_below(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "disk", 32 << 20, ThreadExecutor("disk"))
    daemon = Daemon(settings(tmp_path, segment_bytes=1 << 20, spill_policy="reuse"), [disk])
    daemon.start()
    first, second = (tier_at(daemon.settings.socket_path, name=name) for name in ("first", "second"))
    read, touched, again, once = ([key_of(100 * part + n) for n in range(5)] for part in range(4))
    assert put(first, [*read, *touched, *again, *once]) == [OK] * 20
    assert get(second, read) == [OK] * 5
    assert get(second, read) == [OK] * 5
    second.touch(touched)
    assert put(second, again) == [OK] * 5, "computed by another engine, too"
    until(lambda: daemon.stats()["tiers"]["disk"]["counts"].get("spilled") == 15)
    assert [all(disk.contains(keys)) for keys in (read, touched, again, once)] == [True, True, True, False]
    assert disk.contains(once) == [False] * 5
    for tier in (first, second):
        tier.close()
    daemon.stop()
