"""Prefixes: what is found, what is shared, what stays apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allocator import CapacityError, DuplicateSequence, LeaseError, UnknownSequence, UsageError
from kvstore import Adapter, Identity, KVStore
from tests.kvstore.conftest import full_geometry, hybrid_geometry
from tests.kvstore.driving import check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

Make = "Callable[..., KVStore]"
B = 16


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 10 * B])
def test_case_023_whole_prompt_cached_leaves_a_token(make_store: Callable[..., KVStore], length: int) -> None:
    store = make_store()
    prompt = list(range(1000, 1000 + length))
    assert run_prompt(store, "cold", prompt) == 0
    warm = run_prompt(store, "warm", prompt)
    assert warm == (length - 1) // B * B
    assert length - warm >= 1
    check_bytes(store, "warm", prompt)


def test_case_063_any_split_resumes_with_the_same_bytes(make_store: Callable[..., KVStore]) -> None:
    prompt = list(range(50, 50 + 3 * B + 3))
    for split in range(1, len(prompt)):
        store = make_store(blocks=20)
        run_prompt(store, "head", prompt[:split])
        store.finish("head")
        ready = run_prompt(store, "all", prompt)
        assert ready == min(split, len(prompt) - 1) // B * B
        check_bytes(store, "all", prompt)
        store.close()


def test_case_104_lookup_is_idempotent(make_store: Callable[..., KVStore]) -> None:
    store = make_store(host_blocks=8)
    prompt = list(range(6 * B))
    run_prompt(store, "a", prompt[: 3 * B])
    before = (store.usage(), store.metrics.snapshot(), store.sequence_ids())
    hits = [store.lookup(prompt) for _ in range(5)]
    assert all(hit == hits[0] for hit in hits)
    assert hits[0].tokens == 3 * B
    assert (store.usage(), store.metrics.snapshot(), store.sequence_ids()) == before
    assert run_prompt(store, "b", prompt) == 3 * B
    store.finish("b")
    assert store.lookup([*prompt, 1]).tokens == 6 * B


def test_case_145_hits_are_counted_once_a_request(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt)
    for _ in range(5):
        store.lookup(prompt)
    run_prompt(store, "b", prompt)
    assert store.metrics.get("hit_tokens", tier="device") == 4 * B
    assert store.metrics.get("prompt_tokens") == 2 * len(prompt)
    assert 0 <= store.metrics.hit_ratio <= 1


def test_case_148_a_prompt_below_the_unit_says_so(make_store: Callable[..., KVStore]) -> None:
    hit = make_store().lookup(list(range(B)))
    assert (hit.tokens, hit.reason) == (0, "below_unit")
    assert hit.needed_tokens == B + 1
    assert str(B + 1) in hit.explain()


def test_case_003_case_020_adapters_and_salts_stay_apart(make_store: Callable[..., KVStore]) -> None:
    geometry = full_geometry()

    def identity(**fields: object) -> Identity:
        return Identity(model="toy", weights="w0", geometry=geometry, **fields)  # type: ignore[arg-type]

    first = identity(adapter=Adapter(name="a", id=1, digest="X"))
    second = identity(adapter=Adapter(name="a", id=2, digest="Y"))
    store = make_store(identity=identity())
    prompt = list(range(4 * B + 1))
    run_prompt(store, "one", prompt, identity=first)
    assert store.lookup(prompt, identity=first).tokens == 4 * B
    for other in (second, identity(), identity(tenant="a"), identity(tenant="X")):
        assert store.lookup(prompt, identity=other).tokens == 0


def test_case_065_a_lease_outlives_pressure_and_its_end_is_a_miss(make_store: Callable[..., KVStore]) -> None:
    now = [0.0]
    store = make_store(blocks=10, clock=lambda: now[0])
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt)
    store.finish("a")
    lease = store.pin(prompt, ttl_seconds=10)
    assert lease.tokens == 4 * B
    run_prompt(store, "filler", list(range(5000, 5000 + 5 * B)))
    with pytest.raises(CapacityError):
        store.admit("too much", list(range(9000, 9000 + 3 * B)))
    store.finish("filler")
    run_prompt(store, "filler2", list(range(7000, 7000 + 5 * B)))
    store.finish("filler2")
    assert store.lookup(prompt).tokens == 4 * B
    now[0] = 11.0
    store.step()
    assert not lease.active
    run_prompt(store, "filler3", list(range(8000, 8000 + 10 * B)))
    assert store.lookup(prompt).tokens == 0
    with pytest.raises(LeaseError, match="ended"):
        store.unpin(lease)


def test_case_106_device_and_host_hits_add_up_to_the_union(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=8, host_blocks=8, load_always=True)
    prompt = list(range(6 * B + 1))
    run_prompt(store, "a", prompt)
    store.preempt("a")
    store.step()
    run_prompt(store, "filler", list(range(3000, 3000 + 4 * B)))  # evicts the tail of the prompt's blocks
    hit = store.lookup(prompt)
    assert hit.tokens == 6 * B
    assert 0 < hit.device_tokens < hit.tokens
    assert hit.by_tier == {"device": hit.device_tokens, "host": hit.tokens - hit.device_tokens}


def test_case_037_case_135_hybrid_hits_need_the_window(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=24, geometry=hybrid_geometry(window_tokens=40))
    prompt = list(range(10 * B))
    run_prompt(store, "first", prompt)
    check_bytes(store, "first", prompt)
    store.finish("first")
    shorter = [*prompt[:-3], 77, 78, 79, 80]
    common = (len(prompt) - 3) // B * B
    assert store.lookup(shorter).tokens >= common - B
    run_prompt(store, "other", list(range(4000, 4000 + 3 * B)))
    store.finish("other")
    again = run_prompt(store, "again", prompt)
    assert again >= len(prompt) - 2 * B
    check_bytes(store, "again", prompt)
    window_blocks = [entry for entry in store.tables("again")[1].tolist() if entry >= 0]
    assert len(window_blocks) <= -(-40 // B) + 2, "a sliding group holds no more than its window and one block"


def test_identical_prompts_at_once_end_in_the_same_blocks(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(3 * B))
    store.admit("a", prompt)
    store.admit("b", prompt)
    compute(store, "a", prompt)
    compute(store, "b", prompt)
    assert store.tables("a")[0].tolist() == store.tables("b")[0].tolist()
    store.check_invariants()


def test_fork_copies_only_what_is_written(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(2 * B + 5))
    run_prompt(store, "parent", prompt)
    store.fork("parent", "child")
    assert store.tables("parent")[0].tolist() == store.tables("child")[0].tolist()
    compute(store, "child", [901])
    compute(store, "parent", [902])
    check_bytes(store, "child", [*prompt, 901])
    check_bytes(store, "parent", [*prompt, 902])
    assert store.tables("parent")[0].tolist()[:2] == store.tables("child")[0].tolist()[:2]
    store.check_invariants()
    store.finish("parent")
    check_bytes(store, "child", [*prompt, 901])
    store.finish("child")


@pytest.mark.parametrize("cut", range(1, 3 * B))
def test_rollback_of_any_length_leaves_shared_blocks_whole(make_store: Callable[..., KVStore], cut: int) -> None:
    store = make_store()
    prompt = list(range(3 * B + 2))
    run_prompt(store, "a", prompt)
    run_prompt(store, "b", prompt)
    store.rollback("a", cut)
    rest = prompt[: len(prompt) - cut]
    check_bytes(store, "a", rest)
    compute(store, "a", [500, 501, 502])
    check_bytes(store, "a", [*rest, 500, 501, 502])
    check_bytes(store, "b", prompt)
    store.check_invariants()


def test_only_committed_tokens_are_named(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(B - 1))
    run_prompt(store, "a", prompt)
    store.grow("a", 4)
    store.commit("a", [90])
    assert store.lookup([*prompt, 90, 91, 92]).tokens == B
    assert store.lookup([*prompt, 91, 92, 93]).tokens == 0
    store.rollback("a", 3)
    assert store.written_tokens("a") == store.committed_tokens("a") == B
    with pytest.raises(UsageError, match="passes what was written"):
        store.commit("a", [91])


def test_case_092_nothing_beyond_computed_tokens_is_stored(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(8 * B))
    store.admit("a", prompt)  # hashed: 8 blocks
    store.grow("a", 5 * B)  # allocated: 5
    store.commit("a", prompt[: 3 * B + 4])  # computed: 3 and a bit
    store.abort("a")
    assert store.lookup(prompt).tokens == 3 * B
    assert store.usage().live_sequences == 0
    store.check_invariants()


def test_misuse_says_what_was_given_and_changes_nothing(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=8)
    prompt = list(range(2 * B))
    run_prompt(store, "a", prompt)
    before = store.usage()
    with pytest.raises(UsageError, match="empty prompt"):
        store.admit("b", [])
    with pytest.raises(UsageError, match="index 1"):
        store.admit("b", [1, 2**32])
    with pytest.raises(UsageError, match="index 0"):
        store.lookup([-1])
    with pytest.raises(DuplicateSequence, match="'a'"):
        store.admit("a", prompt)
    with pytest.raises(UnknownSequence, match="'zz'"):
        store.grow("zz", 1)
    with pytest.raises(UsageError, match="positive"):
        store.grow("a", 0)
    with pytest.raises(UsageError, match="rollback of 99"):
        store.rollback("a", 99)
    with pytest.raises(CapacityError) as caught:
        store.admit("huge", list(range(9 * B)))
    assert caught.value.permanent
    with pytest.raises(CapacityError) as caught:
        store.grow("a", 7 * B)
    assert not caught.value.permanent
    assert store.usage() == before
    store.check_invariants()
    store.finish("a")
    for call in (store.finish, store.abort, store.preempt, store.tables):
        with pytest.raises(UnknownSequence, match="finished"):
            call("a")
    store.close()
    with pytest.raises(UsageError, match="closed"):
        store.admit("late", prompt)


def test_reset_makes_everything_before_it_a_miss(make_store: Callable[..., KVStore]) -> None:
    store = make_store(host_blocks=8)
    prompt = list(range(4 * B + 1))
    run_prompt(store, "a", prompt)
    run_prompt(store, "live", [*prompt, 7])
    store.preempt("a")
    store.step()
    store.reset()
    assert store.lookup(prompt).tokens == 0
    compute(store, "live", list(range(600, 600 + 2 * B)))
    store.finish("live")
    assert store.lookup(prompt).tokens == 0
    assert run_prompt(store, "new", prompt) == 0
    assert store.lookup(prompt).tokens == 4 * B
