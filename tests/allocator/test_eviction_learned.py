"""The learning policy and its rivals under random use, and what the learning policy learns."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from allocator.eviction import LRU, EvictionPolicy, Usable
from allocator.eviction_factors import OWNERS, POSITIONS, ReuseFactors
from allocator.eviction_floor import _START_REQUESTS, Floor
from allocator.eviction_learned import Learned, Reuse
from allocator.eviction_reuse import BINS, ReuseMemory
from allocator.eviction_rivals import ARC, LRU2, S3FIFO, WTinyLFU
from allocator.eviction_shadow import ShadowCache
from tests.fickle_reuse import FickleReuse

IDS = 60


def keys(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def all_but(held: set[int]) -> Usable:
    return lambda ids: np.array([int(one) not in held for one in ids], dtype=bool)


def fickle(capacity: int) -> Learned:
    return Learned(capacity, FickleReuse(capacity))


def steady(capacity: int) -> Learned:
    return Learned(capacity, FickleReuse(capacity, steady=True))


@pytest.mark.parametrize("policy", [LRU, Learned, fickle, steady])
@pytest.mark.parametrize("seed", range(4))
def test_a_block_may_come_back_at_a_tick_that_it_was_there_before(policy: Callable[[int], LRU], seed: int) -> None:
    """Found by the priority machine: the stale entry of that tick counted again, and tick 0 was taken for none."""
    numbers = random.Random(seed)
    order = policy(6)
    idle: dict[int, int] = {}
    newest = 1
    for _ in range(600):
        newest += numbers.random() < 0.1
        free = [one for one in range(6) if one not in idle]
        choice = numbers.random()
        if choice < 0.5 and free:
            batch = numbers.sample(free, numbers.randint(1, len(free)))
            tick = max(0, newest - numbers.randrange(3))
            order.idle(batch, tick)
            idle |= dict.fromkeys(batch, tick)
        elif choice < 0.9 and idle:
            batch = numbers.sample(sorted(idle), numbers.randint(1, len(idle)))
            (order.busy if numbers.random() < 0.5 else order.forget)(batch)
            idle = {one: tick for one, tick in idle.items() if one not in batch}
        elif idle:
            gone = [int(one) for one in order.victims(1)]
            assert len(set(gone)) == len(gone) == 1
            del idle[gone[0]]
        if numbers.random() < 0.5:
            order.settle()
        assert len(order) == len(idle)
        assert sorted(order.peek(6).tolist()) == sorted(idle)
        assert {one: order.since(one) for one in idle} == idle


@pytest.mark.parametrize("policy", [Learned, fickle, steady, LRU2, S3FIFO, ARC, WTinyLFU])
@pytest.mark.parametrize("seed", range(4))
def test_every_idle_block_goes_once_and_no_other(policy: Callable[[int], EvictionPolicy], seed: int) -> None:
    numbers = random.Random(seed)
    order = policy(IDS)
    idle: set[int] = set()
    held: set[int] = set()
    for tick in range(1, 601):
        free = [one for one in range(IDS) if one not in idle]
        choice = numbers.random()
        if choice < 0.5 and free:
            batch = numbers.sample(free, min(len(free), numbers.randint(1, 6)))
            order.observe(keys(*(numbers.randrange(200) * 64 + place for place in range(len(batch)))), (batch[::-1],))
            order.idle(batch, 10 * tick - (73 if numbers.random() < 0.1 else 0))
            idle |= set(batch)
            if numbers.random() < 0.7:
                order.settle()
        elif choice < 0.6 and idle:
            batch = numbers.sample(sorted(idle), min(len(idle), 3))
            (order.busy if numbers.random() < 0.6 else order.forget)(batch)
            idle -= set(batch)
        elif choice < 0.65 and not held:
            block_id = order.victim_one()
            assert block_id in idle if idle and block_id != -1 else block_id == -1
            idle -= {block_id}
        elif choice < 0.7:
            held = set(numbers.sample(range(IDS), 20)) if numbers.random() < 0.7 else set()
        else:
            wanted = numbers.randint(1, 5)
            usable = all_but(held) if held else None
            may_go = idle - held
            assert set(order.peek(wanted, usable).tolist()) <= may_go
            gone = [int(one) for one in order.victims(wanted, usable)]
            assert len(set(gone)) == len(gone) == min(wanted, len(may_go))
            assert set(gone) <= may_go
            idle -= set(gone)
        assert len(order) == len(idle)
    assert {int(one) for one in order.victims(IDS)} == idle
    assert len(order) == 0


@pytest.mark.parametrize("policy", [Learned, fickle, steady])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_what_it_would_evict_next_is_what_it_evicts(policy: Callable[[int], Learned], one_by_one: bool) -> None:
    numbers = random.Random(9)
    order = policy(IDS)
    for tick in range(1, 20):
        batch = [3 * tick, 3 * tick + 1, 3 * tick + 2]
        order.observe(keys(*(numbers.randrange(1000) for _ in batch)), (batch[::-1],))
        order.idle(batch, tick)
        if tick != 19:
            order.settle()
    order.busy([9, 30, 57])
    order.idle([30], 30)
    expected = order.peek(54).tolist()
    if one_by_one:
        assert [order.victim_one() for _ in expected] == expected
    else:
        assert list(order.victims(25)) + list(order.victims(29)) == expected
    assert len(order) == 1


def test_without_being_told_anything_it_is_lru() -> None:
    order = Learned(IDS)
    order.idle([5, 4, 3], 1)
    order.idle([2, 1], 2)
    order.busy([4])
    order.idle([4], 3)
    assert order.since(4) == 3
    assert list(order.victims(9)) == [5, 3, 2, 1, 4]


def test_a_block_that_enters_late_keeps_its_age_and_a_run_goes_as_one() -> None:
    order = Learned(IDS)
    for tick in range(1, 9):
        order.idle([tick], tick)
    order.idle([20], 3)
    assert list(order.victims(9)).index(20) in (2, 3)
    order.idle([30, 31, 32], 20, run=True)
    order.idle([33], 21)
    assert list(order.victims(1)) == [30, 31, 32]


def test_classes_that_come_back_are_kept_longer_than_those_that_never_do() -> None:
    memory = ReuseMemory(400)
    numbers = random.Random(1)
    levels = {}
    for turn in range(4000):
        if turn % 2:  # one of 60 chains of 5 blocks: always the same
            first = 10_000 + 5 * numbers.randrange(60)
            levels["again"] = int(memory.observe(keys(*range(first, first + 5)))[0].max())
        else:
            first = 100_000 + 20 * turn
            levels["never"] = int(memory.observe(keys(*range(first, first + 20)))[0].max())
    assert levels["again"] > levels["never"] + 4
    assert levels["never"] < BINS // 2 + 1
    assert len(memory.ages) == BINS + 1


def test_of_blocks_that_come_back_alike_those_with_a_copy_below_are_cheaper_to_lose() -> None:
    """Two kinds of chains with the same reuse; of the first a fetch, of the second computing again is the price."""
    reuse, numbers = Reuse(1000, 400), random.Random(2)
    policy = Learned(1000, reuse)
    for turn in range(6000):
        is_copied = turn % 2 == 0
        first = (10_000 if is_copied else 20_000) + 5 * numbers.randrange(80)
        ids = [100 + place for place in range(5)] if is_copied else [200 + place for place in range(5)]
        policy.observe(keys(*range(first, first + 5)), (ids,), np.full(5, 0.002 if is_copied else 0.02))
    assert reuse.wanted[200:205].min() > reuse.wanted[100:105].max()


def test_of_equal_requests_those_of_an_owner_who_comes_back_are_kept_longer() -> None:
    """Two owners, chains of the same lengths; nothing but the owner tells which come back."""
    memory, numbers = ReuseMemory(600), random.Random(3)
    levels = {1: 0, 2: 0}
    waiting: list[int] = []
    for turn in range(6000):
        owner = 1 + turn % 2
        first = 100_000 + 20 * turn
        if owner == 1 and len(waiting) > 20 and turn % 4:
            first = waiting.pop(numbers.randrange(len(waiting)))
        elif owner == 1:
            waiting.append(first)
        found, _ = memory.observe(keys(*range(first, first + 12)), None, owner << 40)
        levels[owner] = int(found.max())
    told = memory._factors
    assert told.steps[told.cells(1 << 40, 12)].min() > 0 > told.steps[told.cells(2 << 40, 12)].max()


def test_factors_are_a_table_of_fixed_size_for_any_owner_and_length() -> None:
    factors, numbers = ReuseFactors(0.9), random.Random(4)
    for _ in range(50):
        cells = factors.cells(numbers.getrandbits(64), numbers.choice((1, 7, 300, 70_000)))
        assert 0 <= cells.min() <= cells.max() < OWNERS * POSITIONS == len(factors.steps)
        assert (np.diff(cells) >= 0).all(), "positions rise within the owner's row"
    assert not factors.steps.any(), "nothing is known"


def test_a_shadow_goes_on_by_the_other_order() -> None:
    shadow = ShadowCache(3)
    for key, until, other in ((1, 5.0, 1.0), (2, 4.0, 2.0), (3, 3.0, 3.0)):
        shadow.request([key], [until], None, [other])
    other = shadow.turned()
    assert other.holds_what(shadow)
    assert (shadow.request([4], [9.0]), other.request([4], [9.0])) == (0, 0)
    assert not other.holds_what(shadow)
    assert shadow.request([1], [9.0]) == 1, "3 was the first to go"
    assert other.request([3], [9.0]) == 1, "and by the other order 1"


def test_a_shadow_keeps_parents_with_their_children_and_within_its_room() -> None:
    shadow = ShadowCache(4)
    shadow.request([1, 2, 3], [9.0, 5.0, 8.0])
    shadow.request([4], [6.0])
    shadow.request([1, 2, 3], [1.0, 1.0, 1.0])
    assert shadow.hits == 3
    shadow.request([7, 8], [9.0, 9.0])  # takes the places of 4, and of the leaf 3
    shadow.request([1, 2, 3], [9.0, 9.0, 9.0])
    assert shadow.hits == 5


def test_lru_is_left_after_a_start_for_a_clear_lead_and_followed_again_as_soon_as_that_shrinks() -> None:
    floor = Floor(100)

    def epoch(requests: int, recency_hits: int, learned_hits: int) -> bool:
        for _ in range(requests):
            floor.request(keys(*range(100)), 0, 1, np.zeros(100), None)
        floor._recency.hits, floor._learned.hits = recency_hits, learned_hits
        floor.end_epoch()
        return floor.prefers_recency

    assert epoch(_START_REQUESTS - 10, 10_000, 20_000), "too early to tell luck from gain"
    assert epoch(5, 0, 0)
    assert not epoch(10, 0, 0)
    assert not epoch(10, 100, 100), "no gain is no loss"
    assert not epoch(10, 200, 100), "a little may be lost"
    assert epoch(10, 400, 100), "still far ahead, but not for long: what LRU has is what comes back now"


def told(floor: Floor, recency_hits: float, learned_hits: float, *, gained: float = 0.0, requests: int = 10) -> bool:
    """An epoch of so many hits by each order; whether LRU is followed after it."""
    for _ in range(requests):
        floor.request(keys(*range(100)), 0, 1, np.zeros(100), None)
    floor._recency.hits, floor._learned.hits = recency_hits, learned_hits
    floor._gained_blocks += gained
    floor.end_epoch()
    return floor.prefers_recency


def test_lru_is_not_left_for_a_lead_of_the_past() -> None:
    floor = Floor(100)
    assert told(floor, 10_000, 20_000, requests=_START_REQUESTS - 20), "too early"
    assert told(floor, 10_000, 9_000), "far ahead still, and losing"
    assert told(floor, 1000, 800)
    assert not all(told(floor, 1000, 1500) for _ in range(40)), "it grows again"


def test_each_time_that_lru_was_left_in_vain_the_lead_has_to_be_twice_as_large() -> None:
    floor = Floor(100)
    floor._followed = floor._recency.turned()
    told(floor, 0, 0, requests=_START_REQUESTS)
    needed = []
    for _ in range(3):
        floor._recency_hits, floor._learned_hits, floor._best_lead, floor._gained_blocks = 10_000, 10_000, 0, 0
        while told(floor, 0, 100, requests=0):
            pass
        needed.append(round(floor._learned_hits - floor._recency_hits, -2))
        assert told(floor, 5000, 0, gained=-1.0, requests=0)
    assert needed[1] > 1.6 * needed[0]
    assert needed[2] > 1.6 * needed[1]
    floor._recency_hits = floor._learned_hits = floor._best_lead = floor._gained_blocks = 0
    assert not told(floor, 0, 100, requests=0)
    assert told(floor, 5000, 0, gained=50.0, requests=0), "it has paid"
    assert floor._vain_count == 2


def test_where_requests_are_heavy_lru_is_left_later() -> None:
    light, heavy = Floor(100), Floor(100)
    for floor, sizes in ((light, (40, 40)), (heavy, (1, 800))):
        for number in range(_START_REQUESTS + 50):
            blocks = sizes[number % 30 == 0]
            floor.request(keys(*range(blocks)), 0, number, np.zeros(blocks), None)
        floor._seen_blocks = 30_000
        floor._recency.hits, floor._learned.hits = 0, 10_000
        floor.end_epoch()
    assert not light.prefers_recency
    assert heavy.prefers_recency


def test_the_learned_order_is_left_at_once_when_it_has_cost_its_share_of_all_blocks() -> None:
    """LRU would hit a small set each time; the learned order throws it out."""
    floor = Floor(10)
    for number in range(_START_REQUESTS + 50):
        floor.request(keys(*range(1000 * number, 1000 * number + 100)), 0, number, np.zeros(100), None)
    floor._recency.hits, floor._learned.hits = 1, 1000
    floor.end_epoch()
    assert not floor.prefers_recency
    seen, turns = floor._seen_blocks, 0
    while not floor.prefers_recency:
        turns += 1
        floor.request(keys(1, 2, 3, 4), 0, 10_000 + turns, np.zeros(4), None)
        floor.request(keys(*range(10**9 + 6 * turns, 10**9 + 6 * turns + 6)), 0, 10_000 + turns, np.full(6, 1e9), None)
        assert turns < 200
    assert -floor._gained_blocks == pytest.approx(0.002 * seen, rel=0.1)
    floor._recency_hits, floor._learned_hits = 100.0, 110.0
    floor.end_epoch()
    assert floor.prefers_recency, "a lead of so little does not pay for what was lost"


@pytest.mark.parametrize("capacity", [2_000, 20_000])
def test_the_end_of_an_epoch_looks_at_requests_and_not_at_their_blocks(capacity: int) -> None:
    """Counted, not timed: what is looked at once an epoch, beside the records that it stands for."""
    memory, numbers = ReuseMemory(capacity), random.Random(6)
    for number in range(80):
        first = 1_000_000 * numbers.randrange(60)
        memory.observe(keys(*range(first, first + 400), *range(10**9 + 100 * number, 10**9 + 100 * number + 100)))
    remembered = np.flatnonzero(memory._last[:: memory._stride]) * memory._stride
    pairs, counts = np.unique(memory._last[remembered] * 64 + memory._class[remembered], return_counts=True)
    assert memory._open == dict(zip(pairs.tolist(), counts.tolist(), strict=True))
    assert memory.epoch > 3
    assert len(memory._open) < len(remembered) / 80
