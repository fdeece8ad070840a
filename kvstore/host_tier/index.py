"""What the host tier holds and where: CopyIndex over the arena's extents.

Among the copies that may go, the least recently used of the wanted slot size goes, of the lowest priority first; when
all copies of another size in some extent are worth less still, that extent is emptied and changes size instead (looked
at now and then). A tenant with a quota makes room among its own copies once it has reached it.

Pure bookkeeping, no bytes. Used by HostTier only, under its lock.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence

from allocator.block_marks import PLAIN, PRIORITY_DEFAULT, Steps, merged, step_at
from allocator.errors import IntegrityError
from kvstore.copy_index import CopyEntry, CopyIndex
from kvstore.copy_key import CopyKey
from kvstore.host_tier.extents import Extent, HostExtents, aligned

_EXTENTS_A_LOOK = 32  # a look at all extents that found nothing colder is not repeated for this share of evictions
_EXPIRED_A_CALL = 256
_ROOTS_KNOWN = 1 << 15  # a store describes a root that it uses again after 4,096 others (`kvstore.prompts`)


class HostTenant:
    """Whose copies count against a quota. shelves: those that hold any."""

    __slots__ = ("name", "quota_bytes", "shelves", "used_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.quota_bytes = self.used_bytes = 0
        self.shelves: set[Hashable] = set()


class HostEntry(CopyEntry):
    """One copy and its slot in the arena. steps: what requests want of it; tenant: of those that have a quota."""

    __slots__ = ("extents", "offset", "steps", "tenant")

    def __init__(self, key: CopyKey, parent: bytes | None, size_bytes: int, place: tuple[int, list[Extent]]) -> None:
        super().__init__(key, parent, size_bytes, aligned(size_bytes))
        self.offset, self.extents = place
        self.steps: Steps = PLAIN
        self.tenant: HostTenant | None = None


class HostIndex(CopyIndex[HostEntry]):
    """See the module. marked_count: copies of which something other than usual is wanted."""

    def __init__(self, capacity_bytes: int, slot_bytes: Sequence[int]) -> None:
        super().__init__()
        self._room = HostExtents(capacity_bytes, slot_bytes)
        self._evictions_until_look = 0
        self._now = -math.inf
        self._ends: list[tuple[float, int, HostEntry]] = []  # heap of (end of its priority, number, copy)
        self._end_number = 0
        self._tenants: dict[str, HostTenant] = {}
        self._tenant_of: dict[bytes, HostTenant] = {}  # by root
        self._shelves: dict[int, set[Hashable]] = {}  # by slot size, of tenants
        self.marked_count = 0

    def touch(self, entry: HostEntry) -> None:
        super().touch(entry)
        for extent in entry.extents:
            extent.newest_rank = max(extent.newest_rank, entry.rank)

    def fits(self, size_bytes: int) -> bool:
        return self._room.fits(aligned(size_bytes))

    def reserve(self, key: CopyKey, size_bytes: int, parent: bytes | None, steps: Steps = PLAIN) -> HostEntry | None:
        """A slot for a copy about to be written, evicting as needed; None: all that could go is fenced."""
        slot_bytes, tenant = aligned(size_bytes), self._tenant_of.get(key.root)
        if tenant is not None and not self._within_quota(tenant, slot_bytes):
            self.counts["quota_refused"] += 1
            return None
        while (place := self._room.take(slot_bytes)) is None:
            if not self._make_room(slot_bytes):
                return None
        entry = HostEntry(key, parent, size_bytes, place)
        for extent in entry.extents:
            extent.entries.add(entry)
        if tenant is not None:
            entry.tenant, entry.shelf = tenant, (tenant.name, slot_bytes)
            tenant.used_bytes += slot_bytes
            tenant.shelves.add(entry.shelf)
            self._shelves.setdefault(slot_bytes, set()).add(entry.shelf)
        self._want(entry, steps)
        self.occupy(entry)
        return entry

    def _within_quota(self, tenant: HostTenant, slot_bytes: int) -> bool:
        """Makes room among the tenant's own copies. False: what it may have is less, or all is fenced."""
        while tenant.quota_bytes and tenant.used_bytes + slot_bytes > tenant.quota_bytes:
            victim = self._lowest(tenant.shelves)
            if victim is None:
                return False
            self._evict(victim)
        return True

    def _lowest(self, shelves: Iterable[Hashable]) -> HostEntry | None:
        found = [entry for shelf in shelves if (entry := self._oldest(shelf)) is not None]
        return min(found, key=lambda entry: entry.rank, default=None)

    def _make_room(self, slot_bytes: int) -> bool:
        victim = self._lowest((slot_bytes, *self._shelves.get(slot_bytes, ())))
        self._evictions_until_look -= 1
        colder = None
        if victim is None or self._evictions_until_look <= 0:
            colder = self._room.coldest_run(slot_bytes, None if victim is None else victim.rank)
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
        self.marked_count -= entry.steps != PLAIN
        if entry.tenant is not None:
            entry.tenant.used_bytes -= entry.slot_bytes
        self._room.give_back(entry)

    # what requests want of copies, and whose they are -----------------------------------------------------------------

    def keep(self, entry: HostEntry, steps: Steps) -> None:
        """A use that wants a copy kept so; the most demanding one counts."""
        self._want(entry, merged(entry.steps, steps))

    def _want(self, entry: HostEntry, steps: Steps) -> None:
        if steps != entry.steps:
            self.marked_count += (steps != PLAIN) - (entry.steps != PLAIN)
            entry.steps = steps
            self._set_priority(entry)

    def _set_priority(self, entry: HostEntry) -> None:
        before = entry.priority
        entry.priority, end = step_at(entry.steps, self._now)
        if end != math.inf:
            self._end_number += 1
            heapq.heappush(self._ends, (end, self._end_number, entry))
            if len(self._ends) > 64 + 4 * self.copy_count:  # ends that were put off must not pile up
                self._ends = [item for item in self._ends if item[2].is_linked and self._is_end_of(*item)]
                heapq.heapify(self._ends)
        if entry.priority < before and entry.is_linked:
            if entry.is_queued:
                self._enqueue(entry)
            self._room.look_again(entry)
        elif entry.priority != before:
            for extent in entry.extents:
                extent.newest_rank = max(extent.newest_rank, entry.rank)

    @staticmethod
    def _is_end_of(end: float, number: int, entry: HostEntry) -> bool:
        return any(one[1] == end for one in entry.steps)

    def expire(self, now: float) -> None:
        """The time is `now`: some of the copies whose priority has ended get the next one."""
        self._now = now
        for _ in range(_EXPIRED_A_CALL):
            if not self._ends or self._ends[0][0] > now:
                return
            _, _, entry = heapq.heappop(self._ends)
            if entry.is_linked and entry.priority != PRIORITY_DEFAULT:
                self._set_priority(entry)

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        """Of copies that come from now on; 0: no limit."""
        self._tenants.setdefault(tenant, HostTenant(tenant)).quota_bytes = quota_bytes

    def name_root(self, root: bytes, tenant: str) -> None:
        """Whose a root is; of interest where the tenant has had a quota."""
        known = self._tenant_of
        known.pop(root, None)
        if tenant in self._tenants:
            known[root] = self._tenants[tenant]
            if len(known) > _ROOTS_KNOWN:
                del known[next(iter(known))]

    def tenant_bytes(self, tenant: str) -> int:
        """What copies of a tenant take that were put since it had a quota."""
        return self._tenants[tenant].used_bytes if tenant in self._tenants else 0

    def check(self) -> None:
        """IntegrityError names the first broken rule."""
        held = {entry for extent in self._room.extents for entry in extent.entries}
        used = {name: sum(one.slot_bytes for one in held if one.tenant is own) for name, own in self._tenants.items()}
        rules = (
            ("every copy found has a slot", set(self.linked()) <= held),
            ("used bytes are the held slots", sum(entry.slot_bytes for entry in held) == self.used_bytes),
            ("marked copies are counted", sum(entry.steps != PLAIN for entry in held) == self.marked_count),
            ("tenants' bytes are counted", used == {name: own.used_bytes for name, own in self._tenants.items()}),
        )
        broken = [name for name, holds in rules if not holds] + self.broken_rules() + self._room.broken_rules()
        if broken:
            raise IntegrityError(f"host tier: broken rule: {broken[0]}")
