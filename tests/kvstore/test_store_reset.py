"""A reset: nothing that was computed before it is served after it, wherever it was at that moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allocator import TierError, UsageError
from kvstore import HostTier, Identity
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

SLOT = full_geometry().full_slot_bytes(0)

B = 16


def test_case_008_blocks_of_live_sequences_are_no_hits_after_a_reset(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=24, host_blocks=24, load_always=True)
    adapter = Identity(model="toy", weights="w0", geometry=full_geometry(), adapter="a")
    prompt = list(range(4 * B + 1))
    run_prompt(store, "own", prompt)
    run_prompt(store, "adapted", prompt, identity=adapter)
    before = store.prepare(prompt)
    store.reset()
    assert store.lookup(prompt).tokens == 0
    assert store.lookup(prompt, identity=adapter).tokens == 0
    with pytest.raises(UsageError, match="reset"):
        store.admit("stale", before)
    for name in ("own", "adapted"):
        store.preempt(name)
    for _ in range(3):
        store.step()
    assert store.lookup(prompt, identity=adapter).tokens == 0
    assert store.tiers[0].used_bytes == 0
    assert run_prompt(store, "new", prompt, identity=adapter) == 0
    assert store.lookup(prompt, identity=adapter).tokens == 4 * B
    store.check_invariants()


def test_case_008_copies_under_way_at_a_reset_are_not_taken(make_store: Callable[..., KVStore]) -> None:
    executor = HeldExecutor()
    tier = HostTier(24 * SLOT, executor)
    adapter = Identity(model="toy", weights="w0", geometry=full_geometry(), adapter="a")
    store = make_store(blocks=24, tiers=[tier], load_always=True)
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt, identity=adapter)
    store.preempt("a")
    executor.run()
    store.step()
    store.pool.drop_all_idle()
    store.admit("b", prompt, identity=adapter)
    executor.run()  # the bytes are there, the store has not looked yet
    store.reset()
    store.step()
    assert store.fetch("b").ready_tokens == 0
    assert store.lookup(prompt, identity=adapter).tokens == 0
    compute(store, "b", prompt)
    check_bytes(store, "b", prompt)
    store.finish("b")
    assert store.lookup(prompt, identity=adapter).tokens == 0
    store.check_invariants()


def test_case_008_a_reset_that_does_not_reach_a_tier_says_so_and_counts_all_the_same(
    make_store: Callable[..., KVStore],
) -> None:
    near, far = HostTier(12 * SLOT, name="near"), HostTier(12 * SLOT, name="far")
    store = make_store(blocks=12, tiers=[far, near], load_always=True)
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    store.step()
    assert far.used_bytes

    def unreachable() -> None:
        raise TierError("no route")

    far.clear = unreachable  # type: ignore[method-assign]
    with pytest.raises(TierError, match="far: no route"):
        store.reset()
    assert store.identity.epoch == 1
    assert near.used_bytes == 0
    assert far.used_bytes > 0, "its copies are still there"
    assert store.lookup(prompt).tokens == 0, "and are no hits"
    assert run_prompt(store, "b", prompt) == 0
    check_bytes(store, "b", prompt)


def test_a_pinned_block_is_no_hit_after_a_reset_and_comes_free(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=8)
    prompt = list(range(4 * B + 1))
    chain_hashes = store.prepare(prompt).hashes
    root = store.identity.root()
    run_prompt(store, "a", prompt)
    store.finish("a")
    lease = store.pin(prompt, ttl_seconds=5)
    store.reset()
    assert store.lookup_hashes(root, chain_hashes, len(prompt)).tokens == 0
    store.check_invariants()
    store.unpin(lease)
    store.check_invariants()
    assert store.usage().used_bytes == 0
