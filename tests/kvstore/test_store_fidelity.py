"""Exactness is inherited: what follows a lossy block is lossy, and INT4 codes are never made twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allocator import CannotRollback
from tests.kvstore.driving import check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16


def settle(store: KVStore) -> None:
    while store.step().cooled_blocks:
        pass


@pytest.fixture
def cold(make_store: Callable[..., KVStore]) -> Callable[..., KVStore]:
    def make(**settings: object) -> KVStore:
        options: dict[str, object] = {"blocks": 48, "codec": "int4", "residual_tokens": 2 * B}
        return make_store(**{**options, **settings})

    return make


def test_first_block_and_newest_tokens_stay_raw(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(10 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    forms = [entry & 1 for entry in store.tables("a")[0].tolist()]
    assert forms == [0] + [1] * 7 + [0] * 2
    check_bytes(store, "a", prompt)


def test_prompt_blocks_cool_only_after_the_prefill(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(10 * B))
    store.admit("a", prompt)
    compute(store, "a", prompt)
    settle(store)
    assert not any(entry & 1 for entry in store.tables("a")[0].tolist())
    store.prefill_done("a")
    settle(store)
    assert any(entry & 1 for entry in store.tables("a")[0].tolist())


def test_what_follows_a_cold_block_is_never_served_as_exact(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(8 * B))
    answer = list(range(900, 900 + 4 * B))
    run_prompt(store, "a", prompt)
    assert store.is_exact("a")
    settle(store)
    compute(store, "a", answer, chunk=1)  # every token of it attended to INT4 blocks
    assert not store.is_exact("a")
    store.finish("a")
    everything = [*prompt, *answer, 1]
    lossy = store.lookup(everything)
    exact = store.lookup(everything, exact=True)
    assert lossy.tokens == 12 * B
    assert exact.tokens == B, "only the first block is still a raw copy of an exact block"
    raw_tail = [entry & 1 for entry in store.pool.entries(store.pool.match(0, _hashes(store, everything))).tolist()]
    assert raw_tail[-2:] == [0, 0], "the newest blocks are raw, and still not exact"


def test_lossy_hit_makes_the_rest_lossy_and_exact_recomputes(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    store.finish("a")
    longer = [*prompt, *range(700, 700 + 2 * B)]
    assert run_prompt(store, "lossy", longer) == 8 * B
    assert not store.is_exact("lossy")
    assert run_prompt(store, "exact", longer, exact=True) == B
    assert store.is_exact("exact")
    check_bytes(store, "exact", longer)
    settle(store)
    assert not any(entry & 1 for entry in store.tables("exact")[0].tolist()), "an exact reader's blocks never cool"
    assert store.is_exact("exact")
    assert store.lookup([*longer, 1], exact=True).tokens == 10 * B
    store.check_invariants()


def test_exact_and_lossy_blocks_of_one_hash_never_merge(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    run_prompt(store, "b", [*prompt, *range(700, 700 + B)])
    run_prompt(store, "c", [*prompt, *range(700, 700 + B)], exact=True)
    b_blocks, c_blocks = store.tables("b")[0].tolist(), store.tables("c")[0].tolist()
    assert b_blocks[-1] != c_blocks[-1]
    assert b_blocks[0] == c_blocks[0]


def test_a_block_that_cooled_under_a_reader_marks_what_it_computes_next(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(6 * B))
    run_prompt(store, "owner", prompt)
    run_prompt(store, "reader", [*prompt, 5])  # shares raw blocks, exact so far
    assert store.is_exact("reader")
    settle(store)
    compute(store, "reader", list(range(800, 800 + B)), chunk=1)
    assert not store.is_exact("reader")
    assert store.lookup([*prompt, 5, *range(800, 800 + B), 1], exact=True).tokens <= B


def test_promoted_int4_blocks_keep_their_codes(cold: Callable[..., KVStore]) -> None:
    store = cold(host_blocks=40, load_always=True)
    prompt = list(range(10 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    entries = store.tables("a")[0]
    assert store.slab is not None
    codes = {
        position: bytes(store.slab.slot_memory(1, int(entry) >> 1))
        for position, entry in enumerate(entries.tolist())
        if entry & 1
    }
    cooled = store.metrics.get("cooled_blocks")
    store.preempt("a")
    store.step()
    store.pool.drop_all_idle()
    assert run_prompt(store, "b", [*prompt, 3]) == 10 * B
    settle(store)
    back = store.tables("b")[0]
    for position, before in codes.items():
        assert back[position] & 1
        assert bytes(store.slab.slot_memory(1, int(back[position]) >> 1)) == before
    assert store.metrics.get("cooled_blocks") == cooled, "a promoted INT4 block was encoded a second time"
    assert not store.is_exact("b")
    assert store.lookup([*prompt, 3], exact=True).tokens < 10 * B


def test_case_013_one_shot_prefill_keeps_the_recent_window_raw(cold: Callable[..., KVStore]) -> None:
    store = cold(residual_tokens=128, blocks=64)
    prompt = list(range(20 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    forms = [entry & 1 for entry in store.tables("a")[0].tolist()]
    assert forms[0] == 0
    assert forms[-8:] == [0] * 8
    assert forms[1:-8] == [1] * 11


@pytest.mark.parametrize("cut", range(1, 10 * B, 5))
def test_case_027_cropping_to_any_length_leaves_every_kept_block_as_it_was(
    cold: Callable[..., KVStore], cut: int
) -> None:
    store = cold()
    prompt = list(range(10 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    before = store.tables("a")[0].tolist()
    assert store.slab is not None
    raw = [bytes(store.slab.slot_memory(entry & 1, entry >> 1)) for entry in before]
    remaining = len(prompt) - cut
    inside_cold = remaining % B and before[remaining // B] & 1
    try:
        store.rollback("a", cut)
    except CannotRollback:
        assert inside_cold
        remaining = len(prompt)
    else:
        assert not inside_cold
    store.fork("a", "b")
    settle(store)
    compute(store, "a", [700, 701, 702])
    compute(store, "b", [800])
    for name, tail in (("a", [700, 701, 702]), ("b", [800])):
        check_bytes(store, name, [*prompt[:remaining], *tail])
        now = store.tables(name)[0].tolist()
        for position in range(remaining // B):
            assert bytes(store.slab.slot_memory(now[position] & 1, now[position] >> 1)) == raw[position]
    store.check_invariants()


def test_cutting_inside_an_int4_block_is_refused(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(10 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    with pytest.raises(CannotRollback, match="INT4"):
        store.rollback("a", 5 * B + 3)
    assert store.committed_tokens("a") == 10 * B
    store.rollback("a", 5 * B)
    compute(store, "a", [1, 2, 3])
    assert not store.is_exact("a")
    store.check_invariants()


def test_case_067_blocks_that_cannot_be_encoded_stay_raw(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(10 * B))
    store.admit("a", prompt)
    compute(store, "a", prompt)
    assert store.slab is not None
    bad = int(store.tables("a")[0][3]) >> 1
    store.slab.keys_view(0)[bad, 0, 0, 2, 5] = float("nan")
    store.prefill_done("a")
    settle(store)
    forms = [entry & 1 for entry in store.tables("a")[0].tolist()]
    assert forms == [0, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    assert store.metrics.get("kept_raw_blocks", cause="error_bound") == 1
    store.check_invariants()


def _hashes(store: KVStore, token_ids: list[int]) -> list[bytes]:
    from kvstore import HashChain

    return HashChain(store.identity.root(), B).extend(token_ids)


def test_a_lossy_hit_keeps_the_copies_of_lossy_blocks_young(cold: Callable[..., KVStore]) -> None:
    store = cold(host_blocks=40, load_always=True)
    prompt, answer = list(range(8 * B)), list(range(900, 900 + 4 * B))
    run_prompt(store, "a", prompt)
    settle(store)
    compute(store, "a", answer, chunk=1)
    store.preempt("a")
    store.step()
    touched: list[bool] = []
    touch = store.tiers[0].touch
    store.tiers[0].touch = lambda keys: (touched.extend(key.exact for key in keys), touch(keys))[1]  # type: ignore[method-assign]
    assert run_prompt(store, "b", [*prompt, *answer, 1]) == 12 * B
    assert False in touched
    touched.clear()
    assert run_prompt(store, "c", list(range(3000, 3000 + B + 1))) == 0
    assert run_prompt(store, "d", list(range(3000, 3000 + B + 1))) == B
    assert set(touched) == {True}
