"""What the host tier holds and where: CopyIndex over the arena's extents.

Among the copies that may go, the least recently used of the wanted slot size goes; when all copies of another size
in some extent are older still, that extent is emptied and changes size instead (looked at now and then).

Pure bookkeeping, no bytes. Used by HostTier only, under its lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from allocator.errors import IntegrityError
from kvstore.copy_index import CopyEntry, CopyIndex
from kvstore.copy_key import CopyKey
from kvstore.host_tier.extents import Extent, HostExtents, aligned

_EXTENTS_A_LOOK = 32  # a look at all extents that found nothing colder is not repeated for this share of evictions


class HostEntry(CopyEntry):
    """One copy and its slot in the arena."""

    __slots__ = ("extents", "offset")

    def __init__(self, key: CopyKey, parent: bytes | None, size_bytes: int, place: tuple[int, list[Extent]]) -> None:
        super().__init__(key, parent, size_bytes, aligned(size_bytes))
        self.offset, self.extents = place


class HostIndex(CopyIndex[HostEntry]):
    """See the module."""

    def __init__(self, capacity_bytes: int, slot_bytes: Sequence[int]) -> None:
        super().__init__()
        self._room = HostExtents(capacity_bytes, slot_bytes)
        self._evictions_until_look = 0

    def touch(self, entry: HostEntry) -> None:
        super().touch(entry)
        for extent in entry.extents:
            extent.newest_tick = self._tick

    def fits(self, size_bytes: int) -> bool:
        return self._room.fits(aligned(size_bytes))

    def reserve(self, key: CopyKey, size_bytes: int, parent: bytes | None) -> HostEntry | None:
        """A slot for a copy about to be written, evicting as needed; None: all that could go is fenced."""
        slot_bytes = aligned(size_bytes)
        while (place := self._room.take(slot_bytes)) is None:
            if not self._make_room(slot_bytes):
                return None
        entry = HostEntry(key, parent, size_bytes, place)
        for extent in entry.extents:
            extent.entries.add(entry)
        self.occupy(entry)
        return entry

    def _make_room(self, slot_bytes: int) -> bool:
        victim = self._oldest(slot_bytes)
        self._evictions_until_look -= 1
        colder = None
        if victim is None or self._evictions_until_look <= 0:
            colder = self._room.coldest_run(slot_bytes, None if victim is None else victim.tick)
            self._evictions_until_look = len(self._room.extents) // _EXTENTS_A_LOOK if colder is None else 0
        if colder is not None:
            self.counts["extents_emptied"] += len(colder)
            for extent in colder:
                for entry in sorted(extent.entries, key=lambda entry: -entry.tick):
                    self._evict(entry)
        elif victim is not None:
            self._evict(victim)
        return colder is not None or victim is not None

    def _free(self, entry: HostEntry) -> None:
        self.used_bytes -= entry.slot_bytes
        self._room.give_back(entry)

    def check(self) -> None:
        """IntegrityError names the first broken rule."""
        held = {entry for extent in self._room.extents for entry in extent.entries}
        rules = (
            ("every copy found has a slot", set(self.linked()) <= held),
            ("used bytes are the held slots", sum(entry.slot_bytes for entry in held) == self.used_bytes),
        )
        broken = [name for name, holds in rules if not holds] + self.broken_rules() + self._room.broken_rules()
        if broken:
            raise IntegrityError(f"host tier: broken rule: {broken[0]}")
