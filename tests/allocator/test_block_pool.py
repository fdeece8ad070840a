"""Block life, names, holds, room, cooling and compaction, one rule a test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

from allocator import COLD, FULL, BlockPool, BlockState, CapacityError, UsageError

Hashes = Callable[..., list[bytes]]
MakePool = Callable[..., BlockPool]
pytestmark = pytest.mark.usefixtures("each_form")


def sealed(pool: BlockPool, names: list[bytes], exact: bool = True, group: int = 0) -> list[int]:
    return pool.seal_many(pool.allocate(group, len(names)), names, exact).tolist()


def test_importing_the_allocator_loads_no_torch() -> None:
    code = "import sys, allocator; assert 'torch' not in sys.modules; assert 'Slab' in dir(allocator)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_block_lives_from_free_to_free(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (block_id,) = pool.allocate(0, 1).tolist()
    assert pool.state_of(block_id) is BlockState.OPEN
    assert pool.seal(block_id, hashes(1)[0], True) == block_id
    assert pool.state_of(block_id) is BlockState.SEALED
    pool.release([block_id])
    assert pool.state_of(block_id) is BlockState.IDLE
    assert pool.match(0, hashes(3)) == [block_id]
    pool.evict([block_id])
    assert pool.state_of(block_id) is BlockState.FREE
    assert pool.match(0, hashes(3)) == []
    assert pool.hash_of(block_id) is None
    pool.check_invariants([])


def test_allocate_is_all_or_nothing(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    pool.release(sealed(pool, hashes(3)))
    with pytest.raises(CapacityError, match="needed 7 blocks, 6 available") as caught:
        pool.allocate(0, 7)
    assert (caught.value.needed, caught.value.available) == (7, 6)
    assert pool.evicted_count == 0
    assert len(pool.match(0, hashes(3))) == 3


def test_free_memory_is_used_before_anything_is_evicted(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(20)
    pool.release(sealed(pool, hashes(2)))
    pool.allocate(0, 16)
    assert pool.evicted_count == 0
    pool.allocate(0, 1)
    assert pool.evicted_count == 1


def test_leaves_go_first(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(10)
    names = hashes(4)
    pool.release(sealed(pool, names)[::-1])
    pool.allocate(0, 6)
    assert len(pool.match(0, names)) == 2


def test_a_bigger_batch_sees_the_same_rules_as_a_small_one(make_pool: MakePool, hashes: Hashes) -> None:
    """The numpy and the plain Python paths of allocate, seal, release and share: same states, order and counts."""
    small, large = make_pool(200), make_pool(200)
    names = hashes(150)
    for pool, step in ((small, 1), (large, 150)):
        ids = np.concatenate([pool.allocate(0, step) for _ in range(0, 150, step)])
        for start in range(0, 100, min(step, 100)):
            chunk = slice(start, start + min(step, 100))
            ids[chunk] = pool.seal_many(ids[chunk], names[chunk], True)
        pool.share(ids[:40])
        pool.pin(ids[60:70])
        for start in range(0, 150, step):
            pool.release(ids[start : start + step])
        pool.check_invariants()
        pool.named_order = [names.index(pool.hash_of(i)) for i in pool.policies[0].peek(200).tolist()]  # type: ignore[attr-defined]
    assert small.named_order == large.named_order == list(range(40, 100))  # type: ignore[attr-defined]
    for count in ("free_count", "idle_count"):
        assert getattr(small, count)(0) == getattr(large, count)(0)
    assert small.held_idle_counts == large.held_idle_counts == [10, 0]


@pytest.mark.parametrize("size", [2, 40])
def test_case_032_a_block_twice_in_one_call_is_refused(size: int, make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(100)
    ids = pool.allocate(0, size).tolist()
    ids[: size // 2] = pool.seal_many(ids[: size // 2], hashes(size // 2), True).tolist()
    for wrong in ([*ids, ids[0]], [*ids, ids[-1]], [ids[0], *ids]):
        with pytest.raises(UsageError):
            pool.release(wrong)
        pool.check_invariants()
        assert [pool.ref_count(block_id) for block_id in ids] == [1] * size
    pool.release(ids)
    free = pool.free_count(0)
    for again in (ids, ids[:1], ids[-1:]):
        with pytest.raises(UsageError):
            pool.release(again)
    assert pool.free_count(0) == free == len(set(pool.ledger.free[0].held().tolist()))
    pool.release([-1])
    pool.release(np.full(50, -1, dtype=np.int32))
    pool.check_invariants([])


@pytest.mark.parametrize("wrong", [-2, 10_000, 200, -7])
def test_case_032_an_id_that_does_not_exist_is_refused(wrong: int, make_pool: MakePool) -> None:
    pool = make_pool(8)
    ids = pool.allocate(0, 4).tolist()
    for batch in ([*ids, wrong], [wrong], [wrong] * 40, [*ids, *[-1] * 40, wrong]):
        with pytest.raises(UsageError):
            pool.release(batch)
        pool.check_invariants()
    assert pool.live_block_count == 4


def test_case_048_two_owners_of_one_reference(make_pool: MakePool) -> None:
    """A prefetch and a tree node both believe to own the block: the second release is refused, nobody gets it twice."""
    pool = make_pool(8)
    block_id = pool.allocate_one(0)
    pool.begin_transfer([block_id])
    pool.release_one(block_id)
    with pytest.raises(UsageError, match="FENCED"):
        pool.release_one(block_id)
    owners = pool.allocate(0, pool.available(0)).tolist()
    assert block_id not in owners
    assert len(set(owners)) == len(owners)
    pool.end_transfer([block_id])
    with pytest.raises(UsageError, match="in flight"):
        pool.end_transfer([block_id])
    assert pool.allocate_one(0) == block_id
    pool.check_invariants()


def test_sealing_a_known_hash_returns_the_block_that_has_it(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (name,) = hashes(1)
    first, second = pool.allocate(0, 2).tolist()
    assert pool.seal(first, name, True) == first
    assert pool.seal(second, name, True) == first
    assert (pool.ref_count(first), pool.state_of(second)) == (2, BlockState.FREE)
    pool.release([first])
    pool.release([first])
    third = pool.allocate_one(0)
    assert pool.seal(third, name, True) == first
    assert pool.state_of(first) is BlockState.SEALED
    pool.check_invariants()


def test_exact_and_lossy_never_merge(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (name,) = hashes(1)
    lossy, exact = pool.allocate(0, 2).tolist()
    assert pool.seal(lossy, name, False) == lossy
    assert pool.match(0, [name], exact_only=True) == []
    assert pool.match(0, [name]) == [lossy]
    assert pool.seal(exact, name, True) == exact
    assert pool.match(0, [name]) == [exact]
    pool.check_invariants()


def test_seal_refuses_what_is_not_open(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    one, two = hashes(2)
    (block_id,) = sealed(pool, [one])
    assert pool.seal(block_id, one, True) == block_id
    with pytest.raises(UsageError, match="under another hash"):
        pool.seal(block_id, two, True)
    with pytest.raises(UsageError, match="one hash a block"):
        pool.seal_many([block_id], [one, two], True)
    pool.release([block_id])
    with pytest.raises(UsageError, match="IDLE"):
        pool.seal(block_id, one, True)


def test_a_batch_with_a_hash_twice_or_known_seals_like_single_ones(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(12)
    names = hashes(3)
    (known,) = sealed(pool, names[:1])
    ids = pool.allocate(0, 4)
    got = pool.seal_many(ids, [names[0], names[1], names[1], names[2]], True).tolist()
    assert got == [known, ids[1], ids[1], ids[3]]
    assert pool.ref_count(known) == pool.ref_count(int(ids[1])) == 2
    pool.check_invariants()


def test_case_107_a_commit_never_evicts_and_its_blocks_are_never_victims(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(10)
    names = hashes(40)
    pool.release(sealed(pool, names[30:38])[::-1])
    mine: list[int] = []
    for number in range(8):
        mine.append(pool.allocate_one(0))
        before = pool.evicted_count
        mine[-1] = pool.seal(mine[-1], names[number], True)
        assert pool.evicted_count == before
        assert all(pool.state_of(block_id) is BlockState.SEALED for block_id in mine)
        pool.check_invariants()
    assert pool.match(0, names[:8]) == mine
    with pytest.raises(CapacityError):
        pool.allocate_one(0)
    assert pool.match(0, names[:8]) == mine


def test_case_079_pins_survive_a_load_that_fails_half_way(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(12)
    ids = sealed(pool, hashes(6))
    pool.release(ids)
    for broken in range(6):
        done: list[int] = []
        for place, block_id in enumerate(ids):
            if place == broken:
                break
            pool.pin([block_id])
            done.append(block_id)
        assert not set(pool.coldest(0, 6).tolist()) & set(done)
        victims = pool.available(0) - pool.free_count(0)
        pool.unpin(done)
        assert victims >= 6 - broken
        pool.check_invariants([])
    assert not pool.pins.any()


def test_pinned_and_flying_blocks_are_not_handed_out(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    ids = sealed(pool, hashes(6))
    pool.release(ids)
    pool.pin(ids[:2])
    pool.begin_transfer(ids[2:3])
    assert pool.available(0) == 3
    assert not set(pool.allocate(0, 3).tolist()) & set(ids[:3])
    with pytest.raises(CapacityError):
        pool.allocate_one(0)
    with pytest.raises(UsageError, match="not held"):
        pool.evict(ids[:1])
    pool.unpin(ids[:2])
    assert pool.available(0) == 2
    pool.check_invariants()


def test_case_009_a_released_block_is_fenced_until_its_transfer_ends(make_pool: MakePool) -> None:
    pool = make_pool(8)
    ids = pool.allocate(0, 6).tolist()
    pool.begin_transfer(ids[:1])
    pool.begin_transfer(ids[:1])
    pool.release(ids)
    pool.end_transfer(ids[:1])
    assert pool.state_of(ids[0]) is BlockState.FENCED
    assert ids[0] not in pool.allocate(0, 5).tolist()
    pool.end_transfer(ids[:1])
    assert pool.allocate(0, 1).tolist() == ids[:1]


@pytest.mark.parametrize("order", ["abort,end,unpin", "abort,unpin,end", "end,abort,unpin", "end,unpin,abort",
                                   "unpin,abort,end", "unpin,end,abort"])  # fmt: skip
def test_case_051_every_order_of_abort_and_completion_frees_once(order: str, make_pool: MakePool) -> None:
    pool = make_pool(8)
    total = pool.available(0)
    block_id = pool.allocate_one(0)
    pool.begin_transfer([block_id])
    pool.pin([block_id])
    calls = {
        "abort": lambda: pool.release([block_id]),
        "end": lambda: pool.end_transfer([block_id]),
        "unpin": lambda: pool.unpin([block_id]),
    }
    for step in order.split(","):
        calls[step]()
        pool.check_invariants()
    assert pool.state_of(block_id) is BlockState.FREE
    assert pool.available(0) == total


def test_eviction_is_told_in_batches_before_reuse(make_pool: MakePool, hashes: Hashes) -> None:
    told: list[tuple[object, ...]] = []
    pool = make_pool(42, on_evict=lambda *event: told.append(event))
    names = hashes(40)
    ids = sealed(pool, names)
    pool.release(ids)
    pool.allocate(0, 2)
    pool.allocate(0, 38)
    assert told == [
        (0, ids[:2], names[:2], [True] * 2, FULL),
        (0, ids[2:], names[2:], [True] * 38, FULL),
    ]


def test_a_sliding_run_goes_as_one(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(12)
    names = hashes(10)
    run, rest = sealed(pool, names[:4]), sealed(pool, names[4:10])
    pool.release(run, run=True)
    pool.release(rest)
    pool.allocate(0, 1)
    assert pool.index(0).find_many(names) == [-1] * 4 + rest


def test_usage_adds_up_to_the_byte(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(21)
    ids = sealed(pool, hashes(5))
    pool.release(ids[:2])
    for block_id in ids:
        target = pool.begin_cool(block_id)
        assert target is not None
        assert pool.finish_cool(block_id, target)
    usage = pool.usage()
    assert usage.total_bytes == 21 * 512 == usage.tail_bytes + usage.unassigned_bytes + usage.in_use_bytes
    assert usage.tail_bytes == 512
    assert (usage.of(0, COLD).sealed_blocks, usage.of(0, COLD).idle_blocks) == (3, 2)
    assert usage.live_bytes == 3 * 128
    assert usage.used_bytes == 5 * 128
    assert pool.live_block_count == 3


@pytest.mark.parametrize(("group", "form", "count"), [(1, 0, 1), (-1, 0, 1), (0, 2, 1), (0, -1, 1), (0, 0, -1)])
def test_bad_requests_are_refused(group: int, form: int, count: int, make_pool: MakePool) -> None:
    pool = make_pool(8)
    with pytest.raises(UsageError, match="expected"):
        pool.allocate(group, count, form)
    if count == 1:
        with pytest.raises(UsageError, match="expected"):
            pool.allocate_one(group, form)
    pool.check_invariants([])


def test_a_form_that_the_device_lacks_has_no_capacity(make_pool: MakePool) -> None:
    pool = make_pool(8, cold=False)
    with pytest.raises(CapacityError):
        pool.allocate(0, 1, COLD)
    assert pool.begin_cool(pool.seal(pool.allocate_one(0), b"x" * 32, True)) is None
    assert pool.available(0) == 7
