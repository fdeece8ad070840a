"""The adapter interface: what must be written, what is promised, and what happens without a store."""

from __future__ import annotations

import inspect

import pytest

from allocator import ConfigError, DuplicateSequence, TierError, UnknownSequence
from engine_adapter.adapter import EngineAdapter, LoadEvent, LoadOutcome, StoreAdapter, storable_tokens
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import Request
from engine_adapter.testing import ToyRunner
from kvstore import KVStore
from tests.engine_adapter.loop_kit import KitMaker, geometry, make_store, prompt

METHODS = {"geometry", "reserve", "wait_layer", "allocate", "load", "commit", "rollback", "preempt", "finish", "abort"}


def test_every_method_must_be_implemented() -> None:
    assert set(EngineAdapter.__abstractmethods__) == METHODS
    for left_out in METHODS:
        written = {name: getattr(StoreAdapter, name) for name in METHODS - {left_out}}
        partial = type("Partial", (EngineAdapter,), written)
        with pytest.raises(TypeError, match=left_out):
            partial()


def test_every_method_says_what_it_promises() -> None:
    for name in METHODS:
        assert inspect.getdoc(getattr(EngineAdapter, name)), name


def test_case_092_the_store_plan_ends_at_the_smallest_of_the_three() -> None:
    assert storable_tokens(10, 20, 30) == 10
    assert storable_tokens(30, 20, 10) == 10
    assert storable_tokens(30, 10, 20) == 10
    with pytest.raises(ConfigError, match="allocated_tokens must be >= 0, got -1"):
        storable_tokens(1, -1, 1)


# Loads


def evicted_to_host(make_kit: KitMaker, **settings: object) -> tuple[StoreAdapter, KVStore, list[int]]:
    """A store whose host tier holds a 41-token prompt that the device has (mostly) lost."""
    kit = make_kit(blocks=24, host_blocks=400, prefill_tokens_per_second=1e-3, **settings)
    tokens = prompt(1, 41)
    kit.run_checked(Request("first", tokens, 3))
    for index in range(4):
        kit.run_checked(Request(f"filler{index}", prompt(index + 20, 60), 3))
    kit.nothing_left()
    return StoreAdapter(kit.store), kit.store, tokens


def test_case_080_each_load_ends_in_exactly_one_event(make_kit: KitMaker) -> None:
    adapter, store, tokens = evicted_to_host(make_kit)
    given = adapter.reserve("s", tokens)
    assert given.pending_tokens > 0
    with pytest.raises(DuplicateSequence):
        adapter.reserve("s", tokens)
    events: list[LoadEvent] = []
    for _ in range(50):
        store.step()
        events += adapter.load()
    assert events == [LoadEvent("s", LoadOutcome.DONE, given.ready_tokens + given.pending_tokens)]
    adapter.finish("s")
    # All of it is on the device now: nothing pends, so no event is due.
    again = adapter.reserve("t", tokens)
    assert (again.ready_tokens, again.pending_tokens) == (40, 0)
    store.step()
    assert adapter.load() == []
    adapter.finish("t")


def test_case_080_a_load_that_never_ends_fails_at_its_deadline(make_kit: KitMaker) -> None:
    _, store, tokens = evicted_to_host(make_kit)
    now = [100.0]
    adapter = StoreAdapter(store, load_deadline_seconds=5.0, clock=lambda: now[0])
    assert adapter.reserve("s", tokens).pending_tokens > 0
    # The store is never stepped, so no completion is ever drained.
    now[0] = 104.9
    assert adapter.load() == []
    now[0] = 105.0
    assert adapter.load() == [LoadEvent("s", LoadOutcome.FAILED, 0)]
    assert adapter.load() == []
    assert adapter.missed_deadlines == 1
    with pytest.raises(UnknownSequence):
        adapter.abort("s")
    for _ in range(20):
        store.step()  # the late completion is ignored
        store.check_invariants()
    assert adapter.load() == []


def test_case_065_what_was_reserved_stays_whatever_is_evicted(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=24)
    tokens = prompt(1, 41)
    kit.run_checked(Request("first", tokens, 1))
    adapter = StoreAdapter(kit.store)
    given = adapter.reserve("held", tokens)
    assert given.ready_tokens == 40
    for index in range(3):
        kit.drive(Request(f"filler{index}", prompt(index + 20, 30), 3))
    assert kit.store.lookup(tokens).device_tokens == 40
    adapter.allocate("held", 1)
    adapter.commit("held", tokens[-1:])
    adapter.finish("held")
    lease = kit.store.pin(tokens, 10.0)
    kit.store.unpin(lease)
    for index in range(4):
        kit.drive(Request(f"more{index}", prompt(index + 70, 60), 3))
    late = kit.store.admit("late", tokens, lease=lease)  # an ended lease is a miss, not an error
    assert late.reused_tokens + late.pending_tokens < 40
    kit.store.abort("late")
    kit.nothing_left()


@pytest.mark.parametrize(("on_device", "in_store"), [(16, 24), (24, 16)])
def test_case_106_external_tokens_are_what_the_device_lacks(make_kit: KitMaker, on_device: int, in_store: int) -> None:
    kit = make_kit(host_blocks=200, prefill_tokens_per_second=1e-3)
    tokens = prompt(1, 41)
    kit.run_checked(Request("a", tokens[: max(on_device, in_store)], 1))
    adapter = StoreAdapter(kit.store)
    given = adapter.reserve("s", tokens)
    assert given.ready_tokens + given.pending_tokens == max(on_device, in_store)
    assert given.pending_tokens >= 0
    adapter.abort("s")
    repeat = adapter.reserve("s", tokens)
    assert repeat == given
    adapter.abort("s")


# Degraded


def broken() -> KVStore:
    raise TierError("redis://cache:6379 refused the connection")


def test_case_121_without_a_store_every_hook_is_a_miss_or_does_nothing() -> None:
    adapter = StoreAdapter.open(broken)
    assert adapter.degraded
    assert adapter.health == "degraded: TierError: redis://cache:6379 refused the connection"
    assert adapter.geometry is None
    given = adapter.reserve("s", [1, 2, 3])
    assert (given.ready_tokens, given.pending_tokens, dict(given.by_tier)) == (0, 0, {})
    adapter.allocate("s", 3)
    adapter.commit("s", [1, 2, 3])
    adapter.rollback("s", 1)
    assert adapter.load() == []
    adapter.preempt("s")
    adapter.finish("s")
    adapter.abort("never seen")
    with pytest.raises(ConfigError, match="refused the connection"):
        _ = adapter.store


def test_case_121_the_loop_runs_on_the_fallback_and_says_so() -> None:
    kv = geometry("hybrid")
    adapter = StoreAdapter.open(broken, fallback=lambda: make_store(kv))
    assert adapter.degraded
    assert adapter.health.startswith("degraded: TierError")
    with adapter.store as store:
        runner = ToyRunner.over(store)
        loop = DecodeLoop(runner, adapter)
        loop.submit(Request("a", prompt(1, 20), 6))
        degraded = loop.run()["a"]
    with make_store(kv) as plain:
        loop = DecodeLoop(ToyRunner.over(plain), plain)
        loop.submit(Request("a", prompt(1, 20), 6))
        assert loop.run()["a"].token_ids == degraded.token_ids


def test_an_error_of_the_program_is_not_taken_for_a_missing_store() -> None:
    def mistaken() -> KVStore:
        raise TypeError("unexpected keyword argument")

    with pytest.raises(TypeError, match="keyword"):
        StoreAdapter.open(mistaken)


def test_a_store_that_works_is_not_degraded() -> None:
    adapter = StoreAdapter.open(lambda: make_store(geometry("full")))
    assert (adapter.degraded, adapter.health) == (False, "ok")
    adapter.store.close()
