"""Change of form, change of extent, compaction, exact readers: the INT4 half of the pool."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from allocator import COLD, FULL, BlockPool, BlockState, BlockTable, CapacityError, UsageError

Hashes = Callable[..., list[bytes]]
MakePool = Callable[..., BlockPool]


def sealed(pool: BlockPool, names: list[bytes], exact: bool = True) -> list[int]:
    return pool.seal_many(pool.allocate(0, len(names)), names, exact).tolist()


def cool(pool: BlockPool, block_id: int) -> None:
    target = pool.begin_cool(block_id)
    assert target is not None
    assert pool.finish_cool(block_id, target)


def test_a_cooled_block_keeps_its_id_and_every_table_sees_it(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    table = BlockTable(pool, 0)
    table.append(sealed(pool, hashes(2)))
    table.advance(32)
    child = table.fork()
    before = table.entries()
    cool(pool, table.id_at(1))
    assert table.entries().tolist() == child.entries().tolist()
    assert table.entries()[0] == before[0]
    assert table.entries()[1] & 1 == COLD
    assert pool.reads_exact(table.id_at(0))
    assert not pool.reads_exact(table.id_at(1))
    assert pool.computed_exact(table.id_at(1))
    assert len(pool.match(0, hashes(2))) == 2
    assert len(pool.match(0, hashes(2), exact_only=True)) == 1
    pool.check_invariants([table, child])


def test_cooling_begins_when_all_is_full(make_pool: MakePool, hashes: Hashes) -> None:
    """The spare extent: even with every block live, cooling can begin and makes room."""
    pool = make_pool(8)
    ids = sealed(pool, hashes(6))
    with pytest.raises(CapacityError):
        pool.allocate_one(0)
    for block_id in ids[:4]:
        cool(pool, block_id)
    assert pool.usage().spare_extents == 1, "an emptied extent must become the spare again"
    assert pool.available(0) == 2
    pool.check_invariants()


def test_a_fenced_cooling_keeps_the_old_slot_until_the_step_has_ended(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (block_id,) = sealed(pool, hashes(1))
    slot = pool.slot_of(block_id)
    target = pool.begin_cool(block_id)
    assert target is not None
    assert pool.finish_cool(block_id, target, fence=True)
    assert pool.slot_of(target) == slot
    assert target not in pool.allocate(0, pool.available(0)).tolist()
    pool.end_transfer([target])
    assert pool.allocate_one(0) == target


def test_what_must_not_cool(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(12)
    ids = sealed(pool, hashes(4))
    opened = pool.allocate_one(0)
    pool.pin(ids[:1])
    pool.begin_transfer(ids[1:2])
    pool.hold_exact(ids[2:3])
    assert [pool.begin_cool(block_id) for block_id in (*ids[:3], opened)] == [None] * 4
    cool(pool, ids[3])
    assert pool.begin_cool(ids[3]) is None
    pool.drop_exact(ids[2:3])
    cool(pool, ids[2])
    pool.check_invariants()


@pytest.mark.parametrize("late", ["pin", "hold_exact"])
def test_a_reader_that_comes_while_a_block_cools_gets_full_precision(
    late: str, make_pool: MakePool, hashes: Hashes
) -> None:
    pool = make_pool(8)
    (block_id,) = sealed(pool, hashes(1))
    target = pool.begin_cool(block_id)
    assert target is not None
    getattr(pool, late)([block_id])
    assert not pool.finish_cool(block_id, target)
    assert pool.form_of(block_id) == FULL
    assert pool.match(0, hashes(1), exact_only=True) == [block_id]
    pool.check_invariants()


def test_a_cooling_block_has_no_second_transfer_and_one_end(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (block_id,) = sealed(pool, hashes(1))
    target = pool.begin_cool(block_id)
    assert target is not None
    for call in (pool.begin_transfer, pool.end_transfer):
        with pytest.raises(UsageError, match="cooling or moving"):
            call([block_id])
    with pytest.raises(UsageError, match="cooling or moving"):
        pool.end_transfer([target])
    with pytest.raises(UsageError, match="its target"):
        pool.finish_cool(block_id, block_id)
    pool.cancel_cool(block_id, target)
    with pytest.raises(UsageError, match="its target"):
        pool.finish_cool(block_id, target)
    pool.check_invariants()


def test_an_exact_copy_takes_the_name_from_a_block_computed_after_lossy_reads(
    make_pool: MakePool, hashes: Hashes
) -> None:
    pool = make_pool(12)
    (name,) = hashes(1)
    (lossy,) = sealed(pool, [name], exact=False)
    (exact,) = sealed(pool, [name])
    cool(pool, exact)
    assert pool.match(0, [name]) == [exact]
    assert pool.state_of(lossy) is BlockState.SEALED
    pool.check_invariants()
    pool.release([lossy])
    assert pool.state_of(lossy) is BlockState.FREE
    pool.check_invariants()


def test_of_two_int4_copies_of_an_exact_block_one_keeps_the_name(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(12)
    (name,) = hashes(1)
    (first,) = sealed(pool, [name])
    cool(pool, first)
    (second,) = sealed(pool, [name])
    assert second != first
    pool.release([second])
    cool(pool, second)
    assert pool.match(0, [name]) == [first]
    assert pool.state_of(second) is BlockState.FREE
    pool.check_invariants()


def test_a_fetched_int4_copy_is_never_an_exact_hit(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (name,) = hashes(1)
    block_id = int(pool.allocate(0, 1, COLD)[0])
    with pytest.raises(UsageError, match="expected form"):
        pool.adopt(block_id, name, True, FULL)
    assert pool.adopt(block_id, name, True, COLD) == block_id
    assert pool.match(0, [name], exact_only=True) == []
    assert pool.match(0, [name]) == [block_id]
    with pytest.raises(UsageError, match="full-precision"):
        pool.hold_exact([block_id])


def test_a_cooled_idle_block_keeps_its_age(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(12)
    ids = sealed(pool, hashes(4))
    for block_id in ids:
        pool.release([block_id])
    for block_id in (ids[2], ids[0], ids[3]):
        cool(pool, block_id)
    assert pool.coldest(0, 9, COLD).tolist() == [ids[0], ids[2], ids[3]]
    assert pool.coldest(0, 9, FULL).tolist() == [ids[1]]
    assert pool.coldest(0, 9, COLD, lambda ids_: ids_ != ids[0]).tolist() == [ids[2], ids[3]]


def test_an_extent_of_idle_blocks_changes_class_but_never_a_live_one(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    ids = sealed(pool, hashes(6))
    pool.release(ids[:4])
    assert pool.available(0, COLD) == 16
    cold = pool.allocate(0, 16, COLD)
    assert [pool.state_of(block_id) for block_id in ids[4:]] == [BlockState.SEALED] * 2
    assert len(set(cold.tolist())) == 16
    with pytest.raises(CapacityError):
        pool.allocate(0, 1, COLD)
    assert pool.converted_extents_count == 2
    assert pool.usage().spare_extents == 1
    pool.check_invariants()


def test_compaction_frees_an_extent_for_a_starved_class(make_pool: MakePool, hashes: Hashes) -> None:
    """Scattered live blocks in every full extent: INT4 starves until they are moved together."""
    pool = make_pool(10)
    ids = sealed(pool, hashes(8))
    pool.release(ids[::2])
    pool.drop_all_idle()
    assert pool.available(0, COLD) == 0
    assert pool.free_count(0) == 4
    tables = [BlockTable(pool, 0)]
    tables[0].append(ids[1::2])
    moves = pool.plan_compaction(0, COLD)
    assert [move.block_id for move in moves] == [moves[0].block_id]
    assert moves[0].source_slot == pool.slot_of(moves[0].block_id)
    pool.check_invariants(tables)
    for move in moves:
        assert pool.apply_move(move)
        assert pool.slot_of(move.block_id) == move.target_slot
    pool.check_invariants(tables)
    assert pool.available(0, COLD) == 8
    with pytest.raises(UsageError, match="cooling or moving"):
        pool.apply_move(moves[0])


def test_a_cancelled_or_outdated_move_changes_nothing(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(10)
    ids = sealed(pool, hashes(8))
    pool.release(ids[::2])
    pool.drop_all_idle()
    before = pool.entries(ids[1::2]).tolist()
    (move,) = pool.plan_compaction(0, COLD)
    pool.cancel_move(move)
    (move,) = pool.plan_compaction(0, COLD)
    pool.pin([move.block_id])
    assert not pool.apply_move(move)
    assert pool.entries(ids[1::2]).tolist() == before
    pool.check_invariants()


def test_case_040_slots_stay_unique_over_many_changes_of_form(make_pool: MakePool, hashes: Hashes) -> None:
    """100 random cool / evict / restore cycles: no two live blocks share a slot; tables export slots, never ids."""
    pool = make_pool(40)
    rng = np.random.default_rng(40)
    names = hashes(20)
    table = BlockTable(pool, 0)
    table.append(sealed(pool, names))
    table.advance(320)
    for _ in range(100):
        for block_id in rng.choice(table.ids(), 5, replace=False).tolist():
            if pool.form_of(block_id) == FULL:
                target = pool.begin_cool(block_id)
                if target is not None:
                    pool.finish_cool(block_id, target)
            else:
                position = table.ids().tolist().index(block_id)
                fresh = pool.allocate_one(0)
                fresh = pool.seal(fresh, names[position], True)
                table.replace(position, fresh)
                pool.release([block_id])
        entries = table.entries()
        for form in (FULL, COLD):
            slots = entries[entries & 1 == form] >> 1
            assert len(set(slots.tolist())) == len(slots)
            assert (slots < pool.layout.slot_count(form)).all()
        assert entries.tolist() == [pool.slot_of(i) << 1 | pool.form_of(i) for i in table.ids().tolist()]
        pool.check_invariants([table])
    assert entries.tolist() != table.ids().tolist()


def test_exact_holders_belong_to_references(make_pool: MakePool, hashes: Hashes) -> None:
    pool = make_pool(8)
    (block_id,) = sealed(pool, hashes(1))
    with pytest.raises(UsageError, match="reference for each exact holder"):
        pool.hold_exact([block_id, block_id])
    pool.hold_exact([block_id])
    with pytest.raises(UsageError, match="drop_exact before"):
        pool.release([block_id])
    pool.share([block_id])
    pool.release([block_id])
    pool.drop_exact([block_id])
    with pytest.raises(UsageError, match="held as exact"):
        pool.drop_exact([block_id])
    pool.release([block_id])
    pool.check_invariants([])
