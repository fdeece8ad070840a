"""What the disk tier holds, in memory: CopyIndex over index pages and slots, and the byte budget of both.

The index file never shrinks while it is open, so its room is what it has ever needed; pages that deleted values leave
are used again by values, slots that deleted copies leave by slots of their size or, as holes, by anything. Eviction is
least recently used over all sizes, leaves first.

Pure bookkeeping; changes of files are written into a Plan. Used by DiskTier only, under its lock.
"""

from __future__ import annotations

from collections import deque

from allocator.errors import IntegrityError
from kvstore.copy_index import CopyEntry, CopyIndex
from kvstore.copy_key import CopyKey
from kvstore.disk_tier.catalog import PageAccount, Removal
from kvstore.disk_tier.layout import (
    BALLAST_BYTES,
    INLINE_MOST_BYTES,
    PAGE_BYTES,
    VALUE_BYTES,
    class_bytes,
    value_charge_bytes,
    value_pieces,
)
from kvstore.disk_tier.slots import Plan, SlotFiles

FIXED_BYTES = (64 << 10) + BALLAST_BYTES
"""Kept apart for the ballast, the lock files and the directory itself."""
LEAST_BYTES = 1 << 20
"""The smallest budget: below, the index alone would take most of it."""
_PAGES_A_COPY = 2
_PAGES_A_KEY = 10  # of the trees, that a transaction may copy for one key
_SPARE_PAGES = 8
_FEW_REMOVALS, _MANY_REMOVALS = 2, 64
_PAGE_NUMBERS_A_PAGE = 500  # free pages are listed in pages too
_LEAST_FREE_PAGES = 64
_COMMITS_UNTIL_FREE, _COMMITS_AT_ONCE = (
    2,
    3,
)  # LMDB gives pages out again from the second transaction after the one that freed them


class DiskEntry(CopyEntry):
    """One copy and where its frame lies: a slot of slot_bytes, or (slot None) pages of the index."""

    __slots__ = ("digest", "frame_bytes", "generation", "slot")

    def __init__(
        self,
        key: CopyKey,
        parent: bytes | None,
        size_bytes: int,
        slot_bytes: int,
        slot: int | None,
        frame_bytes: int,
        digest: bytes,
    ) -> None:
        super().__init__(key, parent, size_bytes, slot_bytes)
        self.digest = digest
        self.frame_bytes = frame_bytes
        self.slot = slot
        self.generation = 0

    @property
    def removal(self) -> Removal:
        pieces = 0 if self.slot is not None else value_pieces(self.frame_bytes)
        return Removal(self.digest, self.generation, pieces)


class Batch:
    """Copies that are published together: what they need of the index, and the changes of files before."""

    __slots__ = ("compacts", "copy_count", "freed_pages", "index_pages", "plan", "spare_bytes")

    def __init__(self) -> None:
        self.plan = Plan()
        self.spare_bytes = 0  # room that is left at least, so that not every copy asks anew
        self.index_pages = self.copy_count = 0
        self.freed_pages = 0  # by evicted values: usable once they are out of the index file for two transactions
        self.compacts = False  # the index file is rewritten without its free pages, before slot files grow


class DiskIndex(CopyIndex[DiskEntry]):
    """See the module. pending: copies that are gone here and still in the index file; no slot is written before."""

    def __init__(self, capacity_bytes: int, slots: SlotFiles, account: PageAccount) -> None:
        super().__init__()
        self.capacity_bytes = self.limit_bytes = capacity_bytes
        self.slots = slots
        self.account = account
        self.pending: list[Removal] = []
        self.dirty: dict[int, DiskEntry] = {}  # generation -> used since its recency was written down
        self.last_generation = 0
        self.other_readers = False
        self._freed_pages: deque[int] = deque(maxlen=_COMMITS_UNTIL_FREE)

    # recency and life ------------------------------------------------------------------------------------------------

    def touch(self, entry: DiskEntry) -> None:
        super().touch(entry)
        self.dirty[entry.generation] = entry

    def unlink(self, entry: DiskEntry) -> None:
        super().unlink(entry)
        self.pending.append(entry.removal)
        self.dirty.pop(entry.generation, None)

    def restore(self, entry: DiskEntry, generation: int) -> None:
        """At open, oldest first: a copy that the index file names."""
        entry.generation = generation
        self.last_generation = max(self.last_generation, generation)
        self.occupy(entry)
        self.publish(entry)
        self.dirty.pop(generation, None)

    def take_dirty(self, limit: int) -> list[tuple[int, int]]:
        """(generation, tick) of copies whose recency has changed; they are clean from now on."""
        taken = list(self.dirty.items())[:limit]
        for generation, _ in taken:
            del self.dirty[generation]
        return [(generation, entry.tick) for generation, entry in taken]

    def _free(self, entry: DiskEntry) -> None:
        self.used_bytes -= entry.slot_bytes
        if entry.slot is not None:
            self.slots.give_back(entry.slot_bytes, entry.slot)

    # room ------------------------------------------------------------------------------------------------------------

    def fits(self, size_bytes: int, frame_bytes: int) -> bool:
        """Could it ever be stored?"""
        slot_bytes = self.slot_bytes(size_bytes, frame_bytes)
        return slot_bytes + 2 * PAGE_BYTES + FIXED_BYTES + 64 * PAGE_BYTES <= self.capacity_bytes

    @staticmethod
    def slot_bytes(size_bytes: int, frame_bytes: int) -> int:
        if size_bytes <= INLINE_MOST_BYTES:
            return value_charge_bytes(frame_bytes)
        return class_bytes(frame_bytes)

    def reserve(
        self, batch: Batch, key: CopyKey, size_bytes: int, parent: bytes | None, frame_bytes: int, digest: bytes
    ) -> DiskEntry | None:
        """Room for a copy about to be written, evicting as needed; None: all that could go is fenced. digest: its
        key's, see layout.key_digest.
        """
        slot_bytes = self.slot_bytes(size_bytes, frame_bytes)
        inline = size_bytes <= INLINE_MOST_BYTES
        pages = _PAGES_A_COPY + (value_pieces(frame_bytes) if inline else 0)
        batch.index_pages += pages
        batch.copy_count += 1
        slot = None
        spare = batch.spare_bytes - 2 * (pages + _COMMITS_AT_ONCE * _PAGES_A_KEY) * PAGE_BYTES
        if not inline:
            slot = self.slots.take(slot_bytes)
        while spare < 0 or not (inline or slot is not None):
            if not inline and slot is None:
                slot = self.slots.take(slot_bytes)
            growth = 0 if inline or slot is not None else self.slots.growth_bytes(slot_bytes)
            spare = self.room_bytes(batch) - growth
            if spare >= 0 or not (growth or self._index_growth_pages(batch)):
                break
            stuck = self.other_readers and spare + growth < 0  # an old state is read: no page comes free by evicting
            if stuck or not self._give_way(batch, slot_bytes):
                batch.index_pages -= pages
                batch.copy_count -= 1
                if slot is not None:
                    self.slots.give_back(slot_bytes, slot)
                return None
        if not inline and slot is None:
            slot = self.slots.grow(batch.plan, slot_bytes, spare)
            spare = 0
        batch.spare_bytes = spare
        entry = DiskEntry(key, parent, size_bytes, slot_bytes, slot, frame_bytes, digest)
        self.last_generation += 1
        entry.generation = self.last_generation
        self.occupy(entry)
        return entry

    def room_bytes(self, batch: Batch) -> int:
        """What the budget leaves once the batch has been written, growth of slot files not counted.

        Enough is always kept apart for transactions that take few copies out, see removals_a_commit.
        """
        account = self.account
        pages = self._index_growth_pages(batch)
        pages += account.live_pages + _SPARE_PAGES if batch.compacts else account.file_pages
        pages += _COMMITS_AT_ONCE * self._copied_pages(_FEW_REMOVALS)
        return self.limit_bytes - FIXED_BYTES - pages * PAGE_BYTES - self.slots.cost_bytes

    def note_full(self) -> None:
        """The file system had less room than the budget: what there is is the budget for now."""
        kept = _COMMITS_AT_ONCE * self._copied_pages(_FEW_REMOVALS) + self.account.file_pages
        here = FIXED_BYTES + kept * PAGE_BYTES + self.slots.cost_bytes
        self.limit_bytes = min(self.capacity_bytes, max(LEAST_BYTES, here))

    def raise_limit(self) -> None:
        """See whether there is room again, in steps."""
        self.limit_bytes = min(self.capacity_bytes, self.limit_bytes + max(LEAST_BYTES, self.capacity_bytes // 8))

    def _index_growth_pages(self, batch: Batch) -> int:
        """Pages that the batch may add to the index file, or to what is alive where the file is rewritten."""
        needed = batch.index_pages + _COMMITS_AT_ONCE * self._copied_pages(max(1, batch.copy_count))
        if batch.compacts or self.other_readers:
            return needed if batch.compacts else 2 * needed
        return max(0, needed - max(0, self.free_pages + batch.freed_pages))

    @property
    def free_pages(self) -> int:
        """Pages of the index file that a transaction can use now, at least; may be negative."""
        account = self.account
        listing = _SPARE_PAGES + account.file_pages // _PAGE_NUMBERS_A_PAGE
        return account.file_pages - account.live_pages - self.waiting_pages - listing

    @property
    def removals_a_commit(self) -> int:
        """What is taken out in one transaction cannot be used by the next: few at a time where free pages are few."""
        needed = _COMMITS_AT_ONCE * self._copied_pages(_MANY_REMOVALS)
        return _MANY_REMOVALS if self.free_pages >= needed and not self.other_readers else _FEW_REMOVALS

    def _copied_pages(self, keys: int) -> int:
        """Tree pages that one transaction may have to copy, since LMDB never writes in place."""
        return min(self.account.tree_pages + 4, _PAGES_A_KEY * keys + 8)

    @property
    def waiting_pages(self) -> int:
        """Pages that are free and cannot be used before further transactions."""
        return sum(self._freed_pages)

    def note_compacted(self) -> None:
        self._freed_pages.clear()

    def note_commit(self, removals: int, value_pages: int) -> None:
        """After a transaction: pages that it freed and that nobody can use yet, at most."""
        self._freed_pages.append(min(self.account.tree_pages + 4, 10 * removals + 16) + value_pages)

    def evict_oldest(self, count: int) -> int:
        """Let the oldest copies go; how many went."""
        for gone in range(count):
            victim = self._victim()
            if victim is None:
                return gone
            self._evict(victim)
        return count

    def shrink(self, batch: Batch) -> None:
        """Evict until what is there is within the budget: it was smaller this time than at the last open."""
        while self.room_bytes(batch) < 0 and self._give_way(batch, 0):
            pass

    def _give_way(self, batch: Batch, slot_bytes: int) -> bool:
        """Make some room: a slot that nobody uses, else the oldest copy of any size."""
        if self.slots.reclaim(batch.plan, slot_bytes):
            return True
        if not batch.compacts and self._compacting_pays(batch):
            batch.compacts = True
            return True
        victim = self._victim()
        if victim is None:
            return False
        if victim.slot is None and not self.other_readers:
            batch.freed_pages += victim.frame_bytes // VALUE_BYTES
        self._evict(victim)
        return True

    def _compacting_pays(self, batch: Batch) -> bool:
        """The index file is half empty, and there is room for a second one of what is alive."""
        account, plan = self.account, batch.plan
        free = account.file_pages - account.live_pages
        growth = sum(size * count for size, _, count in plan.growths)
        pages = account.file_pages + account.live_pages + _SPARE_PAGES
        room = self.capacity_bytes - FIXED_BYTES - pages * PAGE_BYTES - (self.slots.cost_bytes - growth)
        return not self.other_readers and free >= max(_LEAST_FREE_PAGES, account.file_pages // 2) and room >= 0

    def _victim(self) -> DiskEntry | None:
        oldest = [found for size in list(self._candidates) if (found := self._oldest(size)) is not None]
        if self.other_readers:
            oldest = [entry for entry in oldest if entry.slot is not None]
        return min(oldest, key=lambda entry: entry.tick, default=None)

    # check -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """IntegrityError names the first broken rule. For a tier at rest."""
        linked = self.linked()
        places = [(entry.slot_bytes, entry.slot) for entry in linked if entry.slot is not None]
        used: dict[int, int] = {}
        for size, _ in places:
            used[size] = used.get(size, 0) + 1
        rules = (
            ("no slot holds two copies", len(set(places)) == len(places)),
            ("used bytes are those of copies", sum(entry.slot_bytes for entry in linked) == self.used_bytes),
            ("slots in use hold copies", {s: n for s, n in self.slots.in_use().items() if n} == used),
            ("the budget holds", self.room_bytes(Batch()) >= -PAGE_BYTES * 64),
            ("generations are distinct", len({entry.generation for entry in linked}) == len(linked)),
        )
        broken = [name for name, holds in rules if not holds] + self.broken_rules()
        if broken:
            raise IntegrityError(f"disk tier: broken rule: {broken[0]}")
