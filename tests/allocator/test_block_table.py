"""Tables: growth, fork and copy on write, rollback, windows, and what engines get."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from allocator import (
    BlockPool,
    BlockState,
    BlockTable,
    CannotRollback,
    CapacityError,
    KVError,
    UsageError,
)

Hashes = Callable[..., list[bytes]]
MakePool = Callable[..., BlockPool]
pytestmark = pytest.mark.usefixtures("each_form")
B = 16


def grown(pool: BlockPool, token_count: int, window_tokens: int | None = None, block_tokens: int = B) -> BlockTable:
    table = BlockTable(pool, 0, block_tokens, window_tokens)
    table.append(pool.allocate(0, table.missing_blocks(token_count)))
    table.advance(token_count)
    return table


def seal(table: BlockTable, names: list[bytes], first: int = 0) -> None:
    count = table.token_count // table.block_tokens
    table.replace_run(first, table.pool.seal_many(table.ids()[first:count], names[first:count], True))


@pytest.mark.parametrize("token_count", [0, 1, B - 1, B, B + 1, 2 * B, 10 * B + 3])
def test_slot_mapping_is_slot_and_offset_of_every_token(token_count: int, make_pool: MakePool) -> None:
    pool = make_pool(30)
    table = grown(pool, token_count)
    slots = [pool.slot_of(block_id) for block_id in table.ids().tolist()]
    expected = [slots[token // B] * B + token % B for token in range(token_count)]
    assert table.slot_mapping(0, token_count).tolist() == expected
    for start in range(token_count):
        assert table.slot_mapping(start, 1).tolist() == expected[start : start + 1]
    assert table.slot_mapping(token_count // 2, token_count - token_count // 2).tolist() == expected[token_count // 2 :]
    assert table.missing_blocks(1) == (1 if token_count % B == 0 else 0)


def test_use_beyond_what_is_there_is_refused(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(30)
    table = grown(pool, 20)
    for call in (
        lambda: table.advance(13), lambda: table.advance(-1), lambda: table.truncate(21), lambda: table.truncate(-1),
        lambda: table.slot_mapping(30, 3), lambda: table.slot_mapping(-1, 1), lambda: table.id_at(2),
        lambda: table.replace(2, 0), lambda: table.replace_run(1, np.zeros(2, dtype=np.int32)),
        lambda: BlockTable(pool, 0, 0),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="expected"):
            call()
    seal(table, hashes(1))
    target = pool.begin_cool(table.id_at(0))
    assert target is not None
    pool.finish_cool(table.id_at(0), target)
    for start, count in ((3, 1), (0, 20)):
        with pytest.raises(UsageError, match="full-precision"):
            table.slot_mapping(start, count)
    pool.check_invariants([table])


def test_use_after_release_is_refused(make_pool: MakePool) -> None:
    pool = make_pool(8)
    table = grown(pool, 20)
    table.release()
    for call in (
        table.release, table.fork, table.entries, table.writable_tail, lambda: table.advance(0),
        lambda: table.append([1]), lambda: table.append_one(1), lambda: table.truncate(0),
        lambda: table.drop_before(0), lambda: table.slot_mapping(0, 0),
    ):  # fmt: skip
        with pytest.raises(UsageError, match="released"):
            call()
    pool.check_invariants([])


def test_fork_copies_nothing_until_a_write(make_pool: MakePool) -> None:
    pool = make_pool(12)
    parent = grown(pool, 20)
    parent.append(pool.allocate(0, 1))
    before = pool.live_block_count
    child = parent.fork()
    assert pool.live_block_count == before
    assert child.ids().tolist() == parent.ids().tolist()[:2]
    with pytest.raises(UsageError, match="writable_tail first"):
        child.advance(1)
    change = child.writable_tail()
    assert change is not None
    assert (change.source_id, change.target_id) == (parent.id_at(1), child.id_at(1))
    assert change.source_slot == pool.slot_of(parent.id_at(1))
    assert change.target_slot == pool.slot_of(child.id_at(1))
    assert child.writable_tail() is None
    assert parent.writable_tail() is None
    child.advance(1)
    pool.check_invariants([parent, child])


def test_a_rolled_back_tail_in_a_sealed_block_is_copied_before_it_is_written(
    make_pool: MakePool, hashes: Hashes
) -> None:
    pool = make_pool(12)
    table = grown(pool, 32)
    seal(table, hashes(2))
    table.truncate(20)
    change = table.writable_tail()
    assert change is not None
    assert pool.state_of(change.source_id) is BlockState.IDLE
    assert pool.match(0, hashes(2)) == [table.id_at(0), change.source_id]
    table.advance(1)
    pool.check_invariants([table])


def test_copy_on_write_without_room_changes_nothing(make_pool: MakePool) -> None:
    pool = make_pool(8)
    parent = grown(pool, 6 * B - 3)
    child = parent.fork()
    with pytest.raises(CapacityError):
        child.writable_tail()
    assert child.ids().tolist() == parent.ids().tolist()
    pool.check_invariants([parent, child])


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 4, 7])
def test_case_094_speculation_frees_each_block_once(
    page: int, overlap: bool, drafts: int, make_pool: MakePool, hashes: Hashes
) -> None:
    """k drafts, 0..k accepted, finish after every step, with the next step's room taken ahead or not."""
    rng = random.Random(94)
    for steps in range(1, 7):
        pool = make_pool(200)
        total = pool.available(0)
        table = grown(pool, 37, block_tokens=page)
        for _ in range(steps):
            ahead = drafts + 1 + (drafts + 1 if overlap else 0)
            table.append(pool.allocate(0, table.missing_blocks(ahead)))
            committed = table.token_count
            table.advance(drafts + 1)
            table.truncate(committed + 1 + rng.randint(0, drafts))
            pool.check_invariants([table])
        table.release()
        pool.check_invariants([])
        assert pool.available(0) == pool.free_count(0) + (total - pool.free_count(0)) == total


@pytest.mark.parametrize("window", [8, 16, 17, 32, 40])
def test_case_109_rollback_past_the_window_is_refused(window: int, make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(60)
    names = hashes(20)
    for target in range(20 * B + 1):
        sliding, full = grown(pool, 20 * B, window), grown(pool, 20 * B)
        seal(sliding, names)
        sliding.drop_before(10 * B)
        before = sliding.ids().tolist()
        needed = range(max(0, target - window + 1) // B, -(-target // B))
        if all(before[position] >= 0 for position in needed):
            sliding.truncate(target)
            assert sliding.token_count == target
        else:
            with pytest.raises(CannotRollback, match="left the window"):
                sliding.truncate(target)
            assert sliding.ids().tolist() == before
            assert sliding.token_count == 20 * B
        full.truncate(target)
        assert full.token_count == target
        pool.check_invariants([sliding, full])
        sliding.release()
        full.release()
    pool.check_invariants([])


def test_case_120_beams_fork_and_are_pruned_200_times(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(120)
    rng = random.Random(120)
    beams = [grown(pool, 21)]
    for step in range(200):
        if step == 150:
            beams.pop(rng.randrange(len(beams))).release()
        while len(beams) < 4:
            beams.append(rng.choice(beams).fork())
        for beam in beams:
            beam.writable_tail()
            beam.append(pool.allocate(0, beam.missing_blocks(1)))
            beam.advance(1)
        while len(beams) > rng.randint(1, 4):
            beams.pop(rng.randrange(len(beams))).release()
        if max(beam.token_count for beam in beams) > 150:
            for beam in beams:
                beam.truncate(20)
        pool.check_invariants(beams)
    for beam in beams:
        beam.release()
        with pytest.raises(UsageError):
            beam.release()
    pool.check_invariants([])
    assert pool.live_block_count == 0


def test_case_021_restored_blocks_stand_where_the_prefix_is(make_pool: MakePool, hashes: Hashes) -> None:
    """The device has the first blocks of a prompt: fresh blocks follow them, they do not end the list."""
    for local in range(4):
        pool = make_pool(20)
        names = hashes(4)
        pool.release(pool.seal_many(pool.allocate(0, local), names[:local], True)[::-1])
        hit = pool.match(0, names)
        assert len(hit) == local
        table = BlockTable(pool, 0)
        pool.share(hit)
        table.append(hit)
        table.advance(local * B)
        fresh = pool.allocate(0, table.missing_blocks(4 * B + 1 - local * B))
        table.append(fresh)
        assert table.ids().tolist() == [*hit, *fresh.tolist()]
        assert table.slot_mapping(local * B, 1)[0] == pool.slot_of(int(fresh[0])) * B


def test_case_068_stored_indices_own_their_memory(make_pool: MakePool) -> None:
    """1e5 blocks in random batches, 100 long-lived tables: memory does not grow after warm-up."""
    pool = make_pool(700, cold=False)
    rng = random.Random(68)
    long_lived = [grown(pool, 16) for _ in range(100)]
    for table in long_lived:
        table.append(pool.allocate(0, 400))
        table.truncate(16)

    def churn(blocks: int) -> None:
        while blocks > 0:
            count = rng.choice((1, 3, 33, 400))
            ids = pool.allocate(0, count)
            assert ids.base is None
            named = pool.seal_many(ids[:6], [rng.randbytes(32) for _ in ids[:6]], True)
            assert named.base is None
            table = long_lived[rng.randrange(100)]
            table.append(named)
            table.append(ids[6:])
            table.truncate(16)
            blocks -= count
        for table in long_lived:
            assert table.ids().base is None
            assert table._ids.base is None

    churn(20_000)
    tracemalloc.start()
    churn(20_000)
    before = tracemalloc.get_traced_memory()[0]
    kept = sum(table._ids.nbytes for table in long_lived)
    churn(60_000)
    grown_bytes = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown_bytes < 0.05 * (before + kept)


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8, 16, 17, 128, 256])
def test_case_143_tables_work_with_every_block_size(block_tokens: int, make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(700)
    names = hashes(600)
    table = grown(pool, 515, block_tokens=block_tokens)
    seal(table, names)
    child = table.fork()
    child.writable_tail()
    child.append(pool.allocate(0, child.missing_blocks(block_tokens)))
    child.advance(block_tokens)
    child.truncate(5)
    pool.check_invariants([table, child])
    table.release()
    child.release()
    assert len(pool.match(0, names)) == 515 // block_tokens
    pool.check_invariants([])


def test_errors_form_one_tree() -> None:
    import allocator

    names = [name for name in allocator.__all__ if isinstance(getattr(allocator, name), type)]
    errors = [getattr(allocator, name) for name in names if issubclass(getattr(allocator, name), Exception)]
    assert len(errors) == 11
    assert all(issubclass(error, KVError) for error in errors)
    assert str(allocator.UnknownSequence("no sequence 'x'")) == "no sequence 'x'"
    assert issubclass(allocator.UnknownSequence, KeyError)
    assert issubclass(allocator.UsageError, ValueError)
