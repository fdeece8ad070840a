"""Promote and demote: a prefix moves without anybody waiting for it, and never changes a byte or a class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allocator import UsageError
from tests.kvstore.conftest import hybrid_geometry
from tests.kvstore.driving import check_bytes, run_prompt
from tests.kvstore.test_store_movement import held_tier

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
PROMPT = list(range(6 * B + 1))


def demoted(store: KVStore, prompt: list[int]) -> None:
    run_prompt(store, "a", prompt)
    store.finish("a")
    assert store.demote(prompt) > 0
    store.step()


@pytest.mark.parametrize("hybrid", [False, True])
def test_demoted_blocks_leave_the_device_and_come_back_promoted(
    make_store: Callable[..., KVStore], hybrid: bool
) -> None:
    geometry = hybrid_geometry() if hybrid else None
    store = make_store(blocks=16, host_blocks=16, geometry=geometry, load_always=True)
    demoted(store, PROMPT)
    assert store.usage().used_bytes == 0
    assert store.lookup(PROMPT).by_tier == {"host": 6 * B}
    moved = store.metrics.get("demoted_blocks", tier="host")
    assert moved == store.metrics.get("spilled_blocks", tier="host") > 0
    assert store.promote(PROMPT) == 6 * B
    assert store.sequence_ids() == []
    store.step()
    assert store.lookup(PROMPT).by_tier == {"device": 6 * B}
    assert store.metrics.get("promoted_blocks", tier="host") > 0
    assert store.promote(PROMPT) == 0
    assert run_prompt(store, "b", PROMPT) == 6 * B
    check_bytes(store, "b", PROMPT)
    assert store.is_exact("b")


def test_blocks_in_use_are_not_demoted(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=16, host_blocks=16)
    run_prompt(store, "a", PROMPT)
    assert store.demote(PROMPT) == 0
    check_bytes(store, "a", PROMPT)
    lease = store.pin(PROMPT)
    store.finish("a")
    assert store.demote(PROMPT) == 0
    store.unpin(lease)
    assert store.demote(PROMPT) == 6


def test_a_block_taken_up_while_it_is_copied_down_stays(make_store: Callable[..., KVStore]) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=16, tiers=[tier], load_always=True)
    run_prompt(store, "a", PROMPT)
    store.finish("a")
    assert store.demote(PROMPT) == 6
    assert run_prompt(store, "b", PROMPT) == 6 * B
    executor.run()
    store.step()
    check_bytes(store, "b", PROMPT)
    assert store.metrics.get("demoted_blocks") == 0


def test_a_promotion_that_fails_in_the_middle_keeps_what_came_before(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=16, host_blocks=16, load_always=True)
    demoted(store, PROMPT)
    assert store.promote(PROMPT[: 3 * B]) == 3 * B
    store.step()
    hashes = store.prepare(PROMPT).hashes
    key = store._parts.residency.copy_key(store.identity.root(), 0, hashes[4], 0, True)
    store.tiers[0].delete([key])
    assert store.promote(PROMPT) == B
    store.step()
    assert store.lookup(PROMPT).by_tier == {"device": 4 * B}


@pytest.mark.parametrize("end", ["reset", "close", "arrive"])
def test_a_promotion_under_way_ends_cleanly(make_store: Callable[..., KVStore], end: str) -> None:
    tier, executor = held_tier()
    store = make_store(blocks=16, tiers=[tier], load_always=True)
    run_prompt(store, "a", PROMPT)
    store.finish("a")
    store.demote(PROMPT)
    executor.run()
    store.step()
    assert store.promote(PROMPT) == 6 * B
    store.check_invariants()
    if end == "close":
        store.close()
        return
    if end == "reset":
        store.reset()
    executor.run()
    store.step()
    store.check_invariants()
    assert store.lookup(PROMPT).tokens == (0 if end == "reset" else 6 * B)
    store.pool.drop_all_idle()
    assert store.usage().used_bytes == 0


def test_promote_takes_no_room_that_live_blocks_need(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=8, host_blocks=16, load_always=True)
    demoted(store, PROMPT)
    run_prompt(store, "other", list(range(5000, 5000 + 7 * B)))
    assert store.promote(PROMPT) == 0
    store.check_invariants()


def test_promoted_int4_blocks_keep_codes_and_class(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=48, host_blocks=40, codec="int4", residual_tokens=2 * B, load_always=True)
    prompt = list(range(10 * B + 1))
    run_prompt(store, "a", prompt)
    while store.step().cooled_blocks:
        pass
    cooled = store.metrics.get("cooled_blocks")
    store.finish("a")
    assert store.demote(prompt) == 10
    store.step()
    assert store.promote(prompt) == 10 * B
    store.step()
    entries = store.pool.entries(store.pool.match(0, store.prepare(prompt).hashes)).tolist()
    assert [entry & 1 for entry in entries] == [0] + [1] * 7 + [0] * 2
    assert store.metrics.get("cooled_blocks") == cooled
    assert store.lookup(prompt, exact=True).tokens == B


def test_ids_of_the_stores_own_sequences_cannot_be_used(make_store: Callable[..., KVStore]) -> None:
    with pytest.raises(UsageError, match="no NUL"):
        make_store().admit("\x00promote 1", PROMPT)
