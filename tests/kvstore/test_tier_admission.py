"""What enters a slower tier: what was seen twice, was used above, comes back for sure, or is long; else nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import ConfigError, HostTier, KVStoreConfig
from kvstore.costs import CostModel
from kvstore.tier_admission import AdmitAll, AdmitReused, Candidate, Cause, TierAdmission, make_admission
from tests.kvstore.driving import compute
from tests.kvstore.writing_kit import SLOT, B, distant, offered, prompt, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

HASHES = [bytes([number]) * 32 for number in range(9)]


def one(number: int, cause: Cause = Cause.COMPUTED, **fields: int) -> Candidate:
    return Candidate(HASHES[number], cause, B, 1 << 20, **fields)


def policy(ghost_blocks: int = 100) -> AdmitReused:
    return AdmitReused(CostModel(prefill_tokens_per_second=2000), ghost_blocks)


def test_a_block_enters_when_it_was_seen_twice() -> None:
    reused = policy()
    assert reused.admits("disk", [one(0)]) == [False]
    reused.note_use(HASHES[:2])
    assert reused.admits("disk", [one(0), one(1)]) == [False, False]
    reused.note_use(HASHES[1:3])
    assert reused.admits("disk", [one(0), one(1), one(2)]) == [False, True, False]


def test_the_ghost_table_is_bounded_and_forgets_the_oldest() -> None:
    reused = policy(ghost_blocks=4)
    reused.note_use(HASHES[:3])
    reused.note_use(HASHES[:1])
    reused.note_use(HASHES[3:5])
    assert reused.remembered_count == 4
    reused.note_use([HASHES[1]])
    assert reused.admits("disk", [one(0), one(1)]) == [True, False], "the one was forgotten before it came again"


@pytest.mark.parametrize("cause", [Cause.PREEMPTED, Cause.ASKED])
def test_what_comes_back_for_sure_enters(cause: Cause) -> None:
    assert policy().admits("disk", [one(0, cause)]) == [True]


def test_what_was_used_above_enters_and_what_was_not_does_not() -> None:
    used, unused = one(0, Cause.FADING, is_used=True), one(1, Cause.FADING)
    assert policy().admits("disk", [used, unused]) == [True, False]


def test_long_prefixes_enter_at_first_sight_with_their_fronts() -> None:
    assert policy().admits("disk", [one(0, prefix_tokens=256), one(1, prefix_tokens=1024)]) == [False, True]


def test_nothing_enters_a_tier_that_is_slower_than_computing() -> None:
    costs = CostModel(prefill_tokens_per_second=2000)
    reused = AdmitReused(costs)
    for _ in range(9):
        costs.observe_load("remote", 1 << 20, 0.5)
    wanted = [one(0, Cause.PREEMPTED), one(1, prefix_tokens=100_000)]
    assert reused.admits("remote", wanted) == [False, False]
    assert reused.admits("disk", wanted) == [True, True]


def test_the_setting_names_a_policy() -> None:
    costs = CostModel(prefill_tokens_per_second=2000)
    assert isinstance(make_admission(KVStoreConfig().spill_policy, costs), AdmitReused)
    everything: TierAdmission = make_admission("everything", costs)
    assert isinstance(everything, AdmitAll)
    assert everything.admits("disk", [one(0), one(1)]) == [True, True]
    with pytest.raises(ConfigError, match="spill_policy"):
        KVStoreConfig(spill_policy="always")


def test_a_store_writes_down_what_two_requests_shared(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=200, tiers=[disk])
    serve(store, "a", prompt(1, 4) + prompt(5, 2))
    assert work.tasks == []
    assert offered(store, "disk")["refused"] > 0
    assert serve(store, "b", prompt(1, 4)[: 4 * B] + prompt(6, 2)) == 4 * B
    work.run()
    store.step()
    assert disk.copy_count == 4, "the shared blocks, and neither request's own"


def test_one_request_alone_is_not_two_sightings(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=200, tiers=[disk])
    store.admit("a", prompt(1, 4))
    for chunk in range(4):
        compute(store, "a", prompt(1, 4)[chunk * B : (chunk + 1) * B])
        store.prefill_done("a")
    store.finish("a")
    store.step()
    assert work.tasks == []


def test_what_the_host_is_about_to_evict_goes_to_the_disk_when_it_was_used(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    host = HostTier(16 * SLOT)
    store = make_store(blocks=8, tiers=[host, disk], load_always=True)
    serve(store, "a", prompt(1, 5))
    store.demote(prompt(1, 5))
    store.step()
    assert store.promote(prompt(1, 5)) == 5 * B  # read up from the host: these copies are used
    store.step()
    store.demote(prompt(1, 5))
    for seed in range(2, 9):
        serve(store, "b", prompt(seed, 5))
        store.demote(prompt(seed, 5))
        store.step()
        work.run()
    assert store.lookup(prompt(1, 5)).by_tier == {"disk": 5 * B}
    assert store.lookup(prompt(3, 5)).tokens == 0, "nobody used it: it is gone"
    assert store.metrics.snapshot()['evicted_blocks_total{tier="host",cause="room"}'] > 0
    assert store.metrics.get("offered_blocks", tier="disk", outcome="refused") > 0
