"""What a tier with room of its own holds and what goes first: copies, the blocks they belong to, parents, recency.

A copy may go when it is not fenced (pinned, read, being written) and its block has no stored children or has another
copy: leaves first. Candidates are kept on shelves, by slot size unless a subclass says otherwise; of a shelf the lowest
rank goes first, which is priority and then recency. Where the slots lie and which size gives way is the subclass's.

Pure bookkeeping, no bytes. Used by the host and the disk tier, under the tier's lock.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeAlias, TypeVar

from allocator.block_marks import PRIORITY_DEFAULT
from allocator.errors import UsageError
from kvstore.copy_key import CopyKey

_TICK_BITS = 48
_BlockName: TypeAlias = tuple[bytes, int, bytes]  # root, group, hash: a block, whatever form its copies have


def leading_run(family: Mapping[bytes, object] | None, hashes: Sequence[bytes]) -> int:
    """How many of `hashes`, from the first on, are keys of `family`: one pass, no Python code a hash."""
    if not family or not hashes:
        return 0
    try:
        itemgetter(*hashes)(family)
    except KeyError as missing:
        return hashes.index(missing.args[0])
    return len(hashes)


class _Block:
    """A block with copies here, or with stored children, or both. `parent` is set only while it has copies."""

    __slots__ = ("child_copies", "copies", "name", "parent")

    def __init__(self, name: _BlockName) -> None:
        self.name = name
        self.parent: _Block | None = None
        self.copies: list[Any] = []
        self.child_copies: set[Any] = set()


class CopyEntry:
    """One copy and its slot."""

    __slots__ = (
        "block",
        "family",
        "is_linked",
        "is_queued",
        "key",
        "named_tick",
        "parent",
        "pin_count",
        "priority",
        "reader_count",
        "shelf",
        "size_bytes",
        "slot_bytes",
        "tick",
        "use_count",
    )

    def __init__(self, key: CopyKey, parent: bytes | None, size_bytes: int, slot_bytes: int) -> None:
        self.key = key
        self.family = key.family
        self.parent = None if parent == key.root else parent
        self.size_bytes = size_bytes
        self.slot_bytes = slot_bytes
        self.shelf: Any = slot_bytes  # hashable
        self.priority = PRIORITY_DEFAULT
        self.block: _Block | None = None
        self.reader_count = 0
        self.pin_count = 0
        self.tick = 0
        self.named_tick = 0  # the last use when `fading` named it
        self.use_count = 0  # reads and touches since it was stored
        self.is_linked = False  # can be found
        self.is_queued = False  # is in its shelf's heap of candidates

    @property
    def rank(self) -> int:
        """What goes first has the lowest: the time of its last use, for the usual priority."""
        return self.tick + (self.priority - PRIORITY_DEFAULT << _TICK_BITS)

    @property
    def is_fenced(self) -> bool:
        return self.reader_count > 0 or self.pin_count > 0

    @property
    def may_go(self) -> bool:
        """Found, not fenced, and no stored block would lose its only parent."""
        if self.reader_count or self.pin_count or not self.is_linked:
            return False
        block = self.block
        return block is not None and (not block.child_copies or len(block.copies) > 1)


Entry = TypeVar("Entry", bound=CopyEntry)


class CopyIndex(ABC, Generic[Entry]):
    """See the module. A subclass reserves entries (and counts used_bytes) and says what becomes of a free slot."""

    def __init__(self) -> None:
        self.families: dict[tuple[object, ...], dict[bytes, Entry]] = {}
        self.used_bytes = 0
        self.peak_bytes = 0
        self.copy_count = 0
        self.orphan_count = 0
        self.counts: Counter[str] = Counter()
        self._blocks: dict[_BlockName, _Block] = {}
        self._candidates: dict[Hashable, list[tuple[int, int, Entry]]] = {}
        self._linked_on: Counter[Hashable] = Counter()  # by shelf
        self._tick = 0

    @abstractmethod
    def _free(self, entry: Entry) -> None:
        """Nobody needs this entry's slot any more."""

    # lookup and recency ----------------------------------------------------------------------------------------------

    def find(self, key: CopyKey) -> Entry | None:
        family = self.families.get(key.family)
        return None if family is None else family.get(key.hash)

    def twin(self, entry: Entry) -> Entry | None:
        """What is found under an entry's key: itself, another, or nothing."""
        family = self.families.get(entry.family)
        return None if family is None else family.get(entry.key.hash)

    def touch(self, entry: Entry) -> None:
        self._tick += 1
        entry.tick = self._tick

    @property
    def tick(self) -> int:
        """The time of the last use, counted in uses."""
        return self._tick

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        """One pin more on each copy that is there."""
        entries = [self.find(key) for key in keys]
        for entry in entries:
            if entry is not None:
                entry.pin_count += 1
        return [entry is not None for entry in entries]

    def unpin(self, keys: Sequence[CopyKey], tier_name: str) -> None:
        """Give pins back. UsageError when one was not granted, and then nothing changes."""
        counts = Counter(keys)
        for key, count in counts.items():
            entry = self.find(key)
            pins = 0 if entry is None else entry.pin_count
            if pins < count:
                raise UsageError(f"tier {tier_name}: unpin x{count} of a copy pinned {pins} times: {key}")
        for key, count in counts.items():
            entry = self.find(key)
            assert entry is not None
            entry.pin_count -= count
            self.requeue(entry)

    # a copy's life ---------------------------------------------------------------------------------------------------

    def occupy(self, entry: Entry) -> None:
        """Count a reserved slot; its copy is fenced while it is written."""
        entry.reader_count = 1
        self.used_bytes += entry.slot_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def publish(self, entry: Entry) -> None:
        """The bytes are there: the copy can be found from now on."""
        entry.reader_count -= 1
        entry.is_linked = True
        family = self.families.get(entry.family)
        if family is None:
            family = self.families[entry.family] = {}
        family[entry.key.hash] = entry
        self.copy_count += 1
        self._linked_on[entry.shelf] += 1
        self.touch(entry)
        block = entry.block = self._block(entry.key, entry.key.hash)
        if block.parent is None and entry.parent is not None:
            block.parent = self._block(entry.key, entry.parent)
            block.parent.child_copies.update(block.copies)
            self.orphan_count += 0 if block.parent.copies else len(block.copies)
        if not block.copies:
            self.orphan_count -= len(block.child_copies)
        block.copies.append(entry)
        if block.parent is not None:
            block.parent.child_copies.add(entry)
            self.orphan_count += 0 if block.parent.copies else 1
        for copy in block.copies:
            if not copy.is_queued:
                self.requeue(copy)

    def abandon(self, entry: Entry) -> None:
        """The write did not succeed, or came too late: give the slot back."""
        entry.reader_count -= 1
        self._free(entry)

    def unlink(self, entry: Entry) -> None:
        """No longer found. The slot is free at once, or when its last reader is done."""
        family = self.families[entry.family]
        del family[entry.key.hash]
        if not family:
            del self.families[entry.family]
        entry.is_linked = False
        entry.pin_count = 0
        self.copy_count -= 1
        self._linked_on[entry.shelf] -= 1
        if not self._linked_on[entry.shelf]:
            del self._linked_on[entry.shelf]
        block = entry.block
        assert block is not None
        block.copies.remove(entry)
        parent = block.parent
        if not block.copies:
            self.orphan_count += len(block.child_copies)
            block.parent = None
        if parent is not None:
            parent.child_copies.remove(entry)
            self.orphan_count -= 0 if parent.copies else 1
            if not parent.child_copies or len(parent.copies) > 1:
                for copy in parent.copies:
                    self.requeue(copy)
        for one in (block, parent):
            if one is not None and not one.copies and not one.child_copies:
                self._blocks.pop(one.name, None)
        if entry.reader_count == 0:
            self._free(entry)

    def end_read(self, entry: Entry) -> None:
        entry.reader_count -= 1
        if entry.reader_count == 0:
            if entry.is_linked:
                self.requeue(entry)
            else:
                self._free(entry)

    def collect_orphans(self) -> int:
        collected = 0
        while self.orphan_count:
            orphans = [
                entry
                for block in list(self._blocks.values())
                if not block.copies
                for entry in block.child_copies
                if not entry.is_fenced
            ]
            if not orphans:
                break
            for entry in orphans:
                self.unlink(entry)
            collected += len(orphans)
        self.counts["orphans_collected"] += collected
        return collected

    # eviction --------------------------------------------------------------------------------------------------------

    def requeue(self, entry: Entry) -> None:
        """Make an entry a candidate, if it may go. Every copy that may go is in the heap of its shelf."""
        if not entry.is_queued and entry.may_go:
            self._enqueue(entry)

    def _enqueue(self, entry: Entry) -> None:
        """Put it in at its rank; once more where it is in at a higher one."""
        entry.is_queued = True
        heap = self._candidates.get(entry.shelf)
        if heap is None:
            heap = self._candidates[entry.shelf] = []
        heapq.heappush(heap, (entry.rank, id(entry), entry))
        if len(heap) > 64 and len(heap) > 2 * self._linked_on[entry.shelf]:  # deleted ones must not pile up
            held = {id(entry): entry for _, _, entry in heap if entry.is_linked}
            heap[:] = [(entry.rank, number, entry) for number, entry in held.items()]
            heapq.heapify(heap)

    def _oldest(self, shelf: Hashable) -> Entry | None:
        """The copy of a shelf that goes first, of those that may; it stays queued."""
        heap = self._candidates.get(shelf, [])
        while heap:
            rank, _, entry = heap[0]
            if not entry.may_go:
                heapq.heappop(heap)
                entry.is_queued = False
            elif rank != entry.rank:
                heapq.heapreplace(heap, (entry.rank, id(entry), entry))
            else:
                return entry
        return None

    def fading(self, count: int) -> list[Entry]:
        """Copies that go next and what they hang on, front first, each named once since its last use; at most `count`.

        A prefix goes leaf by leaf, within one put if need be, and without its front no leaf is worth keeping.
        """
        found: list[Entry] = []
        for shelf, heap in self._candidates.items():
            looked_at: list[tuple[int, int, Entry]] = []
            while len(looked_at) < count and self._oldest(shelf) is not None:
                looked_at.append(heapq.heappop(heap))
            for item in looked_at:
                heapq.heappush(heap, item)
            for _, _, leaf in looked_at:
                for entry in self._unnamed_up_to(leaf)[: count - len(found)]:
                    entry.named_tick = entry.tick
                    found.append(entry)
        return found

    def _unnamed_up_to(self, leaf: Entry) -> list[Entry]:
        """The leaf's prefix, front first, from behind the last copy that was named since its last use."""
        chain: list[Entry] = []
        entry: Entry | None = leaf
        while entry is not None and entry.named_tick != entry.tick:
            chain.append(entry)
            parent = entry.block.parent if entry.block is not None else None
            entry = parent.copies[0] if parent is not None and parent.copies else None
        return chain[::-1]

    def _evict(self, entry: Entry) -> None:
        self.counts["evicted"] += 1
        self.counts["evicted_bytes"] += entry.slot_bytes
        self.unlink(entry)

    def _block(self, key: CopyKey, hash: bytes) -> _Block:
        name = (key.root, key.group, hash)
        block = self._blocks.get(name)
        if block is None:
            block = self._blocks[name] = _Block(name)
        return block

    def behind(self, root: bytes, hash: bytes, most: int) -> list[CopyKey]:
        """Copies of a block and of the blocks that follow it, nearest first; at most so many."""
        groups = {entry.key.group for rows in self.families.values() if (entry := rows.get(hash)) is not None}
        level = [block for group in sorted(groups) if (block := self._blocks.get((root, group, hash))) is not None]
        keys: list[CopyKey] = []
        while level and len(keys) < most:
            keys += [entry.key for block in level for entry in block.copies]
            following = {id(entry.block): entry.block for block in level for entry in block.child_copies}
            level = list(following.values())
        return keys[:most]

    # check -----------------------------------------------------------------------------------------------------------

    def broken_rules(self) -> list[str]:
        """Rules that do not hold, of those that need no knowledge of slots."""
        linked = self.linked()
        queued = {id(item[2]) for heap in self._candidates.values() for item in heap}
        orphans = sum(len(block.child_copies) for block in self._blocks.values() if not block.copies)
        blocks = list(self._blocks.values())
        children = {id(copy) for block in blocks for copy in block.child_copies}
        with_parent = {id(copy) for block in blocks if block.parent is not None for copy in block.copies}
        rules = (
            ("copies are counted", len(linked) == self.copy_count == sum(len(block.copies) for block in blocks)),
            ("orphans are counted", orphans == self.orphan_count),
            ("parents know their children", children == with_parent),
            ("what may go is a candidate", all(id(entry) in queued for entry in linked if entry.may_go)),
            ("counts are not negative", all(entry.reader_count >= 0 and entry.pin_count >= 0 for entry in linked)),
            ("blocks are kept for a reason", all(block.copies or block.child_copies for block in blocks)),
        )
        return [name for name, holds in rules if not holds]

    def linked(self) -> list[Entry]:
        """Every copy that can be found."""
        return [entry for family in self.families.values() for entry in family.values()]
