"""Priorities in the pool, above every policy: who goes first, what nothing costs, and what ends."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from allocator import BlockPool, EvictionPolicy, ExtentLayout, UsageError
from allocator.block_marks import PLAIN, PRIORITY_DEFAULT, merged, steps_of
from allocator.eviction import LRU
from allocator.eviction_learned import Learned
from allocator.eviction_rivals import ARC, LRU2, S3FIFO, WTinyLFU
from allocator.eviction_shelves import Shelves

POLICIES = [LRU, Learned, LRU2, S3FIFO, ARC, WTinyLFU]
BLOCKS = 64


def make(policy: Callable[[int], EvictionPolicy] = LRU, blocks: int = BLOCKS) -> BlockPool:
    return BlockPool(ExtentLayout(64 * blocks, (64,), (), 64), policy)


def serve(pool: BlockPool, name: int, count: int, **wanted: object) -> list[int]:
    """A chain of new blocks, sealed, kept as wanted, told of and released."""
    ids = pool.allocate(0, count).tolist()
    pool.seal_many(ids, [bytes([name, place]) for place in range(count)], True)
    if wanted:
        pool.keep(ids, **wanted)  # type: ignore[arg-type]
    pool.policies[0].observe(np.array([name * 1000 + place for place in range(count)], dtype=np.uint64), (ids,))
    pool.release(ids[::-1])
    pool.policies[0].settle()
    return ids


def named(pool: BlockPool, name: int, count: int) -> int:
    return len(pool.match(0, [bytes([name, place]) for place in range(count)]))


@pytest.mark.parametrize("policy", POLICIES)
def test_ages_of_many_are_those_of_each_on_whatever_shelf_they_lie(policy: Callable[[int], EvictionPolicy]) -> None:
    pool, served = make(policy), list[int]()
    for name, level in enumerate((35, 80, 5, 35, 80, 60, 35), start=1):
        served += serve(pool, name, 4, steps=steps_of(level), first_use=True)
    pool.share(served[5:7])
    ids = np.array(random.Random(1).sample(served, len(served)), dtype=np.int32)
    ages = pool.idle_ticks(ids)
    assert ages.tolist() == [pool.idle_since(one) for one in ids.tolist()]
    assert len(set(ages.tolist())) == 8


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_no_block_goes_while_one_of_a_lower_priority_could(policy: Callable[[int], EvictionPolicy], seed: int) -> None:
    numbers, pool = random.Random(seed), make(policy)
    priority: dict[int, int] = {}
    gone: list[int] = []
    pool.on_evict = lambda group, ids, names, exact, form: gone.extend(ids)
    for name in range(1, 150):
        count, level = numbers.randint(1, 9), numbers.choice((5, PRIORITY_DEFAULT, PRIORITY_DEFAULT, 60, 90))
        if numbers.random() < 0.2:
            shared = numbers.randrange(max(1, name - 6), name + 1)
            ids = pool.match(0, [bytes([shared, place]) for place in range(count)])
            pool.share(ids)
            pool.keep(ids, steps_of(level))
            for one in ids:
                priority[one] = max(priority[one], level)
            pool.policies[0].observe(np.array([shared * 1000 + i for i in range(len(ids))], dtype=np.uint64), (ids,))
            pool.release(ids[::-1])
        gone.clear()
        before = {one: level for one, level in priority.items() if pool.is_idle(one)}
        ids = serve(pool, name, count, steps=steps_of(level), first_use=True)
        left = [before[one] for one in before if one not in gone]
        assert max((before[one] for one in gone), default=0) <= min(left, default=100)
        for one in gone:
            del priority[one]
        priority.update(dict.fromkeys(ids, level))
        assert {one: pool.priority_of(one) for one in priority} == priority
        pool.check_invariants()


def test_a_pool_without_priorities_runs_its_policy_as_it_is() -> None:
    pool = make()
    serve(pool, 1, 4, steps=PLAIN)
    assert isinstance(pool.policies[0], LRU)
    serve(pool, 2, 4, steps=steps_of(60))
    assert isinstance(pool.policies[0], Shelves)
    pool.check_invariants()


def test_a_name_of_the_past_leaves_no_priority_behind() -> None:
    pool = make(blocks=8)
    ids = serve(pool, 1, 8, steps=steps_of(90))
    pool.evict(ids)
    again = serve(pool, 2, 8)
    assert sorted(again) == sorted(ids)
    assert {pool.priority_of(one) for one in again} == {PRIORITY_DEFAULT}


def test_priorities_end_a_bounded_number_a_call_and_in_the_order_of_age() -> None:
    pool = make(blocks=1024)
    for name in range(100):
        serve(pool, name, 8, steps=steps_of(90, 10.0), first_use=True)
    serve(pool, 200, 8, steps=steps_of(60), first_use=True)
    pool.expire(11.0)
    assert pool.policies[0].count_up_to(PRIORITY_DEFAULT) == 256
    for _ in range(3):
        pool.expire(11.0)
    assert pool.policies[0].count_up_to(PRIORITY_DEFAULT) == 800
    assert isinstance(pool.policies[0], Shelves)
    assert len(pool.policies[0]._ends) == 0
    serve(pool, 201, 1024 - 808 + 16)
    assert [named(pool, name, 8) for name in (0, 1, 2, 200)] == [0, 0, 8, 8]
    pool.check_invariants()


def test_of_two_orders_the_higher_counts_as_long_as_it_lasts() -> None:
    pool = make()
    ids = serve(pool, 1, 4, steps=steps_of(90, 10.0), first_use=True)
    pool.keep(ids[:2], steps_of(60, 20.0))
    seen = []
    for now in (5.0, 15.0, 25.0):
        pool.expire(now)
        seen.append([pool.priority_of(one) for one in ids])
    assert seen == [[90] * 4, [60, 60, 35, 35], [35] * 4]
    assert merged(((90, 10.0),), ((60, 5.0), (50, 20.0))) == ((90, 10.0), (50, 20.0))


def test_what_is_held_of_a_tenant_stays_and_others_lose_nothing() -> None:
    pool = make()
    serve(pool, 1, 8, tenant=1)
    pinned = serve(pool, 2, 4, tenant=1)
    others = serve(pool, 3, 8, tenant=2)
    pool.pin(pinned)
    assert pool.idle_bytes_of(1) == 12 * 64
    assert pool.evict_of(1, 3 * 64) == 3 * 64
    assert named(pool, 1, 8) == 5  # leaves first
    assert pool.evict_of(1, 1 << 20) == 5 * 64
    assert pool.idle_bytes_of(1) == 4 * 64
    assert named(pool, 3, 8) == len(others) == 8
    assert pool.evict_of(9, 64) == 0
    assert pool.live_bytes([np.array(others, dtype=np.int32)]) == 0
    pool.unpin(pinned)
    pool.check_invariants()


def test_blocks_that_have_no_name_are_not_kept() -> None:
    pool = make()
    ids = pool.allocate(0, 2).tolist()
    with pytest.raises(UsageError, match="expected sealed or idle blocks to keep"):
        pool.keep(ids, steps_of(60))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_look_at_none_of_the_coldest_is_empty(policy: Callable[[int], EvictionPolicy]) -> None:
    """Found by the pool's machine, when a class had no slot to give."""
    pool = make(policy)
    assert len(pool.coldest(0, 0)) == 0
    serve(pool, 1, 4, steps=steps_of(60))
    assert len(pool.coldest(0, 0)) == 0


def test_a_run_with_one_kept_block_stays_together() -> None:
    """Found by the priority machine: the others were put beside it, and looked for among the plain ones."""
    pool = make()
    ids = pool.allocate(0, 4).tolist()
    pool.seal_many(ids, [bytes([1, place]) for place in range(4)], True)
    pool.keep(ids[1:2], steps_of(60, 10.0))
    pool.release(ids[::-1], run=True)
    pool.check_invariants()
    assert pool.policies[0].count_up_to(PRIORITY_DEFAULT) == 0
    pool.share(ids[2:])
    pool.check_invariants()
    pool.release(ids[:1:-1], run=True)
    pool.expire(11.0)
    assert pool.policies[0].count_up_to(PRIORITY_DEFAULT) == 4
    pool.check_invariants()
