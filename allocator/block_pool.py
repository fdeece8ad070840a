"""The block pool: the one owner of the truth about device blocks.

A block id names a block for as long as somebody refers to it; it owns a slot at all times, but which one may change
(cooling, compaction). Ids stay inside the project; an engine gets `entries`: slot * 2 + form.

No lock inside: whoever owns the pool (the store) guards it with the one lock and never holds that during a copy. Calls
take batches. The class is put together from rooms, each with its invariants at its top:

    extent_ledger   ids, slots, free lists, extents         block_life   states, references, eviction
    block_holds     pins, transfers, exact readers          cooling      full -> INT4
    compaction      moving scattered slots together         reclaim      where room comes from
    priorities      what is evicted later, and quotas
    this file       names (seal, adopt, match), entries, counts
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from allocator.block_life import IdBatch, OnEvict
from allocator.block_state import (
    EXACT_HELD,
    FENCED,
    FREE,
    HELD,
    IDLE,
    OPEN,
    REFERENCE_SHIFT,
    SEALED,
    SEALED_ONCE,
    STATE,
    UNINDEXED,
    BlockState,
)
from allocator.errors import UsageError
from allocator.eviction import LRU, EvictionPolicy, Usable
from allocator.extent_ledger import Ids
from allocator.extents import FULL, ExtentLayout
from allocator.invariants import check_pool
from allocator.pool_usage import ClassUsage, PoolUsage
from allocator.prefix_index import PrefixIndex
from allocator.priorities import Priorities
from allocator.reclaim import restore_spare

if TYPE_CHECKING:
    from allocator.block_table import BlockTable


class BlockPool(Priorities):
    """Blocks of all groups and forms over one span of device bytes.

    layout     how the span is cut
    policy     makes the eviction policy of a class, given the number of ids
    on_evict   called with (group, ids, hashes, computed_exact, form) before evicted blocks can be handed out again; it
               must not call the pool
    """

    def __init__(
        self, layout: ExtentLayout, policy: Callable[[int], EvictionPolicy] = LRU, on_evict: OnEvict | None = None
    ) -> None:
        super().__init__(layout, policy, on_evict)

    # -- names --------------------------------------------------------------------------------------------------

    def seal(self, block_id: int, block_hash: bytes, exact: bool) -> int:
        """Makes a full, committed OPEN block immutable and names it. Returns the id to use from now on.

        `exact`: nothing before it was read lossy when it was computed. When the same map (exact or lossy) has a block
        for
        this hash already, the caller's reference moves to that one and its id is returned; exact and lossy never merge.
        Sealing a block again under its own hash (a forked table does that) is the same. Seal never evicts.
        UsageError for a block that is not OPEN, or is sealed under another hash.
        """
        word = self._words[self._checked(block_id)]
        form = self._classes[block_id] & 1
        if word & STATE == SEALED and self.hashes[block_id] == block_hash and bool(self.computed[block_id]) == exact:
            return block_id
        if word & STATE != OPEN:
            raise UsageError(
                f"expected an open block to seal, got block {block_id} ({BlockState(word & STATE).name}"
                f"{', under another hash' if word & STATE == SEALED else ''})"
            )
        reads_exact = exact and form == FULL
        index = self.indexes[self._classes[block_id] >> 1]
        names = index.exact if reads_exact else index.lossy
        existing = names.get(block_hash)
        if existing is None:
            names[block_hash] = block_id
            self.hashes[block_id] = block_hash
            self.computed[block_id] = exact
            self._words[block_id] = word + SEALED - OPEN
            return block_id
        self._take_reference(existing)
        if word & EXACT_HELD and int(self.exact_holders[block_id]) >= word >> REFERENCE_SHIFT:
            self.drop_exact([block_id])
            self.hold_exact([existing])
        self._drop_reference(block_id, [])
        return existing

    def seal_many(self, ids: IdBatch, hashes: Sequence[bytes], exact: bool) -> Ids:
        """`seal` for a run of blocks: int32[len(ids)] of the ids to use from now on."""
        array = np.array(ids, dtype=np.int32)
        if len(array) != len(hashes):
            raise UsageError(f"expected one hash a block, got {len(hashes)} hashes for {len(array)} blocks")
        if len(array) > 1:
            places, words = self._distinct_words(array, "seal")
            raw = words.tobytes()
            if raw == self._open_once[: len(raw)] and len(parts := self._by_class(places)) == 1:
                names = (self._exact_names if exact else self._lossy_names)[parts[0][0]]
                fresh = dict(zip(hashes, array.tolist(), strict=True))
                if len(fresh) == len(array) and names.keys().isdisjoint(fresh):
                    names.update(fresh)
                    known = self.hashes
                    for block_hash, block_id in fresh.items():
                        known[block_id] = block_hash
                    self._computed[places] = exact
                    self._life[places] = SEALED_ONCE
                    return array
        for place, block_hash in enumerate(hashes):
            array[place] = self.seal(int(array[place]), block_hash, exact)
        return array

    def adopt(self, block_id: int, block_hash: bytes, exact: bool, form: int = FULL) -> int:
        """Names an allocated block whose bytes were fetched from a lower tier; returns the id to use, like `seal`.

        `exact`: the copy is of an exactly computed block. An INT4 copy (form COLD) is never an exact hit.
        """
        if self.form_of(block_id) != form:
            raise UsageError(f"block {block_id}: expected form {form}, it has {self.form_of(block_id)}")
        return self.seal(block_id, block_hash, exact)

    def match(self, group: int, hashes: Sequence[bytes], exact_only: bool = False) -> list[int]:
        """Blocks of the leading unbroken run of `hashes`; no side effect."""
        return self.index(group).match(hashes, exact_only)

    def index(self, group: int) -> PrefixIndex:
        """The prefix index of a group; to be read only."""
        if not 0 <= group < self.layout.group_count:
            raise UsageError(f"expected a group in 0..{self.layout.group_count - 1}, got {group}")
        return self.indexes[group]

    # -- eviction on request ------------------------------------------------------------------------------------

    def coldest(self, group: int, count: int, form: int = FULL, wanted: Usable | None = None) -> Ids:
        """Up to `count` idle blocks nearest to eviction, not held: int32[<=count].

        `wanted` maps int32[n] ids to bool[n]: only those are counted (e.g. not spilled yet).
        """

        def usable(ids: Ids) -> npt.NDArray[np.bool_]:
            mask = self.idle_mask(ids)
            return mask if wanted is None else mask & wanted(ids)

        return self.policies[self._class_index(group, form)].peek(count, usable)

    def evict(self, ids: IdBatch) -> None:
        """Drops idle blocks by name. UsageError, with nothing changed, for one that is not idle or is held."""
        array = np.array(ids, dtype=np.int32)
        if not len(array):
            return
        places, words = self._distinct_words(array, "evict")
        if bool((words & (STATE | HELD) != IDLE).any()):
            wrong = int(array[words & (STATE | HELD) != IDLE][0])
            raise UsageError(f"expected idle blocks that are not held, got block {wrong} ({self.state_of(wrong).name})")
        for index, part in self._by_class(places):
            self.policies[index].forget(part)
            self._drop_idle(index, part)

    def drop_all_idle(self) -> int:
        """Evicts every idle block that is not held; returns how many."""
        words = self._life[: self.ledger.id_capacity]
        idle = np.flatnonzero(words & (STATE | HELD) == IDLE).astype(np.int32)
        self.evict(idle)
        return len(idle)

    def forget_names(self) -> None:
        """No block is a hit any more: idle blocks go (held ones when they are let go), live ones stay, unnamed."""
        self.drop_all_idle()
        for index in self.indexes:
            for names in (index.exact, index.lossy):
                for block_id in names.values():
                    word = self._words[block_id]
                    if word & STATE == IDLE:
                        self._leave_idle(np.array([block_id], dtype=np.int32), busy=False)
                        self._to_free(block_id)
                    else:
                        self._words[block_id] = word | UNINDEXED
                names.clear()

    def restore_spare(self) -> bool:
        """Puts an empty extent aside for cooling if none is. False when there is none: compact, or wait."""
        return restore_spare(self)

    # -- what blocks are ----------------------------------------------------------------------------------------

    def entries(self, ids: IdBatch) -> npt.NDArray[np.int64]:
        """slot * 2 + form of each block, int64[len(ids)]; -1 for a dropped position. This is what engines get."""
        return self.ledger.entry[ids]

    def entry_of(self, block_id: int) -> int:
        """`entries` for one block."""
        return self.ledger.entry_view[block_id]

    def slot_of(self, block_id: int) -> int:
        """Slot number of a block inside its class."""
        return self.ledger.entry_view[self._checked(block_id)] >> 1

    def form_of(self, block_id: int) -> int:
        """FULL or COLD."""
        return self._classes[self._checked(block_id)] & 1

    def group_of(self, block_id: int) -> int:
        """Cache group of a block."""
        return self._classes[self._checked(block_id)] >> 1

    def hash_of(self, block_id: int) -> bytes | None:
        """Name of a sealed or idle block, None for others."""
        return self.hashes[block_id] if self._is_named(block_id) else None

    def _is_named(self, block_id: int) -> bool:
        return self._words[self._checked(block_id)] & STATE in (SEALED, IDLE)

    def computed_exact(self, block_id: int) -> bool:
        """Whether the block was computed with nothing but full precision before it (whatever its form is now)."""
        return self._is_named(block_id) and bool(self.computed[block_id])

    def reads_exact(self, block_id: int) -> bool:
        """Whether reading the block gives full precision: computed exactly, and not INT4."""
        return self.computed_exact(block_id) and self.form_of(block_id) == FULL

    # -- counts -------------------------------------------------------------------------------------------------

    def free_count(self, group: int, form: int = FULL) -> int:
        """Blocks on the free list of a class."""
        return self._free[2 * group + form].count

    def idle_count(self, group: int, form: int = FULL) -> int:
        """Idle blocks of a class, held ones included."""
        return self.idle_counts[2 * group + form]

    @property
    def live_block_count(self) -> int:
        """Blocks with at least one reference, over all classes."""
        free = sum(stack.count for stack in self._free)
        return sum(self.ledger.slots_in_use) - free - sum(self.idle_counts) - sum(self.fenced_counts)

    def usage(self) -> PoolUsage:
        """Where every byte is."""
        layout, ledger = self.layout, self.ledger
        words = self._life[: ledger.id_capacity]
        classes = ledger.class_of[: ledger.id_capacity]
        rows = []
        for index in range(layout.class_count):
            states = np.bincount(words[classes == index] & STATE, minlength=FENCED + 1).tolist()
            extents = ledger.extents_in_use[index]
            rows.append(
                ClassUsage(
                    group=index >> 1,
                    form=index & 1,
                    slot_bytes=layout.raw_slot_bytes[index],
                    extents=extents,
                    remainder_bytes=extents * layout.remainder_bytes[index],
                    free_blocks=states[FREE],
                    open_blocks=states[OPEN],
                    sealed_blocks=states[SEALED],
                    idle_blocks=states[IDLE],
                    fenced_blocks=states[FENCED],
                )
            )
        unassigned = len(ledger.unassigned)
        return PoolUsage(
            total_bytes=layout.total_bytes,
            tail_bytes=layout.tail_bytes,
            unassigned_extents=unassigned,
            unassigned_bytes=unassigned * layout.extent_bytes,
            spare_extents=min(unassigned, layout.spare_count),
            classes=tuple(rows),
        )

    def check_invariants(self, tables: Iterable[BlockTable] | None = None) -> None:
        """IntegrityError naming the first broken invariant. With `tables` (all of them), references are counted too."""
        check_pool(self, None if tables is None else [table.ids() for table in tables])
