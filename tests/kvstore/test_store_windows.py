"""Hybrid models in the store: which hits a sliding window allows, on the device and below it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.kvstore.conftest import hybrid_geometry
from tests.kvstore.driving import check_bytes, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
BLOCKS = 12
FULL_GROUP, SLIDING_GROUP = 0, 1


def longest(kept: dict[int, list[bool]], window: int) -> int:
    """Blocks of the largest prefix that both groups have: all of it, and what covers the window before its end."""
    best = 0
    for n in range(1, BLOCKS + 1):
        first = max(0, n * B - window + 1) // B
        if all(kept[FULL_GROUP][:n]) and all(kept[SLIDING_GROUP][first:n]):
            best = n
    return best


@pytest.mark.parametrize("window", [17, 18, 40, 64])  # with 18 a token reads a block more than with 17
def test_case_037_a_sliding_hit_needs_every_block_of_its_window(
    make_store: Callable[..., KVStore], window: int
) -> None:
    """Blocks lost at random on the device and in the tier below: the hit is the largest n whose window is all there."""
    dice = random.Random(window)
    prompt = list(range(BLOCKS * B + 1))
    found = set()
    for turn in range(16):
        store = make_store(blocks=32, host_blocks=32, geometry=hybrid_geometry(window), load_always=True)
        run_prompt(store, "cold", prompt)
        store.preempt("cold")
        store.step()
        hashes = store.prepare(prompt).hashes
        kept: dict[int, list[bool]] = {}
        for group, loss in ((FULL_GROUP, 0.04), (SLIDING_GROUP, 0.3)):
            ids = store.pool.index(group).find_many(hashes)
            on_device = [one >= 0 and dice.random() > (loss if turn % 2 else 0.7) for one in ids]
            store.pool.evict([one for one, stays in zip(ids, on_device, strict=True) if one >= 0 and not stays])
            key = store._parts.residency.copy_key(store.identity.root(), group, hashes[0], 0, True)
            keys = list(key.with_hashes(hashes))
            store.tiers[0].delete([one for one in keys if turn % 2 or dice.random() < loss])
            below = store.tiers[0].contains(keys)
            kept[group] = [here or there for here, there in zip(on_device, below, strict=True)]
        expected = longest(kept, window)
        found.add(expected)
        assert store.lookup(prompt).tokens == expected * B
        assert run_prompt(store, "warm", prompt) == expected * B
        check_bytes(store, "warm", prompt)
        store.check_invariants()
        store.close()
    assert len(found) > 2, "hits of many lengths, or this proves little"


@pytest.mark.parametrize("below", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("window", [16, 33, 64, 100])
def test_case_135_a_prompt_a_few_tokens_shorter_still_hits(
    make_store: Callable[..., KVStore], window: int, below: bool
) -> None:
    """P, then P without its last 3 tokens and another end: at least the aligned common prefix less one block."""
    for length in (10 * B - 2, 10 * B, 10 * B + 1, 10 * B + 2, 10 * B + 3, 11 * B):
        store = make_store(blocks=48, host_blocks=48, geometry=hybrid_geometry(window), load_always=True)
        prompt = list(range(length))
        assert run_prompt(store, "first", prompt) == 0
        if below:
            store.preempt("first")
            store.step()
            store.pool.drop_all_idle()
        else:
            store.finish("first")
        changed = [*prompt[:-3], *range(5000, 5050)]
        hit = run_prompt(store, "changed", changed)
        assert hit >= (length - 3) // B * B - B
        check_bytes(store, "changed", changed)
        store.close()


def test_case_135_an_unrelated_prompt_that_fits_does_not_cost_the_hit(make_store: Callable[..., KVStore]) -> None:
    prompt, other = list(range(20 * B + 5)), list(range(5000, 5000 + 24 * B))
    store = make_store(blocks=48, geometry=hybrid_geometry(64))
    assert run_prompt(store, "first", prompt) == 0
    store.finish("first")
    assert run_prompt(store, "other", other) == 0
    store.finish("other")
    assert run_prompt(store, "again", prompt) == 20 * B
    check_bytes(store, "again", prompt)


@pytest.mark.parametrize("group", [FULL_GROUP, SLIDING_GROUP])
def test_case_054_a_hole_in_one_group_ends_the_hit_of_all(make_store: Callable[..., KVStore], group: int) -> None:
    """The groups' copies are evicted apart: what one lost is lost to the other too, in the lookup already."""
    store = make_store(blocks=32, host_blocks=32, geometry=hybrid_geometry(40), load_always=True)
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    store.step()
    store.pool.drop_all_idle()
    assert store.lookup(prompt).tokens == 6 * B
    hashes = store.prepare(prompt).hashes
    key = store._parts.residency.copy_key(store.identity.root(), group, hashes[5], 0, True)
    assert store.tiers[0].delete([key]) == 1
    assert store.lookup(prompt).tokens == 5 * B
    assert run_prompt(store, "b", prompt) == 5 * B
    assert all(len(table) == 7 for table in store.tables("b"))
    check_bytes(store, "b", prompt)
