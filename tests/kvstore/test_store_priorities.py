"""Priorities and tenants' quotas in a store: what goes first, what is refused, under every policy, with pins beside."""

from __future__ import annotations

import pytest

from kvstore import CapacityError, Identity, KVStore, KVStoreConfig, Retention, UsageError
from kvstore.testing import ManualClock
from tests.kvstore.conftest import full_geometry

B = 16
GEOMETRY = full_geometry()
SLOT_BYTES = -(-GEOMETRY.full_slot_bytes(0) // 64) * 64
POLICIES = ("lru", "learned")


def tenant(name: str | None) -> Identity:
    return Identity(model="toy", weights="w", geometry=GEOMETRY, tenant=name)


def make(policy: str = "learned", blocks: int = 40, clock: ManualClock | None = None) -> KVStore:
    config = KVStoreConfig(
        device_bytes=blocks * SLOT_BYTES, codec="raw", io_threads="inline", eviction_policy=policy, lease_seconds=60
    )
    return KVStore(GEOMETRY, tenant(None), config, device="absent", clock=clock or ManualClock())


def prompt(name: int, blocks: int) -> list[int]:
    return [name] * (blocks * B) + [7]


def serve(store: KVStore, name: int, blocks: int = 8, who: str | None = None, *retention: Retention) -> int:
    """One request; tokens it reused."""
    tokens = prompt(name, blocks)
    reused = store.admit(f"r{name}", tokens, identity=tenant(who)).reused_tokens
    store.retain(f"r{name}", retention)
    store.grow(f"r{name}", len(tokens) - reused)
    store.commit(f"r{name}", tokens[reused:])
    store.finish(f"r{name}")
    store.step()
    store.check_invariants()
    return reused


def there(store: KVStore, name: int, blocks: int = 8, who: str | None = None) -> int:
    """Blocks of a prompt that are on the device."""
    return store.lookup(prompt(name, blocks), identity=tenant(who)).tokens // B


@pytest.mark.parametrize("policy", POLICIES)
def test_what_has_a_higher_priority_is_evicted_later_and_what_has_a_lower_one_first(policy: str) -> None:
    with make(policy) as store:
        serve(store, 1, 8, None, Retention(priority=80))
        serve(store, 2, 8)
        serve(store, 3, 8, None, Retention(priority=10))
        serve(store, 4, 8)
        assert [there(store, name) for name in (1, 2, 3, 4)] == [8, 8, 8, 8]
        serve(store, 5, 12)
        assert [there(store, name) for name in (1, 2, 4)] == [8, 8, 8]
        assert there(store, 3) < 8
        for name in range(6, 20):
            serve(store, name, 12)
        assert there(store, 1) == 8
        assert there(store, 2) == there(store, 3) == 0
        for name in range(20, 30):  # and among themselves the policy decides
            serve(store, name, 12, None, Retention(priority=80))
        assert there(store, 1) == 0


def test_a_priority_ends_when_its_time_is_up_and_the_block_has_the_age_it_had() -> None:
    clock = ManualClock()
    with make(clock=clock) as store:
        serve(store, 1, 8, None, Retention(priority=80, seconds=10))
        for name in range(2, 12):
            serve(store, name, 8)
        assert there(store, 1) == 8
        clock.advance(11)
        store.step()
        serve(store, 20, 8)
        assert there(store, 1) == 0
        assert there(store, 11) == 8


def test_a_range_reaches_back_to_the_first_token_and_a_low_one_ends_where_something_higher_follows() -> None:
    with make() as store:
        serve(store, 1, 8, None, Retention(priority=80, start_token=2 * B, end_token=4 * B))
        serve(store, 2, 8, None, Retention(priority=5, end_token=4 * B))
        serve(store, 3, 8, None, Retention(priority=5, start_token=4 * B))
        serve(store, 4, 20)
        assert [there(store, name) for name in (1, 2, 3)] == [8, 4, 4] or there(store, 3) == 4
        for name in range(5, 15):
            serve(store, name, 12)
        assert there(store, 1) == 4


def test_the_most_demanding_use_counts_and_a_low_one_takes_nothing_from_others() -> None:
    with make() as store:
        serve(store, 1, 8)
        serve(store, 1, 8, None, Retention(priority=5))
        serve(store, 2, 8, None, Retention(priority=5))
        serve(store, 2, 4)
        serve(store, 3, 27)
        assert there(store, 1) == 8
        assert there(store, 2) == 4


def test_a_prefix_that_is_there_is_retained() -> None:
    with make() as store:
        serve(store, 1, 8)
        assert store.retain_prefix(prompt(1, 8), [Retention(priority=90, end_token=5 * B)]) == 8 * B
        for name in range(2, 12):
            serve(store, name, 12)
        assert there(store, 1) == 5
        assert store.retain_prefix(prompt(99, 8), [Retention(priority=90)]) == 0


def test_a_priority_survives_cooling_and_counts_between_classes_of_slots() -> None:
    config = KVStoreConfig(device_bytes=60 * SLOT_BYTES, io_threads="inline", residual_tokens=B)
    with KVStore(GEOMETRY, tenant(None), config, device="cpu") as store:
        serve(store, 1, 8, None, Retention(priority=80))
        for name in range(2, 40):
            serve(store, name, 12)
        assert there(store, 1) == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_stays_within_its_quota_at_its_own_cost(policy: str) -> None:
    with make(policy) as store:
        store.set_quota("greedy", 16 * SLOT_BYTES)
        serve(store, 1, 8, "modest")
        for name in range(2, 30):
            serve(store, name, 6, "greedy")
            assert store.tenant_bytes("greedy") <= 16 * SLOT_BYTES
        assert there(store, 1, 8, "modest") == 8
        assert there(store, 29, 6, "greedy") == 6
        assert there(store, 2, 6, "greedy") == 0
        with pytest.raises(CapacityError, match=r"quota of tenant 'greedy'") as refused:
            store.admit("big", prompt(99, 20), identity=tenant("greedy"))
        assert refused.value.permanent
        store.check_invariants()


def test_what_runs_counts_for_a_quota_is_never_refused_to_grow_and_makes_others_wait() -> None:
    with make() as store:
        store.set_quota("a", 12 * SLOT_BYTES)
        serve(store, 1, 4, "a")
        store.admit("long", prompt(2, 7), identity=tenant("a"))
        store.grow("long", 7 * B + 1)
        store.commit("long", prompt(2, 7))
        with pytest.raises(CapacityError, match="quota of tenant") as refused:
            store.admit("more", prompt(3, 6), identity=tenant("a"))
        assert not refused.value.permanent
        assert there(store, 1, 4, "a") == 4  # nothing went, since it would not have been enough
        store.grow("long", 10 * B)
        store.commit("long", [9] * (10 * B))
        store.step()
        assert there(store, 1, 4, "a") == 0
        store.finish("long")
        store.step()
        assert store.tenant_bytes("a") <= 12 * SLOT_BYTES
        assert serve(store, 3, 6, "a") == 0
        store.set_quota("a", 0)
        serve(store, 4, 30, "a")
        store.check_invariants()


def test_within_a_quota_the_lowest_priority_goes_first_and_what_is_pinned_stays() -> None:
    clock = ManualClock()
    with make(clock=clock) as store:
        store.set_quota("a", 20 * SLOT_BYTES)
        serve(store, 1, 6, "a", Retention(priority=80))
        serve(store, 2, 6, "a")
        lease = store.pin(prompt(2, 6), 20, identity=tenant("a"))
        serve(store, 3, 6, "a")
        serve(store, 4, 7, "a")
        assert [there(store, name, 6, "a") for name in (1, 2, 3)] == [6, 6, 0]
        assert lease.active
        clock.advance(21)
        store.step()
        assert not lease.active
        serve(store, 5, 8, "a")
        assert [there(store, name, 6, "a") for name in (1, 2)] == [6, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_pins_hold_against_higher_priorities_until_their_time_and_within_their_budget(policy: str) -> None:
    clock = ManualClock()
    with make(policy, clock=clock) as store:
        serve(store, 1, 8, None, Retention(priority=0))
        lease = store.pin(prompt(1, 8), 30)
        serve(store, 2, 16, None, Retention(priority=100))
        with pytest.raises(CapacityError, match="bytes to pin"):
            store.pin(prompt(2, 16), 30)
        for name in range(3, 15):
            serve(store, name, 10, None, Retention(priority=100))
        assert there(store, 1) == 8
        clock.advance(31)
        store.step()
        assert not lease.active
        serve(store, 30, 12)
        assert there(store, 1) == 0


def test_what_is_no_priority_or_quota_is_refused() -> None:
    for wrong, message in (
        ({"priority": 101}, "priority: got 101; expected an int in 0..100"),
        ({"priority": True}, "priority"),
        ({"priority": 20, "seconds": 5}, "priority: got 20 with an end"),
        ({"priority": 50, "start_token": 4, "end_token": 4}, "end_token"),
        ({"priority": 50, "seconds": -1}, "seconds"),
    ):
        with pytest.raises(UsageError, match=message):
            Retention(**wrong)  # type: ignore[arg-type]
    with make() as store:
        with pytest.raises(UsageError, match="quota_bytes: got -1"):
            store.set_quota("a", -1)
        with pytest.raises(UsageError, match="tenant: got ''"):
            store.set_quota("", 1)
        with pytest.raises(UsageError, match="retention"):
            store.retain_prefix([1] * 40, Retention(priority=50))  # type: ignore[arg-type]
