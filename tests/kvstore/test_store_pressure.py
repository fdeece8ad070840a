"""When memory is short a prompt cools while it is still computed: then it needs little full precision at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allocator import CapacityError
from kvstore import HostTier
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, fill, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16


def compute_with_steps(store: KVStore, sequence_id: str, token_ids: list[int], chunk: int = 2 * B) -> None:
    """As a decode loop computes a prompt: a step of the store before each chunk."""
    for start in range(0, len(token_ids), chunk):
        store.step()
        part = token_ids[start : start + chunk]
        store.grow(sequence_id, len(part))
        fill(store, sequence_id, part, start)
        store.commit(sequence_id, part)
        store.check_invariants()


def cold_positions(store: KVStore, sequence_id: str) -> list[int]:
    return [position for position, entry in enumerate(store.tables(sequence_id)[0].tolist()) if entry & 1]


@pytest.fixture
def cold(make_store: Callable[..., KVStore]) -> Callable[..., KVStore]:
    def make(**settings: object) -> KVStore:
        options: dict[str, object] = {"blocks": 24, "codec": "int4", "residual_tokens": 2 * B}
        return make_store(**{**options, **settings})

    return make


def test_a_prompt_cools_behind_its_newest_tokens_while_memory_is_short(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(18 * B))
    store.admit("a", prompt)
    compute_with_steps(store, "a", prompt)
    store.step()
    found = cold_positions(store, "a")
    assert found
    assert 0 not in found
    assert max(found) <= 15, "the newest 32 tokens stay raw"
    assert store.metrics.get("cooled_blocks", cause="pressure") == len(found)
    assert store.metrics.get("cooled_blocks", cause="age") == 0
    assert not store.is_exact("a"), "what followed was computed behind INT4 blocks"
    check_bytes(store, "a", prompt)


def test_a_prompt_longer_than_the_slab_in_full_precision_pushes_out_no_cold_neighbour(
    cold: Callable[..., KVStore],
) -> None:
    store = cold()
    first, second = list(range(18 * B)), list(range(5000, 5000 + 18 * B))
    for name, prompt in (("a", first), ("b", second)):
        store.admit(name, prompt)
        compute_with_steps(store, name, prompt)
        store.prefill_done(name)
        store.finish(name)
        for _ in range(4):
            store.step()
    assert store.lookup([*first, 1]).tokens == 18 * B
    assert store.lookup([*second, 1]).tokens == 18 * B


@pytest.mark.parametrize("settings", [{"cool_under_pressure": False}, {"blocks": 96}])
def test_a_prompt_stays_exact_until_it_is_computed(cold: Callable[..., KVStore], settings: dict[str, object]) -> None:
    store = cold(**settings)
    prompt = list(range(18 * B))
    store.admit("a", prompt)
    compute_with_steps(store, "a", prompt)
    store.step()
    assert cold_positions(store, "a") == []
    assert store.is_exact("a")


def test_an_exact_reader_never_cools_however_short_memory_is(cold: Callable[..., KVStore]) -> None:
    store = cold()
    prompt = list(range(18 * B))
    store.admit("a", prompt, exact=True)
    compute_with_steps(store, "a", prompt)
    assert cold_positions(store, "a") == []


def test_admission_that_only_waits_for_transfers_says_so(make_store: Callable[..., KVStore]) -> None:
    executor = HeldExecutor()
    store = make_store(blocks=8, tiers=[HostTier(8 * full_geometry().full_slot_bytes(0), executor)])
    run_prompt(store, "a", list(range(6 * B)))
    with pytest.raises(CapacityError) as full:
        store.admit("b", list(range(9000, 9000 + 4 * B)))
    assert not full.value.transient, "the room is held by a live sequence: waiting alone does not help"
    store.preempt("a")  # its blocks are on their way down: fenced, so nobody can have them yet
    with pytest.raises(CapacityError) as short:
        store.admit("b", list(range(9000, 9000 + 4 * B)))
    assert short.value.transient
    executor.run()
    store.step()
    store.admit("b", list(range(9000, 9000 + 4 * B)))


def test_a_prompt_that_pushes_out_many_blocks_at_once_loses_none_that_host_memory_can_hold(
    make_store: Callable[..., KVStore],
) -> None:
    """Copies are made ahead of eviction for as many of the coldest blocks as one admission may take, a few a step."""
    store = make_store(blocks=34, host_blocks=64, spill_blocks_per_step=2, load_always=True)
    first, second = list(range(20 * B)), list(range(5000, 5000 + 28 * B))
    run_prompt(store, "a", first)
    store.finish("a")
    for _ in range(20):
        store.step()
    run_prompt(store, "b", second)
    assert store.metrics.get("evicted_blocks", tier="device", cause="room") >= 14
    assert store.lookup([*first, 1]).tokens == 20 * B
