"""What `KVStore.step` does between forward passes: outcomes in, bounded work out.

Runs under the store's lock. Cools blocks whose turn has come, copies the idle blocks nearest eviction down while
memory is short (so that eviction loses nothing), and moves scattered slots together when one slot class starves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from allocator import COLD, FULL

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from collections.abc import Sequence as Items

    import numpy.typing as npt

    from allocator import BlockPool, KVGeometry
    from kvstore.config import KVStoreConfig
    from kvstore.device_blocks import BlockBytes
    from kvstore.mover import Mover
    from kvstore.residency import Residency
    from kvstore.sequence import PendingCopy, Sequence
    from kvstore.tier import CopyKey, Tier

_SHORT_STEPS = 4  # room is short when it would be gone after this many steps' worth of movement


@dataclass(frozen=True, slots=True)
class StepReport:
    """Blocks by what happened to them in one step."""

    cooled_blocks: int = 0
    spilled_blocks: int = 0
    fetched_blocks: int = 0
    moved_blocks: int = 0


@dataclass(slots=True)
class _Name:
    root: bytes
    parent: bytes | None
    copied: tuple[int, int] | None = None  # (form, when it became idle) of the copy that was last asked for


@dataclass(slots=True)
class Upkeep:
    geometry: KVGeometry
    pool: BlockPool
    device: BlockBytes
    residency: Residency
    mover: Mover
    tiers: tuple[Tier, ...]
    config: KVStoreConfig
    sequences: Mapping[str, Sequence]
    cools: bool = False
    _names: dict[int, _Name] = field(default_factory=dict)  # root and parent hash by block id, for copies below
    _starved: int | None = None

    # -- called by the facade -----------------------------------------------------------------------------------

    def remember(self, ids: Items[int], root: bytes, parents: Items[bytes | None]) -> None:
        """Keep what a copy's key and parent link need, until the block is evicted."""
        for block_id, parent in zip(ids, parents, strict=True):
            self._names[block_id] = _Name(root, parent)

    def remember_fetched(self, sequence: Sequence, copies: Items[PendingCopy]) -> None:
        """`remember` for blocks that came from a lower tier."""
        hashes = sequence.chain.hashes
        for copy in copies:
            block_id = sequence.tables[copy.group].id_at(copy.position)
            parent = hashes[copy.position - 1] if copy.position else None
            self.remember([block_id], sequence.root, [parent])

    def touch_below(self, sequence: Sequence, blocks: int) -> None:
        """A hit on the device is a use of the copies below it too: else a prefix grows old under its suffix."""
        if not self.tiers or not blocks:
            return
        hashes = sequence.chain.hashes[:blocks]
        kinds = [(FULL, True), (COLD, True)] if self.cools else [(FULL, True)]
        if sequence.lossy_from is not None:
            kinds += [(form, False) for form, _ in kinds]
        for group in range(len(self.geometry.groups)):
            for form, exact in kinds:
                keys = self.residency.copy_key(sequence.root, group, hashes[0], form, exact).with_hashes(hashes)
                for tier in self.tiers:
                    tier.touch(keys)

    def forget(self, ids: Iterable[int]) -> None:
        ids = list(ids)
        self.mover.forget(ids)
        if self._names:
            for block_id in ids:
                self._names.pop(block_id, None)

    def forget_all(self) -> None:
        """For a reset: no block keeps a name under which it could be copied down."""
        self._names.clear()

    def note_shortage(self, group: int) -> None:
        self._starved = group

    def enqueue_cool(self, sequence: Sequence) -> None:
        """Queue the blocks of `sequence` that are `residual_tokens` behind its committed end, block 0 never.

        A prompt waits until it is computed, so that it stays exact. While memory is short it does not wait: else one
        long prompt would need its whole length in full precision and push out several that are cold by then.
        """
        if not self.cools or sequence.exact:
            return
        if not sequence.prefill_done and not (self.config.cool_under_pressure and self._any_short()):
            return
        block_tokens = self.geometry.block_tokens
        limit = min(sequence.sealed_blocks, (sequence.committed - self.config.residual_tokens) // block_tokens)
        if limit <= sequence.cool_cursor:
            return
        pool = self.pool
        for table in sequence.tables:
            ids = [
                block_id
                for block_id in table.ids()[sequence.cool_cursor : limit].tolist()
                if block_id >= 0 and pool.form_of(block_id) == FULL
            ]
            named = [(block_id, block_hash) for block_id in ids if (block_hash := pool.hash_of(block_id)) is not None]
            self.mover.enqueue_cool(named, "age" if sequence.prefill_done else "pressure")
        sequence.cool_cursor = limit

    def spill_sequence(self, sequence: Sequence) -> None:
        """Copy down what only this sequence holds, front first: a hit is a leading run."""
        if not self.tiers:
            return
        for table in sequence.tables:
            ids = [
                block_id
                for block_id in table.ids()[: sequence.sealed_blocks].tolist()
                if block_id >= 0 and self.pool.ref_count(block_id) == 1
            ]
            self._spill(ids)

    # -- step ---------------------------------------------------------------------------------------------------

    @property
    def cool_generation(self) -> int:
        return self.mover.cool_generation

    @property
    def names_blocks(self) -> bool:
        """Whether blocks' roots and parents are needed: for copies below, or to tell a first block."""
        return self.cools or bool(self.tiers)

    def step(self, now: float) -> StepReport:
        before = self.drain(now)
        self.mover.fetcher.expire(now, self.config.fetch_deadline_seconds)
        moved = self._compact()
        self.mover.start_cool(self.config.cool_blocks_per_step)
        for group in range(len(self.geometry.groups)):
            self._relieve(group)
        after = self.drain(now)
        return StepReport(
            cooled_blocks=before.cooled_blocks + after.cooled_blocks,
            spilled_blocks=before.spilled_blocks + after.spilled_blocks,
            fetched_blocks=before.fetched_blocks + after.fetched_blocks,
            moved_blocks=moved,
        )

    def drain(self, now: float) -> StepReport:
        drained = self.mover.drain(self.tiers, now)
        return StepReport(drained.cooled, drained.spilled, drained.fetched)

    def _compact(self) -> int:
        """Empty one sparsely used extent of another class after a class could not be served: one extent a step."""
        if self._starved is None:
            return 0
        moves = self.pool.plan_compaction(self._starved, FULL)
        self._starved = None
        for place, move in enumerate(moves):
            try:
                self.device.copy(*divmod(move.class_index, 2), move.source_slot, move.target_slot)
            except BaseException:
                for rest in moves[place:]:
                    self.pool.cancel_move(rest)
                raise
            self.pool.apply_move(move)
        return len(moves)

    def _relieve(self, group: int) -> None:
        """While free room is short: cool idle raw blocks instead of losing them, copy down what would be evicted."""
        config, pool = self.config, self.pool
        if self.cools and config.cool_under_pressure and self._is_short(group, FULL):
            coldest = pool.coldest(group, config.cool_blocks_per_step, FULL, self._may_cool).tolist()
            self.mover.start_cool_idle(coldest)
        for form in (FULL, COLD) if self.cools else (FULL,):
            if self.tiers and self._is_short(group, form):
                self._spill(pool.coldest(group, config.spill_blocks_per_step, form).tolist())

    def _any_short(self) -> bool:
        return any(self._is_short(group, FULL) for group in range(len(self.geometry.groups)))

    def _is_short(self, group: int, form: int) -> bool:
        """True when the free room would be gone after a few steps' worth of movement."""
        config = self.config
        limit = _SHORT_STEPS * max(config.cool_blocks_per_step, config.spill_blocks_per_step)
        return self._free_blocks(group, form) < limit

    def _free_blocks(self, group: int, form: int) -> int:
        """Blocks that can be had without giving up anything."""
        layout, ledger = self.pool.layout, self.pool.ledger
        unassigned = max(0, len(ledger.unassigned) - layout.spare_count)
        return self.pool.free_count(group, form) + unassigned * layout.per_extent[2 * group + form]

    def _may_cool(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
        """bool [n]: not the first block of a sequence, whose precision all else needs, nor refused by the codec."""
        names = [(block_id, self._names.get(block_id)) for block_id in ids.tolist()]
        return np.array(
            [
                name is not None and name.parent is not None and not self.mover.was_refused(block_id)
                for block_id, name in names
            ],
            dtype=bool,
        )

    def _spill(self, ids: Items[int]) -> None:
        """Submit copies of those blocks that have a name and no copy in the first tier yet.

        Once for each time a block is idle: a tier that is smaller than one step's copies would be written round and
        round otherwise, and a copy that was dropped from it for a better one would come back. What the queue has no
        room for now has not had its turn.
        """
        pool, tier = self.pool, self.tiers[0]
        lives = {one: (pool.form_of(one), pool.idle_since(one)) for one in ids}
        named = [copy for copy in self.copies_of(ids) if self._names[copy[0]].copied != lives[copy[0]]]
        if not named:
            return
        present = tier.contains([key for _, key, _ in named])
        missing = [item for item, there in zip(named, present, strict=True) if not there]
        waiting = {item[0] for item in missing[self.mover.spill_room :]}
        self.mover.start_spill(tier, missing)
        for block_id, _, _ in named:
            if block_id not in waiting:
                self._names[block_id].copied = lives[block_id]

    def copies_of(self, ids: Items[int]) -> list[tuple[int, CopyKey, bytes | None]]:
        """(block id, key of its copy, hash of its parent) of those blocks that can be copied now."""
        pool = self.pool
        copies: list[tuple[int, CopyKey, bytes | None]] = []
        for block_id in ids:
            block_hash, name = pool.hash_of(block_id), self._names.get(block_id)
            if block_hash is None or name is None or pool.in_flight(block_id):
                continue
            key = self.residency.copy_key(
                name.root, pool.group_of(block_id), block_hash, pool.form_of(block_id), pool.computed_exact(block_id)
            )
            copies.append((block_id, key, name.parent))
        return copies
