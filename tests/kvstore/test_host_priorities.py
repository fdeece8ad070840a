"""Priorities and tenants' quotas of copies in the store's own memory: alone, and under a store that spills into it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from allocator.block_marks import PLAIN, Steps, steps_of
from kvstore import CopyKey, HostTier, Identity, KVStore, KVStoreConfig, PutItem, ResultCode, Retention
from kvstore.host_tier import index
from kvstore.testing import ManualClock
from tests.kvstore.conftest import full_geometry

B = 16
SIZE = 1024
GEOMETRY = full_geometry()
SLOT_BYTES = -(-GEOMETRY.full_slot_bytes(0) // 64) * 64


def key(number: int, codec: str = "raw", root: int = 7) -> CopyKey:
    return CopyKey(bytes([root]) * 32, 0, number.to_bytes(32, "big"), codec, True, (0, 2), (0, 4))


def put(tier: HostTier, one: CopyKey, steps: Steps = PLAIN, size: int = SIZE) -> ResultCode:
    tier.submit_put([PutItem(one, [np.zeros(size, np.uint8)], None, steps)])
    (done,) = tier.poll()
    tier.check_invariants()
    return done.results[0]


def held(tier: HostTier, *numbers: int) -> list[int]:
    return [
        number for number, there in zip(numbers, tier.contains([key(one) for one in numbers]), strict=True) if there
    ]


def test_low_goes_first_then_the_usual_then_high_and_among_equals_the_oldest() -> None:
    tier = HostTier(6 * SIZE, slot_bytes=(SIZE,))
    for number, priority in enumerate((80, 35, 10, 35, 10, 80)):
        put(tier, key(number), steps_of(priority))
    gone = []
    for number in range(10, 16):
        put(tier, key(number), steps_of(90))
        gone += [one for one in range(6) if one not in gone and not tier.contains([key(one)])[0]]
    assert gone == [2, 4, 1, 3, 0, 5]


def test_a_priority_ends_and_the_copy_has_the_age_it_had() -> None:
    tier = HostTier(3 * SIZE, slot_bytes=(SIZE,))
    put(tier, key(1), steps_of(80, 10.0))
    put(tier, key(2))
    put(tier, key(3))
    tier.expire(9.0)
    put(tier, key(4))
    assert held(tier, 1, 2, 3, 4) == [1, 3, 4]
    tier.expire(10.0)
    put(tier, key(5))
    assert held(tier, 1, 3, 4, 5) == [3, 4, 5]


def test_the_most_demanding_use_counts_and_a_usual_one_lifts_a_low_one() -> None:
    tier = HostTier(3 * SIZE, slot_bytes=(SIZE,))
    put(tier, key(1), steps_of(80))
    put(tier, key(2), steps_of(5))
    put(tier, key(3))
    assert tier.marked_count == 2
    tier.keep([key(1), key(2), key(99)], PLAIN)
    assert tier.marked_count == 1
    put(tier, key(1), steps_of(5))  # there already
    put(tier, key(4))
    assert held(tier, 1, 2, 3, 4) == [1, 3, 4]
    tier.keep([key(3)], steps_of(90))
    put(tier, key(5))
    put(tier, key(6))
    assert held(tier, 1, 3, 5, 6) == [1, 3, 6]


def test_an_extent_of_another_size_is_not_emptied_while_it_holds_what_is_worth_more() -> None:
    tier = HostTier(16 * 3072, slot_bytes=(3072, 1024))
    for number in range(16):
        put(tier, key(number), steps_of(80, 100.0) if number % 4 == 0 else PLAIN, 3072)
    for number in range(100, 180):
        put(tier, key(number, "int4"))
    assert held(tier, *range(0, 16, 4)) == [0, 4, 8, 12]
    assert not held(tier, 1, 2, 3)
    tier.expire(100.0)
    for number in range(200, 300):
        put(tier, key(number, "int4"))
    assert not held(tier, *range(16))


def test_a_tenant_makes_room_among_its_own_copies_and_is_refused_what_it_may_not_have() -> None:
    tier = HostTier(10 * SIZE, slot_bytes=(SIZE,))
    tier.set_quota("greedy", 3 * SIZE)
    tier.describe_root(b"\x01" * 32, {"tenant": "greedy"})
    tier.describe_root(b"\x02" * 32, {"tenant": "modest"})
    for number in range(5):
        assert put(tier, key(number, root=2)) is ResultCode.OK
    for number in range(50):
        assert put(tier, key(number, root=1), steps_of(100)) is ResultCode.OK
        assert tier.tenant_bytes("greedy") <= 3 * SIZE
    assert all(tier.contains([key(number, root=2) for number in range(5)]))
    assert tier.contains([key(number, root=1) for number in range(46, 50)]) == [False, True, True, True]
    assert put(tier, key(99, root=1), size=4 * SIZE) is ResultCode.FULL
    for number in range(60, 63):
        put(tier, key(number, root=1))
    tier.pin([key(number, root=1) for number in range(60, 63)])
    assert put(tier, key(70, root=1)) is ResultCode.FULL
    assert tier.counters()["quota_refused"] == 2
    tier.set_quota("greedy", 0)
    assert put(tier, key(70, root=1)) is ResultCode.OK
    tier.clear()
    assert (tier.tenant_bytes("greedy"), tier.marked_count, tier.used_bytes) == (0, 0, 0)


def test_whose_a_root_is_is_known_of_so_many_and_the_longest_undescribed_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_ROOTS_KNOWN", 3)
    tier = HostTier(10 * SIZE, slot_bytes=(SIZE,))
    tier.set_quota("one", 8 * SIZE)
    for root in (1, 2, 3, 1, 4, 5):
        tier.describe_root(bytes([root]) * 32, {"tenant": "one"})
    assert len(tier._index._tenant_of) == 3
    for root in range(1, 6):
        put(tier, key(root, root=root))
    assert tier.tenant_bytes("one") == 3 * SIZE, "of roots 1, 4 and 5"


@pytest.mark.parametrize("seed", range(6))
def test_what_goes_is_always_of_the_lowest_priority(seed: int) -> None:
    """Against a plain list: copies of one size, priorities that end, uses and pins, in any order."""
    numbers = random.Random(seed)
    tier = HostTier(20 * SIZE, slot_bytes=(SIZE,))
    wanted: dict[int, list[tuple[int, float]]] = {}
    pinned: set[int] = set()
    now = 0.0
    for number in range(400):
        choice = numbers.random()
        there = held(tier, *wanted)
        if choice < 0.5:
            ranks = {one: _priority(wanted[one], now) for one in there if one not in pinned}
            steps = numbers.choice((PLAIN, steps_of(70), steps_of(90, now + 20), steps_of(5)))
            put(tier, key(number), steps)
            wanted[number] = list(steps)
            gone = [one for one in ranks if not tier.contains([key(one)])[0]]
            assert len(gone) == (len(there) == 20)
            assert all(ranks[one] == min(ranks.values()) for one in gone)
        elif choice < 0.7 and there:
            one = numbers.choice(there)
            tier.keep([key(one)], steps_of(80, now + 10))
            wanted[one].append((80, now + 10))
        elif choice < 0.8 and there and len(pinned) < 5:
            one = numbers.choice(there)
            if one not in pinned:
                tier.pin([key(one)])
                pinned.add(one)
        elif choice < 0.85 and pinned:
            one = pinned.pop()
            tier.unpin([key(one)])
        else:
            now += 3.0
            tier.expire(now)
        tier.check_invariants()


def _priority(steps: list[tuple[int, float]], now: float) -> int:
    return max((priority for priority, end in steps if end > now), default=35)


# -- under a store ----------------------------------------------------------------------------------------------------


def tenant(name: str | None) -> Identity:
    return Identity(model="toy", weights="w", geometry=GEOMETRY, tenant=name)


def make(clock: ManualClock | None = None, host_blocks: int = 40) -> KVStore:
    config = KVStoreConfig(
        device_bytes=24 * SLOT_BYTES,
        host_bytes=host_blocks * SLOT_BYTES,
        codec="raw",
        io_threads="inline",
        load_always=True,
    )
    return KVStore(GEOMETRY, tenant(None), config, device="cpu", clock=clock or ManualClock())


def prompt(name: int, blocks: int) -> list[int]:
    return [name] * (blocks * B) + [7]


def serve(store: KVStore, name: int, who: str | None = None, *retention: Retention, blocks: int = 8) -> None:
    tokens = prompt(name, blocks)
    store.admit(f"r{name}", tokens, identity=tenant(who))
    while not store.fetch(f"r{name}").done:
        store.step()
    ready = store.fetch(f"r{name}").ready_tokens
    store.retain(f"r{name}", retention)
    store.grow(f"r{name}", len(tokens) - ready)
    store.commit(f"r{name}", tokens[ready:])
    store.finish(f"r{name}")
    for _ in range(6):
        store.step()
    store.check_invariants()


def in_host(store: KVStore, name: int, who: str | None = None, blocks: int = 8) -> int:
    """Blocks of a prompt that are not on the device but in host memory."""
    hit = store.lookup(prompt(name, blocks), identity=tenant(who))
    return (hit.tokens - hit.device_tokens) // B


def test_a_priority_holds_in_host_memory_given_before_the_spill_or_after_and_ends() -> None:
    clock = ManualClock()
    with make(clock) as store:
        serve(store, 1, None, Retention(priority=80, seconds=600))
        serve(store, 2)
        for name in range(3, 6):
            serve(store, name)
        assert in_host(store, 2) == 8
        store.retain_prefix(prompt(2, 8), [Retention(priority=70)])
        for name in range(10, 24):
            serve(store, name)
        assert store.lookup(prompt(1, 8)).tokens == store.lookup(prompt(2, 8)).tokens == 8 * B
        assert store.lookup(prompt(3, 8)).tokens == 0
        clock.advance(601)
        for name in range(30, 44):
            serve(store, name)
        assert store.lookup(prompt(1, 8)).tokens == 0
        assert store.lookup(prompt(2, 8)).tokens == 8 * B


def test_a_priority_given_to_a_later_request_reaches_the_copies_in_host_memory() -> None:
    with make() as store:
        serve(store, 1)
        for name in range(2, 6):
            serve(store, name)
        assert in_host(store, 1) == 8
        serve(store, 1, None, Retention(priority=80))
        for name in range(10, 30):
            serve(store, name)
        assert store.lookup(prompt(1, 8)).tokens == 8 * B
        serve(store, 40, None, Retention(priority=5))
        for name in range(41, 45):
            serve(store, name)
        assert store.lookup(prompt(40, 8)).tokens == 0, "of low priority: gone before what is older"
        assert store.lookup(prompt(41, 8)).tokens == 8 * B


def test_a_tenant_with_a_quota_of_host_memory_takes_no_more_and_costs_only_itself() -> None:
    with make() as store:
        store.set_quota("greedy", 24 * SLOT_BYTES, host_bytes=8 * SLOT_BYTES)
        serve(store, 1, "modest")
        serve(store, 2, "modest")
        for name in range(10, 40):
            serve(store, name, "greedy")
        (host,) = store.tiers
        assert isinstance(host, HostTier)
        assert 0 < host.tenant_bytes("greedy") <= 8 * SLOT_BYTES
        for name in (1, 2):
            assert store.lookup(prompt(name, 8), identity=tenant("modest")).tokens == 8 * B
        store.set_quota("greedy", 0)
        for name in range(40, 60):
            serve(store, name, "greedy")
        assert store.lookup(prompt(1, 8), identity=tenant("modest")).tokens == 0
