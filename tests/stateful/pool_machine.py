"""Pool, tables and extents against a plain model, over a byte array that stands for the slab.

Every token of every live sequence is a mark written to the slot that the table names, with a bit that says whether
anything lossy was read before it. The model only remembers token lists. After every step each live token is read back
through table, entry and slot offset, the pool's own invariants are checked, and reference counts are added up. What is
wrong with a slot, a form, a share, a copy or an eviction therefore shows as a foreign mark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from allocator import (
    COLD,
    FULL,
    LRU,
    BlockPool,
    BlockState,
    BlockTable,
    CannotRollback,
    CapacityError,
    EvictionPolicy,
    ExtentLayout,
    Move,
    UsageError,
    window_first_block,
)

BLOCK_TOKENS = 2
WINDOW_TOKENS = 4
EXTENT_COUNT = 9
LOSSY = 128
WINDOWS = (None, WINDOW_TOKENS)
GROUPS = range(len(WINDOWS))

pick = st.integers(min_value=0, max_value=1_000_000)
SEQUENCES_MAX = 5
HOLDS_MAX = 4
_TRAFFIC = ("admit",) * 5 + ("extend",) * 4 + ("finish", "rollback", "window", "fork") * 2
_PRESSURE = ("cool",) * 9 + ("end_cool", "compact") * 3 + ("end_move", "evict", "touch", "room")
_HOLDS = ("pin", "unpin", "begin", "end", "exact", "exact", "drop", "misuse", "abort")

keep_back = st.sampled_from((0, 0, 1, 2, 9))
tokens = st.lists(st.integers(min_value=1, max_value=2), min_size=3, max_size=12)


@dataclass
class Sequence:
    """What the model knows: the tokens; and the tables under test, one a group."""

    tables: list[BlockTable]
    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    sealed: list[int] = field(default_factory=lambda: [0, 0])


@dataclass
class Held:
    """A block that is pinned or under transfer, and the bytes its slot had when that began."""

    block_id: int
    place: int
    content: bytes
    sealed: bool


def chain(token_ids: list[int]) -> list[bytes]:
    """Hash of each full block of a token list, containing all before it."""
    hashes, previous = [], b""
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        previous = hashlib.sha256(previous + bytes(token_ids[end - BLOCK_TOKENS : end])).digest()
        hashes.append(previous)
    return hashes


class PoolMachine(RuleBasedStateMachine):
    """The machine. Mutation tests derive from it with a broken pool or table."""

    pool_class: type[BlockPool] = BlockPool
    policy: ClassVar[Callable[[], Callable[[int], EvictionPolicy]]] = lambda: LRU
    table_class: type[BlockTable] = BlockTable

    @initialize()
    def build(self) -> None:
        self.layout = ExtentLayout(512 * EXTENT_COUNT + 100, (256, 128), (64, 64), extent_bytes=512)
        self.pool = self.pool_class(self.layout, type(self).policy(), self.note_eviction)
        self.memory = bytearray(b"\xff" * self.layout.total_bytes)
        self.sequences: list[Sequence] = []
        self.cooling: list[tuple[int, int]] = []
        self.moves: list[Move] = []
        self.pinned: list[Held] = []
        self.transfers: list[Held] = []
        self.exact: list[BlockTable] = []
        self.named: dict[bytes, list[int]] = {}
        self.evicted: list[tuple[int, bytes]] = []

    def note_eviction(self, group: int, ids: list[int], hashes: list[bytes], computed: list[bool], form: int) -> None:
        assert len(ids) == len(hashes) == len(computed) > 0
        assert all(self.pool.state_of(block_id) is BlockState.IDLE for block_id in ids)
        self.evicted.extend((group, block_hash) for block_hash in hashes)

    # -- the rules: few, with weights inside, so that an example of 40 steps gets somewhere --------------------------

    @rule(kind=st.sampled_from(_TRAFFIC), which=pick, token_ids=tokens, exact=st.booleans(), keep=keep_back)
    def traffic(self, kind: str, which: int, token_ids: list[int], exact: bool, keep: int) -> None:
        if kind == "admit" or not self.sequences:
            if len(self.sequences) < SEQUENCES_MAX:
                self.admit(token_ids, exact, keep)
            return
        sequence = self.sequences[which % len(self.sequences)]
        if kind == "extend":
            self.write(sequence, token_ids[:5])
            self.commit_all_but(sequence, keep)
        elif kind == "rollback":
            self.rollback(sequence, len(token_ids))
        elif kind == "window":
            sequence.tables[1].drop_window(min(sequence.committed, sequence.sealed[1] * BLOCK_TOKENS))
            if exact:
                self.rollback(sequence, len(token_ids))
        elif kind == "fork" and len(self.sequences) < SEQUENCES_MAX:
            self.fork(sequence)
            if exact:  # both go on at once, into what was one tail
                self.write(sequence, token_ids[:1])
                self.write(self.sequences[-1], token_ids[-1:])
        elif kind == "finish":
            self.sequences.remove(sequence)
            self.observe(sequence)
            if exact:
                for policy in self.pool.policies:
                    policy.settle()
            for table in sequence.tables:
                table.release()

    @rule(
        kind=st.sampled_from(_PRESSURE),
        which=pick,
        how=st.integers(0, 6),
        group=st.sampled_from(GROUPS),
        form=st.sampled_from((FULL, FULL, COLD)),
    )
    def pressure(self, kind: str, which: int, how: int, group: int, form: int) -> None:
        if kind == "cool":
            self.begin_cool(which, ("finish", "finish", "finish", "cancel", "later", "later", "later")[how])
        elif kind == "end_cool" and self.cooling:
            self.end_one_cool(which % len(self.cooling), cancel=how == 0)
        elif kind == "compact" and not self.moves:
            self.plan_compaction(group, form, apply=how > 2)
        elif kind == "end_move" and self.moves:
            self.end_one_move(cancel=how == 0)
        elif kind == "evict":
            self.evict_coldest(group, form, how)
        elif kind == "touch":
            self.touch(which)
        elif kind == "room":
            self.take_everything(group, form, how)

    @rule(kind=st.sampled_from(_HOLDS), which=pick, where=pick)
    def hold(self, kind: str, which: int, where: int) -> None:
        if kind == "pin" and len(self.pinned) < HOLDS_MAX:
            self.pin(which)
        elif kind == "unpin" and self.pinned:
            self.pool.unpin([self.pinned.pop(which % len(self.pinned)).block_id])
        elif kind == "begin" and len(self.transfers) < HOLDS_MAX:
            self.begin_transfer(which)
        elif kind == "end" and self.transfers:
            self.pool.end_transfer([self.transfers.pop(which % len(self.transfers)).block_id])
        elif kind == "exact" and len(self.exact) < 3:
            self.hold_exact(which, where)
        elif kind == "abort" and self.sequences:
            self.abort(which)
        elif kind == "drop" and self.exact:
            reader = self.exact.pop(which % len(self.exact))
            self.pool.drop_exact(reader.ids())
            reader.release()
        elif kind == "misuse" and self.sequences:
            self.misuse(which, where)

    def observe(self, sequence: Sequence) -> None:
        """What a store tells its policy of a sequence that ends."""
        count = min(sequence.sealed)
        keys = np.array([int.from_bytes(name[:8], "little") for name in chain(sequence.tokens)[:count]], np.uint64)
        self.pool.policies[0].observe(keys, [table.ids()[:count] for table in sequence.tables])

    @staticmethod
    def must(condition: bool, why: str) -> None:
        if not condition:
            raise AssertionError(why)

    # -- the device -----------------------------------------------------------------------------------------------

    def place(self, group: int, entry: int) -> int:
        return self.layout.slot_offset_bytes(2 * group + (entry & 1), entry >> 1)

    def place_of(self, block_id: int) -> int:
        return self.place(self.pool.group_of(block_id), self.pool.entry_of(block_id))

    def content(self, place: int) -> bytes:
        return bytes(self.memory[place : place + BLOCK_TOKENS])

    def copy(self, source: int, target: int, lossy: bool = False) -> None:
        for offset in range(BLOCK_TOKENS):
            self.memory[target + offset] = self.memory[source + offset] | (LOSSY if lossy else 0)

    def tainted(self, sequence: Sequence) -> bool:
        """Whether anything that the sequence reads now is lossy."""
        for group, table in enumerate(sequence.tables):
            for position in range(-(-table.token_count // BLOCK_TOKENS)):
                if table.id_at(position) < 0:
                    continue
                place = self.place(group, int(table.entries()[position]))
                filled = min(BLOCK_TOKENS, table.token_count - position * BLOCK_TOKENS)
                if any(mark & LOSSY for mark in self.memory[place : place + filled]):
                    return True
        return False

    # -- sequences ------------------------------------------------------------------------------------------------

    def free_view(self) -> list[int]:
        return [self.pool.available(group, form) for group in GROUPS for form in (FULL, COLD)]

    def grow(self, sequence: Sequence, count: int) -> bool:
        """Room for `count` more tokens in all groups; False, and nothing changed, when there is none."""
        appended: list[tuple[BlockTable, int]] = []
        for group, table in enumerate(sequence.tables):
            missing = table.missing_blocks(count)
            available = self.pool.available(group)
            try:
                ids = self.pool.allocate(group, missing)
            except CapacityError as error:
                self.must(error.needed == missing > available == error.available, f"{error}, {missing}, {available}")
                for other, blocks in appended:
                    gone = other.ids()[len(other) - blocks :]
                    self.pool.release(gone[::-1])
                    other._size -= blocks
                return False
            assert missing <= available
            assert len(set(ids.tolist())) == missing
            assert ids.base is None
            table.append(ids)
            appended.append((table, missing))
        return True

    def write(self, sequence: Sequence, token_ids: list[int]) -> bool:
        try:
            for group, table in enumerate(sequence.tables):
                change = table.writable_tail()
                if change is not None:
                    source = self.layout.slot_offset_bytes(2 * group + change.source_form, change.source_slot)
                    self.copy(source, self.layout.slot_offset_bytes(2 * group, change.target_slot))
        except CapacityError:
            return False
        if not self.grow(sequence, len(token_ids)):
            return False
        for token in token_ids:
            mark = token | (LOSSY if self.tainted(sequence) else 0)
            for group, table in enumerate(sequence.tables):
                (index,) = table.slot_mapping(table.token_count, 1).tolist()
                slot, offset = divmod(index, BLOCK_TOKENS)
                self.memory[self.layout.slot_offset_bytes(2 * group, slot) + offset] = mark
                table.advance(1)
            sequence.tokens.append(token)
        return True

    def longest_hit(self, hashes: list[bytes], exact: bool) -> tuple[int, list[list[int]]]:
        """The most leading blocks that every group has as far as it reads them, and the ids, -1 before a window."""
        found = [self.pool.index(group).find_many(hashes, exact) for group in GROUPS]
        for count in range(len(hashes), 0, -1):
            firsts = [
                window_first_block(count * BLOCK_TOKENS, window, BLOCK_TOKENS) if window else 0 for window in WINDOWS
            ]
            if all(min(ids[first:count]) >= 0 for first, ids in zip(firsts, found, strict=True)):
                return count, [[-1] * first + ids[first:count] for first, ids in zip(firsts, found, strict=True)]
        return 0, [[] for _ in GROUPS]

    def admit(self, token_ids: list[int], exact: bool, keep: int) -> None:
        hashes = chain(token_ids[:-1])
        sequence = Sequence([self.table_class(self.pool, group, BLOCK_TOKENS, WINDOWS[group]) for group in GROUPS])
        count, ids = self.longest_hit(hashes, exact)
        for group, table in enumerate(sequence.tables):
            self.pool.share(ids[group])
            table.append(ids[group])
            table.advance(count * BLOCK_TOKENS)
            if exact:
                assert all(self.pool.reads_exact(block_id) for block_id in ids[group] if block_id >= 0)
        sequence.tokens = token_ids[: count * BLOCK_TOKENS]
        sequence.committed = len(sequence.tokens)
        sequence.sealed = [count, count]
        if exact:
            assert not self.tainted(sequence)
        if self.write(sequence, token_ids[count * BLOCK_TOKENS :]):
            self.sequences.append(sequence)
            self.commit_all_but(sequence, keep)
        else:
            for table in sequence.tables:
                table.release()

    def commit_all_but(self, sequence: Sequence, keep: int) -> None:
        """Seals the full blocks of all but the last `keep` tokens, as one run where that can be."""
        sequence.committed = max(sequence.committed, len(sequence.tokens) - keep)
        hashes = chain(sequence.tokens[: sequence.committed])
        for position, block_hash in enumerate(hashes):
            self.named[block_hash] = sequence.tokens[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS]
        evictions = self.pool.evicted_count
        for group, table in enumerate(sequence.tables):
            first = max(sequence.sealed[group], table.first_live)
            run = table.ids()[first : len(hashes)]
            open_run = [self.pool.state_of(int(block_id)) is BlockState.OPEN for block_id in run]
            exact = [self.is_exact(int(block_id)) for block_id in run]
            if len(run) > 1 and all(open_run) and len(set(exact)) == 1:
                table.replace_run(first, self.pool.seal_many(run, hashes[first:], exact[0]))
            else:
                for offset, block_id in enumerate(run.tolist()):
                    if self.pool.state_of(block_id) is BlockState.OPEN:
                        table.replace(first + offset, self.pool.seal(block_id, hashes[first + offset], exact[offset]))
            sequence.sealed[group] = len(hashes)
        assert self.pool.evicted_count == evictions

    def is_exact(self, block_id: int) -> bool:
        return not any(mark & LOSSY for mark in self.content(self.place_of(block_id)))

    def rollback(self, sequence: Sequence, count: int) -> None:
        target = max(0, len(sequence.tokens) - count)
        sliding = sequence.tables[1]
        needed = max(0, target - WINDOW_TOKENS + 1) // BLOCK_TOKENS
        lost = any(
            sliding.id_at(position) < 0 for position in range(needed, min(len(sliding), -(-target // BLOCK_TOKENS)))
        )
        try:
            sliding.truncate(target)
        except CannotRollback:
            assert lost
            return
        assert not lost
        sequence.tables[0].truncate(target)
        sequence.tokens = sequence.tokens[:target]
        sequence.committed = min(sequence.committed, target)
        sequence.sealed = [min(count, target // BLOCK_TOKENS) for count in sequence.sealed]

    def fork(self, parent: Sequence) -> None:
        child = Sequence(
            [table.fork() for table in parent.tables], list(parent.tokens), parent.committed, list(parent.sealed)
        )
        self.sequences.append(child)

    def misuse(self, which: int, where: int) -> None:
        """A block given twice, or one that is free: refused, and nothing has changed."""
        before = self.pool.ledger.life.tobytes()
        ids = self.sequences[which % len(self.sequences)].tables[0].ids()
        free = np.flatnonzero(self.pool.ledger.life & 7 == 0).tolist()
        batches = [[int(ids[0]), int(ids[0])]] if len(ids) else []
        batches += [[*ids.tolist(), free[where % len(free)]]] if free else []
        for batch in batches:
            for call in (self.pool.release, self.pool.share):
                try:
                    call(batch)
                except UsageError:
                    continue
                raise AssertionError(f"{call.__name__} accepted {batch}")
        assert self.pool.ledger.life.tobytes() == before

    # -- cooling and compaction -----------------------------------------------------------------------------------

    def blocks(self, *states: BlockState) -> list[int]:
        words = self.pool.ledger.life[: self.pool.ledger.id_capacity] & 7
        return np.flatnonzero(np.isin(words, states)).tolist()

    def begin_cool(self, which: int, end: str) -> None:
        candidates = self.blocks(BlockState.SEALED) if which % 4 else []  # what sequences read, more often than not
        candidates = [i for i in candidates if self.pool.form_of(i) == FULL] or self.blocks(
            BlockState.SEALED, BlockState.IDLE
        )
        if not candidates:
            return
        block_id = candidates[which % len(candidates)]
        holders = self.has_exact_reader(block_id)
        pinned = any(held.block_id == block_id for held in self.pinned)
        target = self.pool.begin_cool(block_id)
        if target is not None:
            assert not holders
            assert not pinned
            place = self.place_of(block_id)
            self.copy(place, self.place_of(target), lossy=True)
            self.cooling.append((block_id, target))
            if end != "later":
                self.end_one_cool(len(self.cooling) - 1, end == "cancel")

    def has_exact_reader(self, block_id: int) -> bool:
        return any(reader.id_at(0) == block_id for reader in self.exact)

    def end_one_cool(self, which: int, cancel: bool) -> None:
        block_id, target = self.cooling.pop(which)
        if cancel:
            self.pool.cancel_cool(block_id, target)
            assert self.pool.state_of(target) in (BlockState.FREE, BlockState.RETIRED)
            return
        must_refuse = self.has_exact_reader(block_id) or any(held.block_id == block_id for held in self.pinned)
        finished = self.pool.finish_cool(block_id, target)
        assert not (finished and must_refuse)

    def plan_compaction(self, group: int, form: int, apply: bool) -> None:
        self.moves = self.pool.plan_compaction(group, form)
        for move in self.moves:
            source = self.layout.slot_offset_bytes(move.class_index, move.source_slot)
            self.copy(source, self.layout.slot_offset_bytes(move.class_index, move.target_slot))
        while apply and self.moves:
            self.end_one_move(cancel=False)

    def end_one_move(self, cancel: bool) -> None:
        move = self.moves.pop()
        source = self.layout.slot_offset_bytes(move.class_index, move.source_slot)
        self.copy(source, self.layout.slot_offset_bytes(move.class_index, move.target_slot))
        if cancel:
            self.pool.cancel_move(move)
        else:
            self.pool.apply_move(move)

    # -- holds ----------------------------------------------------------------------------------------------------

    def held(self, which: int) -> Held | None:
        candidates = self.blocks(BlockState.SEALED, BlockState.IDLE, BlockState.OPEN)
        if not candidates:
            return None
        block_id = candidates[which % len(candidates)]
        place = self.place_of(block_id)
        return Held(block_id, place, self.content(place), self.pool.state_of(block_id) is not BlockState.OPEN)

    def pin(self, which: int) -> None:
        held = self.held(which)
        if held is not None:
            self.pool.pin([held.block_id])
            self.pinned.append(held)

    def begin_transfer(self, which: int) -> None:
        held = self.held(which)
        if held is None:
            return
        if self.pool.is_changing(held.block_id):
            try:
                self.pool.begin_transfer([held.block_id])
            except UsageError:
                return
            raise AssertionError("a transfer of a block that is about to change its slot was accepted")
        self.pool.begin_transfer([held.block_id])
        self.transfers.append(held)

    def hold_exact(self, which: int, where: int) -> None:
        """A reader that demands full precision: one more reference, in a table of its own. Cooling blocks first."""
        ids = [block_id for block_id, _ in self.cooling if self.pool.group_of(block_id) == 0]
        if not ids and self.sequences:
            ids = [i for i in self.sequences[which % len(self.sequences)].tables[0].ids().tolist() if i >= 0]
        ids = [i for i in ids if self.pool.form_of(i) == FULL and self.pool.state_of(i) is not BlockState.FENCED]
        if not ids:
            return
        block_id = ids[where % len(ids)]
        self.pool.share([block_id])
        self.pool.hold_exact([block_id])
        reader = BlockTable(self.pool, 0, BLOCK_TOKENS)
        reader.append([block_id])
        self.exact.append(reader)
        cooling = [place for place, (cooled, _) in enumerate(self.cooling) if cooled == block_id]
        if cooling and where % 2:
            self.end_one_cool(cooling[0], cancel=False)

    def abort(self, which: int) -> None:
        """A sequence goes while its last block is under transfer; the transfer ends some time later."""
        sequence = self.sequences.pop(which % len(self.sequences))
        block_id = sequence.tables[0].id_at(len(sequence.tables[0]) - 1) if len(sequence.tables[0]) else -1
        if block_id >= 0 and not self.pool.is_changing(block_id) and len(self.transfers) < HOLDS_MAX:
            place = self.place_of(block_id)
            self.pool.begin_transfer([block_id])
            nobody_writes = self.pool.state_of(block_id) is not BlockState.OPEN or self.pool.ref_count(block_id) == 1
            self.transfers.append(Held(block_id, place, self.content(place), sealed=nobody_writes))
        for table in sequence.tables:
            table.release()

    # -- eviction -------------------------------------------------------------------------------------------------

    def evict_coldest(self, group: int, form: int, count: int) -> None:
        ids = self.pool.coldest(group, count, form)
        assert len(ids) <= count
        self.pool.evict(ids)

    def touch(self, which: int) -> None:
        idle = self.blocks(BlockState.IDLE)
        if idle:
            self.pool.touch([idle[which % len(idle)]])

    def take_everything(self, group: int, form: int, leave: int) -> None:
        """`available` and `allocate` agree, to the block; then all is given back."""
        before = self.pool.ledger.life.tobytes()
        available = self.pool.available(group, form)
        try:
            self.pool.allocate(group, available + 1, form)
        except CapacityError as error:
            self.must(error.available == available, f"{error}, counted {available}")
        else:
            raise AssertionError("allocate gave more than was available")
        assert self.pool.ledger.life.tobytes() == before
        ids = self.pool.allocate(group, 0 if leave > 1 else available - min(available, leave), form)
        for block_id in ids.tolist():
            place = self.place_of(block_id)
            self.memory[place : place + BLOCK_TOKENS] = b"\x7f" * BLOCK_TOKENS
        self.pool.release(ids)

    # -- what must hold -------------------------------------------------------------------------------------------

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "pool"):
            self.nothing_foreign_is_read()
            self.hits_are_what_they_say()
            self.holds_hold()
            tables = [table for sequence in self.sequences for table in sequence.tables]
            self.pool.check_invariants([*tables, *self.exact])

    def nothing_foreign_is_read(self) -> None:
        for sequence in self.sequences:
            for group, table in enumerate(sequence.tables):
                assert table.token_count == len(sequence.tokens) <= table.capacity_tokens
                entries = table.entries().tolist()
                for position in range(-(-table.token_count // BLOCK_TOKENS)):
                    if entries[position] < 0:
                        assert WINDOWS[group] is not None
                        assert position < table.first_live
                        continue
                    expected = sequence.tokens[position * BLOCK_TOKENS : (position + 1) * BLOCK_TOKENS]
                    place = self.place(group, entries[position])
                    found = [mark & ~LOSSY for mark in self.memory[place : place + len(expected)]]
                    assert found == expected, f"group {group}, block {position}: {found} instead of {expected}"

    def hits_are_what_they_say(self) -> None:
        for group in GROUPS:
            index = self.pool.index(group)
            for names, exact in ((index.exact, True), (index.lossy, False)):
                for block_hash, block_id in names.items():
                    found = [mark & ~LOSSY for mark in self.content(self.place_of(block_id))]
                    assert found == self.named[block_hash], f"block {block_id} was written after it was sealed"
                    assert self.pool.reads_exact(block_id) == exact
                    assert not (exact and any(mark & LOSSY for mark in self.content(self.place_of(block_id))))

    def holds_hold(self) -> None:
        for held in [*self.pinned, *self.transfers]:
            assert self.place_of(held.block_id) == held.place, "a held block moved"
            assert self.pool.state_of(held.block_id) not in (BlockState.FREE, BlockState.RETIRED)
            if held.sealed:
                assert self.content(held.place) == held.content, "the slot of a held block was written"
