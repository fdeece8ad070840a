"""What `KVStore.step` does between forward passes: outcomes in, bounded work out.

Runs under the store's lock. Cools blocks whose turn has come, copies the idle blocks nearest eviction down while
memory is short (so that eviction loses nothing), and moves scattered slots together when one slot class starves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from allocator import COLD, FULL
from allocator.block_marks import PLAIN
from kvstore.spill_queue import Waiting
from kvstore.tier_admission import Candidate, Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Sequence as Items

    import numpy.typing as npt

    from allocator import BlockPool, KVGeometry
    from allocator.block_marks import Steps
    from allocator.extent_ledger import Ids
    from kvstore.config import KVStoreConfig
    from kvstore.copy_key import CopyKey
    from kvstore.device import BlockBytes
    from kvstore.mover import Mover
    from kvstore.residency import Residency
    from kvstore.reuse_notes import ReuseNotes
    from kvstore.sequence import PendingCopy, Sequence
    from kvstore.tier import Fading, Tier
    from kvstore.write_behind import WriteBehind

_FADING_SHARE = 0.75  # of own memory in use, from where on what goes next is offered below
_REACH_BLOCKS = 1024
_NO_LIFE = -1
_NONE: Ids = np.empty(0, dtype=np.int32)
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
    prefix_tokens: int = 0  # of the longest prompt or turn with it that has been computed, for slower tiers


@dataclass(slots=True)
class Upkeep:
    geometry: KVGeometry
    pool: BlockPool
    device: BlockBytes
    residency: Residency
    mover: Mover
    writes: WriteBehind
    tiers: tuple[Tier, ...]
    config: KVStoreConfig
    sequences: Mapping[str, Sequence]
    reuse: ReuseNotes
    cools: bool = False
    slower: tuple[Tier, ...] = ()  # those that are not the store's own memory: written behind, by policy
    _names: dict[int, _Name] = field(default_factory=dict)  # root and parent hash by block id, for copies below
    _starved: int | None = None
    _looked: dict[tuple[int, int], tuple[tuple[int, int], Ids]] = field(default_factory=dict)
    # by block id: its idle life in which a copy of it was last asked for
    _turns: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self._turns = np.full(self.pool.ledger.id_capacity, _NO_LIFE, dtype=np.int64)
        self.slower = tuple(tier for tier in self.tiers if not tier.private_memory)
        if self.slower and self.cools:
            self.mover.on_cooled = self._offer_cooled

    # -- called by the facade -----------------------------------------------------------------------------------

    def remember(self, ids: Items[int], root: bytes, parents: Items[bytes | None]) -> None:
        """Keep what a copy's key and parent link need, until the block is evicted."""
        for block_id, parent in zip(ids, parents, strict=True):
            self._names[block_id] = _Name(root, parent)
            self._turns[block_id] = _NO_LIFE

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
        for keys in self._copies_below(sequence.root, hashes, lossy=sequence.lossy_from is not None):
            for tier in self.tiers:
                tier.touch(keys)

    @property
    def has_marks_below(self) -> bool:
        """Whether anything but the usual is wanted of any copy in the store's own memory."""
        return any(tier.marked_count for tier in self.tiers)

    def keep_below(self, root: bytes, hashes: Items[bytes], steps: Steps) -> None:
        """Copies of these blocks in the store's own memory are wanted so from now on."""
        own = [tier for tier in self.tiers if tier.private_memory and (steps != PLAIN or tier.marked_count)]
        for keys in self._copies_below(root, hashes, lossy=True) if own and hashes else ():
            for tier in own:
                tier.keep(keys, steps)

    def _copies_below(self, root: bytes, hashes: Items[bytes], *, lossy: bool) -> Iterator[list[CopyKey]]:
        """Keys of the copies that these blocks may have, one list a group and form."""
        forms = (FULL, COLD) if self.cools else (FULL,)
        for group in range(len(self.geometry.groups)):
            for exact in (True, False) if lossy else (True,):
                for form in forms:
                    yield self.residency.copy_key(root, group, hashes[0], form, exact).with_hashes(hashes)

    def forget(self, ids: Iterable[int]) -> None:
        ids = list(ids)
        self.mover.forget(ids)
        if self._names:
            for block_id in ids:
                self._names.pop(block_id, None)

    def forget_all(self) -> None:
        """For a reset: no block keeps a name under which it could be copied down, and nothing more is on its way."""
        self._names.clear()
        self.writes.clear("reset")

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

    def prefill_done(self, sequence: Sequence) -> None:
        """A prompt is computed: its blocks may cool from now on, and may be worth a copy."""
        self.enqueue_cool(sequence)
        self.offer_sequence(sequence)

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
            self._spill(ids, Cause.PREEMPTED)

    def hand_over(self, sequence: Sequence, first: int, last: int) -> None:
        """Blocks of a prompt that is still computed, just sealed: where everything is stored, they go down at once, so
        that another process can take the prompt over while it grows. Not those that will change their form.
        """
        if sequence.prefill_done or not self.slower or self.config.spill_policy != "everything":
            return
        if not self.cools or sequence.exact:
            for table in sequence.tables:
                self.offer([one for one in table.ids()[first:last].tolist() if one >= 0], self.slower, Cause.COMPUTED)

    def offer_sequence(self, sequence: Sequence) -> None:
        """Its prompt, or its turn, has been computed: offer what it sealed to the slower tiers, front first.

        Blocks that are about to cool are offered once they have: a copy in the form that they will keep is enough.
        """
        blocks = sequence.sealed_blocks
        if not self.slower or not blocks or not sequence.shared:
            return
        self.writes.admission.note_use(sequence.chain.hashes[sequence.noted_blocks : blocks])
        sequence.noted_blocks = max(blocks, sequence.noted_blocks)
        block_tokens, pool = self.geometry.block_tokens, self.pool
        cooling = range(0)
        if self.cools and not sequence.exact:
            cooling = range(1, (sequence.committed - self.config.residual_tokens) // block_tokens)
        for table in sequence.tables:
            now = []
            for position, block_id in enumerate(table.ids()[:blocks].tolist()):
                name = self._names.get(block_id) if block_id >= 0 else None
                if name is not None:
                    name.prefix_tokens = max(name.prefix_tokens, blocks * block_tokens)
                    cools = position in cooling and pool.form_of(block_id) == FULL
                    if not cools or self.mover.was_refused(block_id):
                        now.append(block_id)
            self.offer(now, self.slower, Cause.COMPUTED)

    def _offer_cooled(self, ids: Items[int]) -> None:
        """Blocks that were encoded, or that the codec refused."""
        self.offer(ids, self.slower, Cause.COMPUTED)

    def offer(self, ids: Items[int], tiers: Items[Tier] | None = None, cause: Cause = Cause.ASKED) -> None:
        """Have device blocks copied down in the background: to `tiers` (None: all), front of a prefix first.

        What a slower tier's policy does not want, and what is stored, queued or without a name, is left out.
        """
        copies = self.copies_of(ids)
        for tier in self.tiers if tiers is None else tiers:
            self._offer_to(tier, copies, cause, urgent=False)

    def _offer_to(self, tier: Tier, copies: Items[Waiting], cause: Cause, *, urgent: bool) -> Items[Waiting]:
        if not copies:
            return copies
        return self.writes.offer(tier, copies, self._candidates(copies, cause), urgent=urgent)

    def _candidates(self, copies: Items[Waiting], cause: Cause) -> list[Candidate]:
        tokens, names = self.geometry.block_tokens, self._names
        return [
            Candidate(copy.key.hash, cause, tokens, copy.size_bytes, names[copy.block_id].prefix_tokens)
            for copy in copies
        ]

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
        for tier in self.tiers:
            tier.expire(now)
        self.reuse.tell()
        self.mover.fetcher.expire(now, self.config.fetch_deadline_seconds)
        moved = self._compact()
        self.mover.start_cool(self.config.cool_blocks_per_step)
        for group in range(len(self.geometry.groups)):
            self._relieve(group)
        if self.tiers:
            self._offer_fading()
            self.writes.pump()
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
                self._spill(self._next_to_spill(group, form), Cause.PRESSURE)

    def _next_to_spill(self, group: int, form: int) -> list[int]:
        """The coldest blocks that have not had their turn, among those whose copies fill half of the first tier.

        Looking at the coldest few alone would keep a copy of just these, and one prompt's admission takes many. While
        no block becomes idle and none is evicted, as between most decode steps, the last look still holds.
        """
        pool, step_blocks = self.pool, self.config.spill_blocks_per_step
        state = (pool.tick, pool.evicted_count)
        looked, found = self._looked.get((group, form), ((-1, -1), _NONE))
        if looked != state:
            size = pool.layout.raw_slot_bytes[2 * group + form]
            reach = max(step_blocks, min(_REACH_BLOCKS, self.tiers[0].capacity_bytes // (2 * size)))
            found = pool.coldest(group, reach, form)
        if len(found):
            lives = self._lives(found)
            found = found[(lives >= 2) & (self._turns[found] != lives)]
        self._looked[group, form] = (state, found)
        return list(islice((one for one in found.tolist() if one in self._names), step_blocks))

    def _lives(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Since when each is idle and in which form, as one number; below 2: it is not idle. int64[n]."""
        forms = self.pool.ledger.class_of[ids] & 1
        return 2 * self.pool.idle_ticks(ids) + forms

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

    def _spill(self, ids: Items[int], cause: Cause) -> None:
        """Begin copying those blocks that have a name to the first tier, where they are not there yet.

        Once for each time a block is idle: a tier that is smaller than one step's copies would be written round and
        round otherwise, and a copy that was dropped from it for a better one would come back. What the queue has no
        room for now has not had its turn.
        """
        lives = dict(zip(ids, self._lives(np.array(ids, dtype=np.int32)).tolist(), strict=True))
        copies = [copy for copy in self.copies_of(ids) if self._turns[copy.block_id] != lives[copy.block_id]]
        left_out = {copy.block_id for copy in self._offer_to(self.tiers[0], copies, cause, urgent=True)}
        for copy in copies:
            if copy.block_id not in left_out:
                self._turns[copy.block_id] = lives[copy.block_id]

    def _offer_fading(self) -> None:
        """What own memory is about to evict goes to the slower tiers below it before, where it is worth it."""
        for place, tier in enumerate(self.tiers):
            below = [one for one in self.tiers[place + 1 :] if not one.private_memory]
            if below and tier.private_memory and tier.used_bytes >= _FADING_SHARE * tier.capacity_bytes:
                fading = tier.fading(max(1, 2 * self.config.spill_blocks_per_step))
                self.offer_copies(self._held_copies(fading, Cause.FADING), below)

    def _held_copies(self, held: Items[Fading], cause: Cause) -> list[tuple[Waiting, Candidate]]:
        """Copies that lie in own memory."""
        tokens = self.geometry.block_tokens
        return [
            (
                Waiting(one.key, one.parent, one.size_bytes),
                Candidate(one.key.hash, cause, tokens, one.size_bytes, is_used=one.is_used),
            )
            for one in held
        ]

    def offer_copies(self, offered: Items[tuple[Waiting, Candidate]], tiers: Items[Tier]) -> None:
        for tier in tiers if offered else ():
            self.writes.offer(tier, [copy for copy, _ in offered], [candidate for _, candidate in offered])

    # -- the end ------------------------------------------------------------------------------------------------

    def named_copies(self) -> list[tuple[Waiting, Candidate]]:
        """Everything that would go with the store, warmest first: blocks in use, idle ones, copies in own memory."""
        pool = self.pool
        ids = sorted(self._names, key=lambda one: (pool.is_idle(one), -pool.idle_since(one)))
        copies = self.copies_of(ids)
        found = list(zip(copies, self._candidates(copies, Cause.CLOSE), strict=True))
        for tier in self.tiers:
            if tier.private_memory:
                found += self._held_copies(tier.fading(None), Cause.CLOSE)
        return found

    def copies_of(self, ids: Items[int]) -> list[Waiting]:
        """The copies of those blocks that can be made now: named, and not about to change form."""
        pool = self.pool
        slot_bytes = pool.layout.raw_slot_bytes
        copies: list[Waiting] = []
        for block_id in ids:
            block_hash, name = pool.hash_of(block_id), self._names.get(block_id)
            if block_hash is None or name is None or pool.is_changing(block_id):
                continue
            group, form = pool.group_of(block_id), pool.form_of(block_id)
            key = self.residency.copy_key(name.root, group, block_hash, form, pool.computed_exact(block_id))
            size_bytes, steps = slot_bytes[2 * group + form], pool.steps_of(block_id)
            copies.append(Waiting(key, name.parent, size_bytes, block_id, steps))
        return copies
