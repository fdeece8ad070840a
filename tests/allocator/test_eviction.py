"""LRU against a plain ordered list, and the batch forms against each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allocator import LRU

IDS = 60


def array(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def test_oldest_release_goes_first_and_its_first_block_first_of_all() -> None:
    lru = LRU(IDS)
    lru.idle(array(5, 4, 3), 1)
    lru.idle([2, 1], 2)
    assert list(lru.victims(2)) == [5, 4]
    assert list(lru.victims(9)) == [3, 2, 1]
    assert len(lru) == 0


def test_a_hit_block_is_skipped_and_young_again() -> None:
    lru = LRU(IDS)
    lru.idle(array(5, 4, 3), 1)
    lru.busy([4])
    lru.idle([4], 2)
    assert list(lru.peek(9)) == [5, 3, 4]
    assert list(lru.victims(9)) == [5, 3, 4]


def test_a_run_goes_as_one_but_only_what_is_left_of_it() -> None:
    lru = LRU(IDS)
    lru.idle([1, 2, 3], 1, run=True)
    lru.idle([4, 5], 2)
    lru.busy([2])
    assert sorted(lru.victims(1)) == [1, 3]
    assert list(lru.victims(1)) == [4]


def test_blocks_that_may_not_go_keep_their_place() -> None:
    lru = LRU(IDS)
    lru.idle([1, 2, 3], 1)
    lru.idle([4], 2)
    assert list(lru.victims(2, lambda ids: ids != 1)) == [2, 3]
    assert list(lru.victims(2)) == [1, 4]


def test_ages_are_known_though_their_writing_is_put_off() -> None:
    lru = LRU(IDS)
    lru.idle([1, 2], 3)
    lru.idle(array(5, 4), 4)
    lru.idle_one(6, 5)
    lru.idle([7, 8], 6)
    assert list(lru.victims(2)) == [1, 2]
    assert list(lru.victims(1)) == [5]
    lru.idle_one(9, 7)
    assert [lru.since(block_id) for block_id in (4, 6, 7, 8, 9)] == [4, 5, 6, 6, 7]
    lru.busy([7])
    lru.idle([7, 2], 8)
    assert list(lru.victims(9)) == [4, 6, 8, 9, 7, 2]


def test_a_block_that_enters_late_keeps_its_age() -> None:
    lru = LRU(IDS)
    lru.idle([1], 5)
    lru.idle([2], 9)
    lru.idle([3], 7)
    assert list(lru.peek(3)) == [1, 3, 2]
    assert list(lru.victims(3)) == [1, 3, 2]


def test_case_124_a_chain_hit_in_part_loses_its_tail_first() -> None:
    lru = LRU(IDS)
    lru.idle(array(*range(7, -1, -1)), 1)
    lru.busy(array(0, 1, 2, 3))
    lru.idle(array(3, 2, 1, 0), 2)
    assert list(lru.victims(4)) == [7, 6, 5, 4]


def test_one_victim_is_not_cut_from_a_run_behind_a_stale_release() -> None:
    lru = LRU(IDS)
    lru.idle([2, 3, 4], 1)
    lru.busy([2, 3, 4])
    lru.idle([0, 1], 2, run=True)
    assert lru.victim_one() == -1
    assert list(lru.victims(1)) == [0, 1]
    assert len(lru) == 0


def test_hits_without_evictions_do_not_grow_the_queue() -> None:
    lru = LRU(IDS)
    for tick in range(1, 20_000):
        lru.idle_one(tick % 7, tick) if tick < 8 else (lru.busy([tick % 7]), lru.idle_one(tick % 7, tick))
    assert len(lru) == 7
    assert len(lru._segments) < 3_000


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_lru_does_what_a_plain_list_does(data: st.DataObject) -> None:
    """Releases (lists, arrays, runs, late ones), hits and evictions in any order."""
    lru = LRU(IDS)
    order: list[tuple[int, int, list[int], bool]] = []
    tick = 100
    for step in range(data.draw(st.integers(1, 25))):
        idle = [block_id for _, _, ids, _ in order for block_id in ids]
        kind = data.draw(st.sampled_from(["idle", "idle", "late", "busy", "victims", "held", "one"]))
        fresh = [block_id for block_id in range(IDS) if block_id not in idle]
        if kind in ("idle", "late") and fresh:
            size = min(len(fresh), data.draw(st.sampled_from([1, 2, 3, 40])))
            ids = fresh[:size]
            run = kind == "idle" and data.draw(st.booleans())
            tick += 100
            when = tick if kind == "idle" else data.draw(st.integers(0, tick // 100 - 1)) * 100 + 1 + step
            lru.idle(array(*ids) if data.draw(st.booleans()) else list(ids), when, run)
            order.extend([(when, step, ids, run)] if kind == "idle" else [(when, step, [i], False) for i in ids])
            order.sort(key=lambda entry: entry[0])
        elif kind == "busy" and idle:
            hit = data.draw(st.lists(st.sampled_from(idle), unique=True, max_size=5))
            lru.busy(hit if data.draw(st.booleans()) else array(*hit))
            order = [(when, at, [i for i in ids if i not in hit], run) for when, at, ids, run in order]
        elif kind == "one" and idle:
            block_id = lru.victim_one()
            if block_id >= 0:
                first = next(entry for entry in order if entry[2])
                assert block_id == first[2].pop(0)
                assert not first[3] or not first[2], "a run goes as one"
        elif kind in ("victims", "held"):
            held = set(idle[:: data.draw(st.integers(1, 4))]) if kind == "held" else set()
            count = data.draw(st.sampled_from([0, 1, 2, 5, 35, 50]))
            usable = (lambda ids, held=held: ~np.isin(ids, list(held))) if held else None
            expected: list[int] = []
            for _, _, ids, run in order:
                may_go = [i for i in ids if i not in held]
                room = count - len(expected)
                chosen = may_go if run and room > 0 else may_go[: max(0, room)]
                expected += chosen
                ids[:] = [i for i in ids if i not in chosen]
            assert list(lru.victims(count, usable)) == expected
        left = [block_id for _, _, ids, _ in order for block_id in ids]
        assert len(lru) == len(left)
        if data.draw(st.booleans()):  # a look writes the stamps that are put off, so not after every step
            assert list(lru.peek(IDS)) == left


@pytest.mark.parametrize("size", [1, 5, 33, 50])
def test_small_and_large_batches_evict_in_the_same_order(size: int) -> None:
    one, many = LRU(IDS), LRU(IDS)
    for lru in (one, many):
        lru.idle(array(*range(50)), 1)
    single = [int(i) for _ in range(size) for i in one.victims(1)]
    assert single == list(many.victims(size))
