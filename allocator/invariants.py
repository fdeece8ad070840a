"""What must hold between any two calls of a pool; the rooms state these rules at their tops, here they are checked.

Reads everything, changes nothing, costs a pass over all ids: for tests, debugging and a self-check command.
Under the lock of the pool's caller. Raises IntegrityError naming the first rule that is broken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from allocator.block_state import (
    EXACT_HELD,
    FENCED,
    FREE,
    HELD,
    IDLE,
    ONE_REFERENCE,
    OPEN,
    REFERENCE_SHIFT,
    RETIRED,
    SEALED,
    STATE,
    UNINDEXED,
)
from allocator.errors import IntegrityError

if TYPE_CHECKING:
    from allocator.block_pool import BlockPool


def check_pool(pool: BlockPool, tables: Sequence[npt.NDArray[np.int32]] | None = None) -> None:
    """All rules. `tables`: the block ids of every table there is, -1 for dropped positions."""
    _check_extents(pool)
    _check_slots(pool)
    _check_states(pool)
    _check_holds(pool)
    _check_lists(pool)
    _check_names(pool)
    _check_bytes(pool)
    if tables is not None:
        _check_references(pool, tables)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise IntegrityError(rule)


def _check_extents(pool: BlockPool) -> None:
    ledger, layout = pool.ledger, pool.layout
    unassigned = set(ledger.unassigned)
    _require(len(unassigned) == len(ledger.unassigned), f"an extent is unassigned twice: {ledger.unassigned}")
    without = set(np.flatnonzero(ledger.extent_class < 0).tolist())
    _require(unassigned == without, f"unassigned extents {unassigned} are not those without a class {without}")
    for index in range(layout.class_count):
        extents = int(np.count_nonzero(ledger.extent_class == index))
        _require(extents == ledger.extents_in_use[index], f"class {index}: has {extents} extents, counted otherwise")
        slots = extents * layout.per_extent[index]
        _require(slots == ledger.slots_in_use[index], f"class {index}: has {slots} slots, counted otherwise")


def _check_slots(pool: BlockPool) -> None:
    ledger, layout = pool.ledger, pool.layout
    capacity = ledger.id_capacity
    _require(int(ledger.entry[-1]) == -1, "the entry of a dropped position is not -1")
    seen = np.zeros(capacity, dtype=np.int64)
    for extent in range(layout.extent_count):
        index = int(ledger.extent_class[extent])
        if index < 0:
            _require(bool((ledger.owner[extent] == -1).all()), f"extent {extent} has no class, but owners")
            continue
        per_extent = layout.per_extent[index]
        owners = ledger.owner[extent, :per_extent]
        _require(bool(((owners >= 0) & (owners < capacity)).all()), f"extent {extent}: a slot has no owner")
        _require(bool((ledger.owner[extent, per_extent:] == -1).all()), f"extent {extent}: owners beyond its slots")
        slots = extent * per_extent + np.arange(per_extent)
        _require(
            bool((ledger.entry[owners] == slots << 1 | (index & 1)).all()),
            f"extent {extent}: the entries of the ids that own its slots name other slots or forms",
        )
        _require(bool((ledger.class_of[owners] == index).all()), f"extent {extent}: owners of another class")
        np.add.at(seen, owners, 1)
    retired = pool.ledger.life[:capacity] & STATE == RETIRED
    _require(bool((seen[~retired] == 1).all()), "an id that is not retired does not own exactly one slot")
    _require(bool((seen[retired] == 0).all()), "a retired id owns a slot")
    _require(bool((ledger.entry[:capacity][retired] == -1).all()), "a retired id has an entry")


def _check_states(pool: BlockPool) -> None:
    words = pool.ledger.life[: pool.ledger.id_capacity]
    behind = pool.ledger.life[pool.ledger.id_capacity :]
    _require(bool((behind == RETIRED).all()), "a word behind those of all ids is not RETIRED: a negative id names it")
    states, references = words & STATE, words >> REFERENCE_SHIFT
    _require(bool((words >= 0).all()) and bool((states <= FENCED).all()), "a block is in no known state")
    live = (states == OPEN) | (states == SEALED)
    _require(bool((references[live] > 0).all()), "a block is open or sealed without a reference")
    _require(bool((references[~live] == 0).all()), "a block that is neither open nor sealed has references")
    _require(bool((words[states == FREE] == FREE).all()), "a free block carries marks (held, unindexed or exact)")
    _require(bool((words[states == RETIRED] == RETIRED).all()), "a retired block carries marks")
    _require(bool((states[words & UNINDEXED != 0] == SEALED).all()), "a block that is not sealed is marked unindexed")
    _require(bool((words[states == FENCED] & HELD != 0).all()), "a fenced block is not held")


def _check_holds(pool: BlockPool) -> None:
    capacity = pool.ledger.id_capacity
    words = pool.ledger.life[:capacity]
    holds = pool.pins[:capacity] + pool.transfers[:capacity]
    _require(bool((pool.pins >= 0).all() and (pool.transfers >= 0).all()), "a count of pins or transfers is negative")
    _require(bool(((holds > 0) == (words & HELD != 0)).all()), "the held mark and the counts of holds differ")
    exact = pool.exact_holders[:capacity]
    _require(bool(((exact > 0) == (words & EXACT_HELD != 0)).all()), "the exact mark and the count of holders differ")
    _require(bool((exact <= words >> REFERENCE_SHIFT).all()), "a block has more exact holders than references")
    forms = pool.ledger.class_of[:capacity] & 1
    _require(bool((forms[exact > 0] == 0).all()), "a block that is demanded exact has the INT4 form")
    _require(set(pool.changing.values()) == pool.targets, "the targets of changes are not those set aside")
    _require(len(pool.targets) == len(pool.changing), "two changes have one target")
    for block_id, target in pool.changing.items():
        _require(bool(words[block_id] & HELD), f"block {block_id} is cooling or moving but not held")
        _require(int(words[target]) == FENCED | HELD, f"target {target} of block {block_id} is not fenced")
        _require(
            int(pool.ledger.class_of[target]) >> 1 == int(pool.ledger.class_of[block_id]) >> 1,
            f"block {block_id} changes into another group",
        )


def _check_lists(pool: BlockPool) -> None:
    ledger = pool.ledger
    words = ledger.life[: ledger.id_capacity]
    classes = ledger.class_of[: ledger.id_capacity]
    retired = np.sort(ledger.retired.held())
    _require(np.array_equal(retired, np.flatnonzero(words & STATE == RETIRED)), "retired ids and their list differ")
    for index in range(pool.layout.class_count):
        mine = classes == index
        free = np.sort(ledger.free[index].held())
        _require(
            np.array_equal(free, np.flatnonzero(mine & (words & STATE == FREE))),
            f"class {index}: the free list is not exactly the free blocks, each once",
        )
        idle = np.flatnonzero(mine & (words & STATE == IDLE))
        _require(len(idle) == pool.idle_counts[index], f"class {index}: {len(idle)} idle blocks, counted otherwise")
        held = int(np.count_nonzero(words[idle] & HELD))
        _require(held == pool.held_idle_counts[index], f"class {index}: {held} held idle blocks, counted otherwise")
        fenced = int(np.count_nonzero(mine & (words & STATE == FENCED)))
        _require(fenced == pool.fenced_counts[index], f"class {index}: {fenced} fenced blocks, counted otherwise")
        policy = pool.policies[index]
        _require(len(policy) == len(idle), f"class {index}: its policy knows {len(policy)} idle blocks of {len(idle)}")
        order = policy.peek(ledger.id_capacity)
        _require(
            np.array_equal(np.sort(order), idle), f"class {index}: the policy would not evict exactly the idle blocks"
        )


def _check_names(pool: BlockPool) -> None:
    ledger = pool.ledger
    words, classes = ledger.life, ledger.class_of
    named = 0
    for group, index in enumerate(pool.indexes):
        for exact, names in ((True, index.exact), (False, index.lossy)):
            named += len(names)
            for block_hash, block_id in names.items():
                what = f"group {group}: {'exact' if exact else 'lossy'} entry of block {block_id}"
                _require(int(words[block_id]) & STATE in (SEALED, IDLE), f"{what} is not sealed or idle")
                _require(not int(words[block_id]) & UNINDEXED, f"{what} is marked unindexed")
                _require(int(classes[block_id]) >> 1 == group, f"{what} belongs to another group")
                _require(pool.hashes[block_id] == block_hash, f"{what} has another hash")
                reads_exact = bool(pool.computed[block_id]) and not int(classes[block_id]) & 1
                _require(reads_exact == exact, f"{what} is in the wrong map")
    states = words[: ledger.id_capacity] & STATE
    sealed = (states == SEALED) | (states == IDLE)
    indexed = int(np.count_nonzero(sealed & (words[: ledger.id_capacity] & UNINDEXED == 0)))
    _require(indexed == named, f"{indexed} sealed blocks should be in the indexes, {named} are")
    for block_id in np.flatnonzero(sealed).tolist():
        _require(len(pool.hashes[block_id]) > 0, f"block {block_id} is sealed without a hash")


def _check_bytes(pool: BlockPool) -> None:
    usage = pool.usage()
    total = usage.tail_bytes + usage.unassigned_bytes + usage.in_use_bytes
    _require(total == usage.total_bytes, f"the bytes add up to {total}, the span has {usage.total_bytes}")
    live = sum(row.live_blocks for row in usage.classes)
    _require(live == pool.live_block_count, f"{live} blocks are live, {pool.live_block_count} counted")
    slots = [row.slots for row in usage.classes]
    _require(slots == pool.ledger.slots_in_use, f"slots by state {slots} are not the slots in use")


def _check_references(pool: BlockPool, tables: Sequence[npt.NDArray[np.int32]]) -> None:
    counts = np.zeros(pool.ledger.id_capacity, dtype=np.int64)
    for ids in tables:
        np.add.at(counts, ids[ids >= 0], 1)
    references = pool.ledger.life[: pool.ledger.id_capacity] // ONE_REFERENCE
    wrong = np.flatnonzero(counts != references)
    if len(wrong):
        block_id = int(wrong[0])
        raise IntegrityError(
            f"block {block_id}: tables refer to it {counts[block_id]} times, its count is {references[block_id]}"
        )
