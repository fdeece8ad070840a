"""On the way up: one transfer for all who wait, in pieces that count alone, no further than is worth it, kept near."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import HostTier
from kvstore.testing import Faults, FaultyTier, SteppedExecutor
from tests.kvstore.conftest import full_geometry, hybrid_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import KVStore, Tier

B = 16
SLOT = full_geometry().full_slot_bytes(0)
PROMPT = list(range(6 * B + 1))


def below(store: KVStore, prompt: list[int], executor: HeldExecutor | SteppedExecutor) -> None:
    """Have a prompt's blocks in the tier and not on the device."""
    run_prompt(store, "writer", prompt)
    store.preempt("writer")
    for _ in range(3):
        executor.run() if isinstance(executor, HeldExecutor) else executor.run_all()
        store.step()
    store.pool.drop_all_idle()


def loading(make_store: Callable[..., KVStore], blocks: int = 24) -> tuple[KVStore, HeldExecutor]:
    executor = HeldExecutor()
    store = make_store(blocks=blocks, tiers=[HostTier(64 * SLOT, executor)], load_always=True)
    below(store, PROMPT, executor)
    return store, executor


def gets(store: KVStore) -> int:
    return store.tiers[0].counters().get("get_ok", 0)  # type: ignore[no-any-return]


def test_two_sequences_share_one_transfer_and_one_copy(make_store: Callable[..., KVStore]) -> None:
    store, executor = loading(make_store)
    one = store.admit("one", PROMPT)
    two = store.admit("two", [*PROMPT[: 4 * B], 9001, 9002])
    assert (one.pending_tokens, two.pending_tokens) == (6 * B, 4 * B)
    store.check_invariants()
    executor.run()
    store.step()
    assert gets(store) == 6
    assert (store.fetch("one").ready_tokens, store.fetch("two").ready_tokens) == (6 * B, 4 * B)
    assert store.tables("one")[0][:4].tolist() == store.tables("two")[0].tolist()
    check_bytes(store, "one", PROMPT[: 6 * B])
    check_bytes(store, "two", PROMPT[: 4 * B])
    assert store.metrics.get("fetched_blocks", tier="host") == 6
    assert store.metrics.get("hit_tokens", tier="host") == 10 * B


@pytest.mark.parametrize("gone", ["one", "two"])
@pytest.mark.parametrize("when", ["loading", "arrived"])
def test_the_end_of_one_leaves_the_other_right(make_store: Callable[..., KVStore], gone: str, when: str) -> None:
    store, executor = loading(make_store)
    store.admit("one", PROMPT)
    store.admit("two", PROMPT)
    if when == "loading":
        store.abort(gone)
    executor.run()
    if when == "arrived":
        store.abort(gone)
    store.step()
    left = "two" if gone == "one" else "one"
    assert store.fetch(left).ready_tokens == 6 * B
    compute(store, left, PROMPT[6 * B :])
    check_bytes(store, left, PROMPT)
    store.finish(left)
    store.pool.drop_all_idle()
    assert store.usage().used_bytes == 0


def test_a_piece_that_is_wanted_in_part_goes_on(make_store: Callable[..., KVStore]) -> None:
    store, executor = loading(make_store)
    store.admit("long", PROMPT)
    store.admit("short", PROMPT[: 4 * B + 1])
    store.abort("long")
    executor.run()
    store.step()
    assert store.fetch("short").ready_tokens == 4 * B
    check_bytes(store, "short", PROMPT[: 4 * B])


def test_a_failure_is_one_for_all_who_wait(make_store: Callable[..., KVStore]) -> None:
    executor = SteppedExecutor()
    tier: Tier = FaultyTier(HostTier(64 * SLOT, executor), Faults(flipped=0.3), seed=3)
    store = make_store(blocks=32, tiers=[tier], load_always=True)
    below(store, PROMPT, executor)
    store.admit("one", PROMPT)
    store.admit("two", PROMPT)
    executor.run_all()
    store.step()
    ready = store.fetch("one").ready_tokens
    assert 0 < ready < 6 * B, "the seed has to flip a bit of a later block"
    assert store.fetch("two").ready_tokens == ready
    for name in ("one", "two"):
        compute(store, name, PROMPT[ready:])
        check_bytes(store, name, PROMPT)
    flips = tier.injected["flipped"]  # type: ignore[attr-defined]
    assert store.metrics.get("missed_blocks", tier="host", cause="corrupt") == flips, "each counted once"


def test_a_promotion_and_an_exact_reader_join_too(make_store: Callable[..., KVStore]) -> None:
    store, executor = loading(make_store)
    assert store.promote(PROMPT) == 6 * B
    store.admit("exact", PROMPT, exact=True)
    executor.run()
    store.step()
    assert gets(store) == 6
    assert store.fetch("exact").ready_tokens == 6 * B
    check_bytes(store, "exact", PROMPT[: 6 * B])
    store.abort("exact")
    assert store.lookup(PROMPT).device_tokens == 6 * B


def test_a_reset_between_leaves_nobody_with_the_old_copies(make_store: Callable[..., KVStore]) -> None:
    store, executor = loading(make_store)
    store.admit("one", PROMPT)
    store.admit("two", PROMPT)
    executor.run()
    store.reset()
    run_prompt(store, "new", PROMPT)
    store.step()
    assert store.fetch("one").ready_tokens == store.fetch("two").ready_tokens == 0
    compute(store, "two", PROMPT)
    check_bytes(store, "two", PROMPT)
    assert store.lookup(PROMPT).device_tokens == 6 * B, "of the new one alone"


def test_what_nobody_waits_for_any_more_is_cancelled(make_store: Callable[..., KVStore]) -> None:
    store, executor = loading(make_store)
    store.admit("one", PROMPT)
    store.admit("two", PROMPT)
    store.abort("one")
    assert store.tiers[0].counters().get("get_cancelled", 0) == 0, "the other still waits"
    store.abort("two")
    assert store.tiers[0].counters()["get_cancelled"] == 6
    store.admit("three", PROMPT)  # must not join what has been given up
    executor.run()
    store.step()
    assert store.fetch("three").ready_tokens == 6 * B
    check_bytes(store, "three", PROMPT[: 6 * B])


# pieces


LONG = list(range(100 * B + 1))


def pieces(make_store: Callable[..., KVStore], **settings: object) -> tuple[KVStore, SteppedExecutor, list[float]]:
    now = [0.0]
    executor = SteppedExecutor()
    store = make_store(
        blocks=120, tiers=[HostTier(128 * SLOT, executor)], load_always=True, clock=lambda: now[0], **settings
    )
    below(store, LONG, executor)
    return store, executor, now


def test_what_has_arrived_counts_when_the_rest_is_late(make_store: Callable[..., KVStore]) -> None:
    store, executor, now = pieces(make_store, fetch_deadline_seconds=2.0)
    store.admit("a", LONG)
    executor.step()
    executor.step()
    store.step()
    assert not store.fetch("a").done
    now[0] = 2.5
    store.step()
    assert store.fetch("a").done
    assert store.fetch("a").ready_tokens == 64 * B, "two pieces of 32 blocks"
    assert store.metrics.get("missed_blocks", tier="host", cause="deadline") == 36
    executor.run_all()
    store.step()
    compute(store, "a", LONG[64 * B :])
    check_bytes(store, "a", LONG)


def test_after_a_hole_nothing_more_is_waited_for(make_store: Callable[..., KVStore]) -> None:
    store, executor, _ = pieces(make_store)
    store.admit("a", LONG)
    hashes = store.prepare(LONG).hashes
    store.tiers[0].delete([store._parts.residency.copy_key(store.identity.root(), 0, hashes[40], 0, True)])
    store.abort("a")
    executor.run_all()
    store.step()
    executor.run_all()
    tier = store.tiers[0]
    contains = tier.contains
    tier.contains = lambda keys: [True] * len(keys)  # type: ignore[method-assign]
    store.admit("b", LONG)
    tier.contains = contains  # type: ignore[method-assign]
    executor.step()
    executor.step()
    store.step()
    assert store.fetch("b").ready_tokens == 40 * B, "the third and the fourth piece were not waited for"
    assert tier.counters()["get_cancelled"] >= 36
    compute(store, "b", LONG[40 * B :])
    check_bytes(store, "b", LONG)


def test_a_hybrid_prefix_comes_in_pieces_too(make_store: Callable[..., KVStore]) -> None:
    geometry = hybrid_geometry(window_tokens=40)
    store = make_store(blocks=160, host_blocks=160, geometry=geometry, load_always=True, spill_queue_blocks=512)
    run_prompt(store, "a", LONG)
    store.preempt("a")
    store.step()
    store.pool.drop_all_idle()
    assert run_prompt(store, "b", LONG) == 100 * B
    check_bytes(store, "b", LONG)
    assert store.metrics.get("transfers", tier="host", kind="get", result="ok") >= 4


# no further than is worth it


def test_only_the_leading_stretch_that_is_worth_it_is_loaded(make_store: Callable[..., KVStore]) -> None:
    near, far = HostTier(64 * SLOT, name="near"), HostTier(64 * SLOT, name="far")
    store = make_store(blocks=24, tiers=[near, far], prefill_tokens_per_second=1000.0)
    run_prompt(store, "a", PROMPT)
    store.preempt("a")
    store.step()
    store.pool.drop_all_idle()
    keys = [
        store._parts.residency.copy_key(store.identity.root(), 0, one, 0, True) for one in store.prepare(PROMPT).hashes
    ]
    buffer = bytearray(SLOT)
    for key in keys[3:]:
        near.submit_get([(key, buffer)])
        far.submit_put([(key, [bytes(buffer)])])
    near.poll(), far.poll()
    near.delete(keys[3:])
    assert store.lookup(PROMPT).by_tier == {"near": 3 * B, "far": 3 * B}
    for _ in range(40):
        store._parts.costs.observe_load("far", SLOT, 5.0)
    assert store.lookup(PROMPT).by_tier == {"near": 3 * B}
    assert run_prompt(store, "b", PROMPT) == 3 * B
    check_bytes(store, "b", PROMPT)
    assert store.metrics.get("recomputed_tokens", cause="cheaper") == 3 * B
    gauges = store.metrics.snapshot()
    assert gauges['load_bytes_per_second{tier="far"}'] < gauges['load_bytes_per_second{tier="near"}']
    assert gauges["prefill_tokens_per_second"] > 0
    store.finish("b")
    store.pool.drop_all_idle()
    before = [store.lookup(PROMPT) for _ in range(200)]
    assert len(set(map(str, before))) == 1, "asking alone does not bring the refused tier nearer to a try"


def test_a_busy_tier_counts_its_queue(make_store: Callable[..., KVStore]) -> None:
    executor = HeldExecutor()
    store = make_store(blocks=24, tiers=[HostTier(64 * SLOT, executor)], prefill_tokens_per_second=1000.0)
    below(store, PROMPT, executor)
    store._parts.costs._tiers.clear()
    for size in (SLOT, 4 * SLOT) * 30:  # a block in 3 ms, and no latency: 16 tokens take 16 ms
        store._parts.costs.observe_load("host", size, 3e-3 * size / SLOT)
    assert store.lookup(PROMPT).tokens == 6 * B
    run_prompt(store, "busy", list(range(7000, 7000 + 12 * B)))
    assert store.lookup(PROMPT[: B + 1]).tokens == B
    store.preempt("busy")  # 12 blocks are on their way down: 36 ms
    assert store.lookup(PROMPT).tokens == 6 * B, "54 ms for 96"
    assert store.lookup(PROMPT[: B + 1]).tokens == 0, "39 ms for 16"


# kept near


def test_what_came_from_far_is_offered_to_the_nearer_tiers(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True, "load_always": True}
    first = make_store(blocks=24, **settings)
    run_prompt(first, "a", PROMPT)
    first.preempt("a")
    first.step()
    first.close()
    store = make_store(blocks=24, host_blocks=24, **settings)
    assert store.lookup(PROMPT).by_tier == {"disk": 6 * B}
    assert run_prompt(store, "b", PROMPT) == 6 * B
    store.step()
    assert store.metrics.get("promoted_blocks", tier="disk") == 6
    assert store.metrics.get("spilled_blocks", tier="host") == 6
    store.finish("b")
    store.pool.drop_all_idle()
    assert store.lookup(PROMPT).by_tier == {"host": 6 * B}
    assert run_prompt(store, "c", PROMPT) == 6 * B
    check_bytes(store, "c", PROMPT)
    assert store.metrics.get("promoted_blocks") == 6, "what is near already is not written again"
