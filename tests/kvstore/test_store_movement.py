"""Spill, fetch, preemption: bytes come back as they were, or as a miss; never late, torn or foreign."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from allocator import CapacityError
from kvstore import HostTier
from tests.kvstore.conftest import full_geometry, hybrid_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
SLOT = full_geometry().full_slot_bytes(0)


def held_tier(blocks: int = 32) -> tuple[HostTier, HeldExecutor]:
    executor = HeldExecutor()
    return HostTier(blocks * SLOT, executor), executor


@pytest.mark.parametrize("threads", ["inline", "thread"])
def test_preempted_blocks_come_back_from_the_host(make_store: Callable[..., KVStore], threads: str) -> None:
    store = make_store(blocks=12, host_blocks=12, io_threads=threads, load_always=True)
    prompt = list(range(10 * B + 5))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    while store.metrics.get("spilled_blocks", tier="host") < 10:
        store.wait(1.0)
        store.step()
    while store._parts.upkeep.mover.in_flight_blocks:
        store.wait(1.0)
        store.step()
    run_prompt(store, "filler", list(range(4000, 4000 + 11 * B)))
    store.finish("filler")
    assert store.lookup(prompt).by_tier.get("host", 0) > 0
    assert run_prompt(store, "a", prompt) == 10 * B
    check_bytes(store, "a", prompt)
    assert store.metrics.get("fetched_blocks", tier="host") > 0
    store.check_invariants()


def test_case_009_preempted_blocks_are_fenced_until_their_copy_is_done(make_store: Callable[..., KVStore]) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=8, tiers=[tier], load_always=True)
    prompt = list(range(6 * B))
    run_prompt(store, "a", prompt)
    store.preempt("a")  # copies of all six are queued and not made yet
    with pytest.raises(CapacityError):
        store.admit("b", list(range(3000, 3000 + 4 * B)))
    run_prompt(store, "small", list(range(3000, 3000 + 2 * B)))
    store.check_invariants()
    executor.run()
    store.step()
    store.finish("small")
    run_prompt(store, "b", list(range(3000, 3000 + 8 * B)))  # overwrites every device block
    store.finish("b")
    store.pool.drop_all_idle()
    store.admit("again", prompt)
    executor.run()
    store.step()
    assert store.fetch("again").done
    ready = store.fetch("again").ready_tokens
    assert ready == 5 * B
    check_bytes(store, "again", prompt[:ready])


@pytest.mark.parametrize("order", list(itertools.permutations(["abort", "arrive", "step"])))
def test_case_051_abort_and_completion_in_any_order_free_once(
    make_store: Callable[..., KVStore], order: tuple[str, ...]
) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=10, tiers=[tier], load_always=True)
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    executor.run()
    store.step()
    store.pool.drop_all_idle()
    store.admit("b", prompt)
    actions: dict[str, Callable[[], object]] = {
        "abort": lambda: store.abort("b"),
        "arrive": executor.run,
        "step": store.step,
    }
    for action in order:
        actions[action]()
        store.check_invariants()
    executor.run()
    store.step()
    store.step()
    store.check_invariants()
    store.pool.drop_all_idle()
    assert store.usage().used_bytes == 0


def test_case_039_a_load_that_never_answers_is_given_up_at_the_deadline(make_store: Callable[..., KVStore]) -> None:
    now = [0.0]
    tier, executor = held_tier()
    store = make_store(blocks=10, tiers=[tier], load_always=True, clock=lambda: now[0], fetch_deadline_seconds=2.0)
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    executor.run()
    store.step()
    store.pool.drop_all_idle()
    store.admit("b", prompt)
    late = executor.tasks
    executor.tasks = []
    store.step()
    assert not store.fetch("b").done
    now[0] = 2.5
    store.step()
    assert store.fetch("b").done
    assert store.fetch("b").ready_tokens == 0
    assert store.metrics.get("missed_blocks", tier="host", cause="deadline") == 6
    compute(store, "b", prompt)
    for task in late:
        task()
    store.step()
    check_bytes(store, "b", prompt)
    store.check_invariants()


def test_case_021_restored_blocks_are_the_prefix(make_store: Callable[..., KVStore]) -> None:
    for on_device in range(5):
        store = make_store(blocks=12, host_blocks=12, load_always=True)
        prompt = list(range(4 * B + 1))
        run_prompt(store, "a", prompt)
        store.preempt("a")
        store.step()
        ids = store.pool.match(0, store.prepare(prompt).hashes)
        store.pool.evict(ids[on_device:])
        admission = store.admit("b", prompt)
        assert (admission.reused_tokens, admission.pending_tokens) == (on_device * B, (4 - on_device) * B)
        store.step()
        check_bytes(store, "b", prompt[: 4 * B])
        store.close()


def test_case_054_a_hole_in_the_middle_ends_the_hit(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=12, host_blocks=12, load_always=True)
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    store.step()
    store.pool.drop_all_idle()
    hashes = store.prepare(prompt).hashes
    key = store._parts.residency.copy_key(store.identity.root(), 0, hashes[2], 0, True)
    assert store.tiers[0].delete([key]) == 1
    assert store.lookup(prompt).tokens == 2 * B
    assert run_prompt(store, "b", prompt) == 2 * B
    check_bytes(store, "b", prompt)


def test_copy_gone_between_lookup_and_fetch_is_a_miss(make_store: Callable[..., KVStore]) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=12, tiers=[tier], load_always=True, geometry=full_geometry())
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    executor.run()
    store.step()
    store.pool.drop_all_idle()
    store.admit("b", prompt)
    tier.clear()  # cancels the queued read as well
    executor.run()
    store.step()
    state = store.fetch("b")
    assert state.done
    compute(store, "b", prompt[state.ready_tokens :])
    check_bytes(store, "b", prompt)
    store.check_invariants()


def test_hybrid_fetch_brings_window_and_prefix_or_nothing(make_store: Callable[..., KVStore]) -> None:
    geometry = hybrid_geometry(window_tokens=40)
    for lost in range(11):
        store = make_store(blocks=24, host_blocks=24, geometry=geometry, load_always=True)
        prompt = list(range(10 * B + 1))
        run_prompt(store, "a", prompt)
        store.preempt("a")
        store.step()
        store.pool.drop_all_idle()
        full = store.lookup(prompt)
        assert full.tokens == 10 * B
        if lost < 10:
            hashes = store.prepare(prompt).hashes
            for group in range(2):
                key = store._parts.residency.copy_key(store.identity.root(), group, hashes[lost], 0, True)
                store.tiers[0].delete([key])
        assert run_prompt(store, "b", prompt) <= (lost if lost < 10 else 10) * B
        check_bytes(store, "b", prompt)
        store.check_invariants()
        store.close()


def test_memory_pressure_spills_before_it_evicts(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=16, host_blocks=64, load_always=True, spill_blocks_per_step=4)
    prompts = [list(range(base, base + 4 * B + 1)) for base in range(0, 8000, 1000)]
    for index, prompt in enumerate(prompts):
        run_prompt(store, f"s{index}", prompt)
        store.finish(f"s{index}")
        for _ in range(3):
            store.step()
    reused = []
    for index, prompt in enumerate(prompts):
        reused.append(run_prompt(store, f"again{index}", prompt))
        check_bytes(store, f"again{index}", prompt)
        store.finish(f"again{index}")
        store.step()
    assert reused == [4 * B] * len(prompts)


def test_case_077_a_host_tier_kept_full_goes_on_admitting(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=12, host_blocks=6)
    for index in range(12):
        prompt = list(range(index * 1000, index * 1000 + 5 * B))
        run_prompt(store, "s", prompt)
        store.preempt("s")
        store.step()
    assert store.lookup([*prompt, 1]).tokens == 5 * B
    assert store.metrics.get("spilled_blocks", tier="host") > 18
    assert store.tiers[0].used_bytes <= 6 * SLOT


def test_case_029_round_trips_of_many_blocks(make_store: Callable[..., KVStore]) -> None:
    for count in (1, 2, 31, 32, 33, 113, 114, 127, 128, 129, 255, 256, 257):
        store = make_store(blocks=count + 2, host_blocks=count + 4, load_always=True, spill_queue_blocks=512)
        prompt = list(range(count * B + 1))
        run_prompt(store, "a", prompt)
        store.preempt("a")
        store.step()
        store.pool.drop_all_idle()
        assert run_prompt(store, "b", prompt) == count * B
        check_bytes(store, "b", prompt)
        store.close()


def test_case_029_a_long_prefix_that_goes_down_and_comes_back_in_many_batches(
    make_store: Callable[..., KVStore],
) -> None:
    tier, executor = held_tier(160)
    store = make_store(blocks=140, tiers=[tier], load_always=True, spill_queue_blocks=7, spill_blocks_per_step=64)
    prompt = list(range(130 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    template = store._parts.residency.copy_key(store.identity.root(), 0, bytes(32), 0, True)
    batches = 0
    for _ in range(100):
        executor.run()
        before = store.metrics.get("spilled_blocks", tier="host")
        store.step()
        spilled = store.metrics.get("spilled_blocks", tier="host")
        batches += spilled > before
        assert spilled - before <= 7
        coldest = store.pool.coldest(0, 5).tolist()  # what has a copy below makes room, tail of the prefix first
        keys = [template.with_hash(store.pool.hash_of(one)) for one in coldest]
        store.pool.evict([one for one, there in zip(coldest, tier.contains(keys), strict=True) if there])
    assert batches == 19
    assert store.pool.match(0, store.prepare(prompt).hashes) == []
    store.admit("b", prompt)
    executor.run()
    store.step()
    assert store.fetch("b").ready_tokens == 130 * B
    check_bytes(store, "b", prompt[: 130 * B])


def test_a_full_spill_queue_drops_and_counts(make_store: Callable[..., KVStore]) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=16, tiers=[tier], spill_queue_blocks=3)
    run_prompt(store, "a", list(range(8 * B)))
    store.preempt("a")
    assert store.metrics.get("dropped_blocks", tier="host", cause="queue_full") == 5
    executor.run()
    store.step()
    assert store.metrics.get("spilled_blocks", tier="host") == 3
    for _ in range(4):
        executor.run()
        store.step()
    assert store.metrics.get("spilled_blocks", tier="host") == 8, "what had to wait is copied when its turn comes"


def test_loading_costs_more_than_computing_recomputes(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=12, host_blocks=12, prefill_tokens_per_second=1e12)
    prompt = list(range(6 * B + 1))
    reused = []
    for name in "abc":
        reused.append(run_prompt(store, name, prompt))
        store.preempt(name)
        store.step()
        store.pool.drop_all_idle()
    assert reused == [0, 6 * B, 0], "a tier that nobody has measured is tried once"
    assert store.lookup(prompt).tokens == 0


def test_refused_admission_starts_no_fetch(make_store: Callable[..., KVStore]) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=10, tiers=[tier], load_always=True)
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    executor.run()
    store.step()
    store.pool.drop_all_idle()
    with pytest.raises(CapacityError, match="needed 5 "):
        store.admit("b", prompt, spare_blocks=[4])
    assert executor.tasks == []
    assert store.usage().used_bytes == 0
    assert store.admit("b", prompt, spare_blocks=[3]).pending_tokens == 6 * B
    executor.run()
    store.step()


def test_a_block_is_copied_down_once_while_it_stays_idle(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=16, host_blocks=3, spill_blocks_per_step=8)
    for index in range(3):
        run_prompt(store, "s", list(range(index * 1000, index * 1000 + 5 * B)))
        store.finish("s")
    for _ in range(50):
        store.step()
    spilled = store.metrics.get("spilled_blocks", tier="host")
    assert 3 <= spilled <= 15, "a tier smaller than a step's copies must not be written round and round"
