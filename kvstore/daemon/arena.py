"""What one trust domain keeps in shared memory and where: CopyIndex over segments that one holder at a time writes.

A segment is leased for writing to one holder (a client, or the daemon itself) and holds slots of one size. Copies that
a holder published stay in it for everybody to read; nobody else writes there until it has been returned and emptied.
So among the copies that may go, a holder's own least recently used one goes, unless all of another segment are older
still: that one is emptied, and recalled from the client that may write to it.

Tenants within a domain: a quota is a hard limit; without one, who is over the fair share gives way first.

Pure bookkeeping, no bytes. Under the arena's lock.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from allocator.errors import IntegrityError
from kvstore.copy_index import CopyIndex
from kvstore.copy_key import CopyKey
from kvstore.daemon.protocol import Place
from kvstore.daemon.slots import ArenaEntry, ArenaSegment, SegmentHolder, Tenant, slot_size, stored_event
from kvstore.daemon.tally import OTHERS, RecentlyEvicted
from kvstore.events import BlockRemoved

if TYPE_CHECKING:
    from kvstore.daemon.forms import Form
    from kvstore.daemon.ledger import Ledger
    from kvstore.events import EventStream

_MOST_RECALLS = 2  # under way at a time
_MOST_TENANTS = 2048
_MOST_CLEARED = 4096


class ArenaIndex(CopyIndex[ArenaEntry]):
    """See the module. take_segment: a fresh one from the daemon's budget, or None. events: told which blocks have a
    copy here, whatever its form. ledger: told what a successor must know, under `domain`."""

    def __init__(
        self,
        segment_bytes: int,
        take_segment: Callable[[], ArenaSegment | None],
        events: EventStream | None = None,
        *,
        domain: str = "",
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__()
        self._events = events
        self.domain, self._ledger = domain, ledger
        self.segment_bytes = segment_bytes
        self.segments: dict[int, ArenaSegment] = {}
        self.tenants: dict[str, Tenant] = {}
        self._tenants_with_copies = 0
        self.codec_bytes: Counter[str] = Counter()
        self.recently_evicted = RecentlyEvicted()
        self._generation = self._all_cleared = 0
        self._cleared: dict[bytes, int] = {}  # root -> when
        self._take_segment = take_segment
        self._free_segments: list[ArenaSegment] = []
        self._shelves: dict[tuple[int, int], dict[str, int]] = {}  # (holder, slot size) -> tenant -> shelf
        self._owner_of_shelf: dict[int, tuple[Tenant, tuple[int, int]]] = {}  # and where it stands
        self._next_shelf = 0
        self._on_shelf: Counter[int] = Counter()  # copies, found or not
        self._open: dict[tuple[int, int], dict[int, ArenaSegment]] = {}  # (holder, slot size) -> with free slots

    @property
    def held_bytes(self) -> int:
        """Bytes of the segments that this arena has, used or not."""
        return len(self.segments) * self.segment_bytes

    @property
    def is_recalling(self) -> bool:
        """A client has been asked for a segment."""
        return any(one.is_recalled for one in self.segments.values())

    def publish(self, entry: ArenaEntry) -> None:
        super().publish(entry)
        if self._ledger is not None:
            self._ledger.keep(entry)
        block = entry.block
        if self._events is not None and self._events.has_subscribers and block is not None and len(block.copies) == 1:
            self._events.publish(stored_event(entry))

    def unlink(self, entry: ArenaEntry) -> None:
        block = entry.block
        if self._ledger is not None:
            self._ledger.drop(entry)  # before its slot can be anybody's
        super().unlink(entry)
        if self._events is not None and self._events.has_subscribers and block is not None and not block.copies:
            key = entry.key
            self._events.publish(BlockRemoved("host", key.group, (key.hash,), key.codec, key.exact))

    def tenant(self, name: str) -> Tenant:
        """Those that clients name are bounded: who has nothing is forgotten, and who comes too late shares one."""
        found = self.tenants.get(name)
        if found is None:
            if len(self.tenants) >= _MOST_TENANTS:
                self._forget_tenants()
                name = name if len(self.tenants) < _MOST_TENANTS // 2 else OTHERS
            found = self.tenants.get(name) or self.tenants.setdefault(name, Tenant(name))
        return found

    def _forget_tenants(self) -> None:
        """Those who have nothing here."""
        self.tenants = {one.name: one for one in self.tenants.values() if one.used_bytes or one.quota_bytes}

    def touch(self, entry: ArenaEntry) -> None:
        super().touch(entry)
        entry.segment.newest_tick = self._tick
        if self._ledger is not None:
            self._ledger.touch(entry)

    # reserve ---------------------------------------------------------------------------------------------------------

    def reserve(
        self, holder: SegmentHolder, form: Form, key: CopyKey, frame_bytes: int, parent: bytes | None
    ) -> ArenaEntry | Place:
        """A slot that `holder` may write, evicting as needed; Place says why there is none."""
        size, tenant = slot_size(frame_bytes), self.tenant(form.tenant)
        if size > self.segment_bytes or (tenant.quota_bytes and size > tenant.quota_bytes):
            return Place.TOO_LARGE
        while tenant.quota_bytes and tenant.used_bytes + size > tenant.quota_bytes:
            victim = self._oldest_of(tenant)
            if victim is None:
                tenant.counts["quota_refused"] += 1
                return Place.FULL
            self._evict(victim)
        while (segment := self._segment_with_room(holder, size)) is None:
            if not self._make_room(holder, tenant, size):
                return Place.FULL
        entry = ArenaEntry(key, parent, frame_bytes, segment, segment.free_offsets.pop())
        if not segment.free_offsets:
            del self._open[holder.number, size][segment.number]
        self._settle(entry, holder, form)
        return entry

    def _settle(self, entry: ArenaEntry, holder: SegmentHolder, form: Form) -> None:
        """It has its slot: count it, fenced until it is published or abandoned."""
        size, tenant = entry.slot_bytes, self.tenant(form.tenant)
        entry.generation, entry.tenant, entry.form = self._generation, tenant, form
        entry.shelf = self._shelf(holder, size, tenant)
        entry.segment.entries.add(entry)
        self._on_shelf[entry.shelf] += 1
        self.occupy(entry)
        self._tenants_with_copies += not tenant.used_bytes
        tenant.used_bytes += size
        self.codec_bytes[entry.key.codec] += size

    def note_cleared(self, roots: set[bytes] | None) -> None:
        """What is being written or fetched of these roots (None: of all) comes too late; see is_void."""
        self._generation += 1
        if roots is None or len(self._cleared) + len(roots) > _MOST_CLEARED:
            self._all_cleared = self._generation
            self._cleared.clear()
        else:
            self._cleared.update(dict.fromkeys(roots, self._generation))

    def is_void(self, entry: ArenaEntry) -> bool:
        """Whether its root was cleared since its slot was reserved."""
        return entry.generation < max(self._all_cleared, self._cleared.get(entry.key.root, 0))

    # taken over from an earlier daemon -------------------------------------------------------------------------------

    def take_over_segment(self, segment: ArenaSegment, slot_bytes: int, holder: SegmentHolder | None) -> None:
        """One with slots of this size, all of them taken for used. holder: who may still write there."""
        self.segments[segment.number] = segment
        segment.slot_bytes, segment.holder = slot_bytes, holder
        if holder is not None:
            holder.segments.add(segment)

    def take_over(self, entry: ArenaEntry, holder: SegmentHolder, form: Form) -> None:
        """A copy of such a segment, newest last. holder: on whose shelf it is."""
        self._settle(entry, holder, form)
        self.publish(entry)

    def end_take_over(self) -> None:
        """Segments in which nothing was found are free."""
        for segment in list(self.segments.values()):
            self._free_if_empty(segment)

    def _segment_with_room(self, holder: SegmentHolder, size: int) -> ArenaSegment | None:
        open_segments = self._open.get((holder.number, size))
        if open_segments:
            return next(iter(open_segments.values()))
        segment = self._free_segments.pop() if self._free_segments else self._take_segment()
        if segment is None:
            return None
        self.segments[segment.number] = segment
        self._assign(segment, holder, size)
        return segment

    def _make_room(self, holder: SegmentHolder, tenant: Tenant, size: int) -> bool:
        """Evict something, so that a slot of `holder` or a segment comes free. False: nothing may go now."""
        own = self._fair_oldest(holder, tenant, size)
        cold = self._coldest_segment(holder, size, None if own is None else own.tick)
        if cold is not None and cold.holder is not holder and cold.needs_recall:
            self.recall(cold)
            cold = None
        if cold is not None:
            self.counts["segments_emptied"] += 1
            self.empty(cold)
            return True
        if own is not None:
            self._evict(own)
        return own is not None

    def _fair_oldest(self, holder: SegmentHolder, tenant: Tenant, size: int) -> ArenaEntry | None:
        """Of the holder's slots of this size: the oldest of who is over its share or asks itself, else the oldest."""
        shelves = self._shelves.get((holder.number, size), {}).values()
        found = [entry for shelf in shelves if (entry := self._oldest(shelf)) is not None]
        share = self.held_bytes / max(1, self._tenants_with_copies)
        ours = [one for one in found if one.tenant is tenant or one.tenant.used_bytes > share]
        return min(ours or found, key=lambda entry: entry.tick, default=None)

    def _oldest_of(self, tenant: Tenant) -> ArenaEntry | None:
        found = [entry for shelf in tenant.shelves if (entry := self._oldest(shelf)) is not None]
        return min(found, key=lambda entry: entry.tick, default=None)

    def _coldest_segment(self, holder: SegmentHolder, size: int, before_tick: int | None) -> ArenaSegment | None:
        best, best_tick = None, before_tick
        for segment in self.segments.values():
            if segment.holder is holder and segment.slot_bytes == size:
                continue
            if segment.holder is not None and segment.holder.is_quarantined:
                continue
            if (best_tick is None or segment.newest_tick < best_tick) and segment.may_be_emptied:
                best, best_tick = segment, segment.newest_tick
        return best

    # segments --------------------------------------------------------------------------------------------------------

    def recall(self, segment: ArenaSegment) -> None:
        """Ask the client that may write there to return it: it hands out no more slots and learns of it soon."""
        if sum(one.is_recalled for one in self.segments.values()) < _MOST_RECALLS:
            segment.is_recalled = True
            self._close_for_writing(segment)
            self.counts["segments_recalled"] += 1

    def empty(self, segment: ArenaSegment) -> None:
        """Evict what is in it, which may all go, and free it. Only where nobody else can write to it."""
        for entry in sorted(segment.entries, key=lambda entry: -entry.tick):
            if entry.is_linked:
                self._evict(entry)
        self._unassign(segment)

    def returned(self, segment: ArenaSegment) -> None:
        """Its holder writes there no more: it returned it, or died. A recalled one gives way now."""
        if segment.is_recalled:
            for entry in sorted(segment.entries, key=lambda entry: -entry.tick):
                if entry.is_linked and not entry.is_fenced:
                    self._evict(entry)
        self._unassign(segment)

    def pick_to_shed(self) -> ArenaSegment | None:
        """The coldest segment that could be given to another domain."""
        free = self._free_segments
        if free:
            return free[-1]
        able = [
            one
            for one in self.segments.values()
            if one.may_be_emptied and (one.holder is None or not one.holder.is_quarantined)
        ]
        return min(able, key=lambda one: one.newest_tick, default=None)

    def remove(self, segment: ArenaSegment) -> None:
        """It leaves the arena. Only for one that is free."""
        self._free_segments.remove(segment)
        del self.segments[segment.number]
        if self._ledger is not None:
            self._ledger.drop_segment(segment.row)

    def is_free(self, segment: ArenaSegment) -> bool:
        return segment in self._free_segments

    def _assign(self, segment: ArenaSegment, holder: SegmentHolder, size: int) -> None:
        segment.holder, segment.slot_bytes, segment.is_recalled = holder, size, False
        segment.free_offsets = [slot * size for slot in reversed(range(self.segment_bytes // size))]
        self._open.setdefault((holder.number, size), {})[segment.number] = segment
        holder.segments.add(segment)
        self._write_down(segment)

    def _close_for_writing(self, segment: ArenaSegment) -> None:
        """No more slots of it are handed out."""
        if segment.holder is not None:
            self._open.get((segment.holder.number, segment.slot_bytes), {}).pop(segment.number, None)

    def _unassign(self, segment: ArenaSegment) -> None:
        self._close_for_writing(segment)
        if segment.holder is not None:
            segment.holder.segments.discard(segment)
        segment.holder, segment.is_recalled = None, False
        self._write_down(segment)
        self._free_if_empty(segment)

    def _write_down(self, segment: ArenaSegment) -> None:
        if self._ledger is not None:
            self._ledger.keep_segment(segment, self.domain)

    def _free_if_empty(self, segment: ArenaSegment) -> None:
        if segment.holder is None and not segment.entries and segment.number in self.segments:
            segment.slot_bytes, segment.free_offsets, segment.newest_tick = 0, [], 0
            if segment not in self._free_segments:
                self._free_segments.append(segment)

    def _evict(self, entry: ArenaEntry) -> None:
        self.recently_evicted.add(entry.key.hash)
        super()._evict(entry)

    def _free(self, entry: ArenaEntry) -> None:
        self.used_bytes -= entry.slot_bytes
        entry.tenant.used_bytes -= entry.slot_bytes
        self._tenants_with_copies -= not entry.tenant.used_bytes
        self.codec_bytes[entry.key.codec] -= entry.slot_bytes
        if not self.codec_bytes[entry.key.codec]:
            del self.codec_bytes[entry.key.codec]  # clients name them
        segment = entry.segment
        segment.entries.remove(entry)
        self._on_shelf[entry.shelf] -= 1
        if not self._on_shelf[entry.shelf]:  # clients name sizes and tenants
            self._forget_shelf(entry.shelf)
        segment.free_offsets.append(entry.offset)
        if segment.holder is None:
            self._free_if_empty(segment)
        elif not segment.is_recalled:
            self._open.setdefault((segment.holder.number, segment.slot_bytes), {})[segment.number] = segment

    # candidates, by holder, slot size and tenant ---------------------------------------------------------------------

    def _shelf(self, holder: SegmentHolder, size: int, tenant: Tenant) -> int:
        by_tenant = self._shelves.setdefault((holder.number, size), {})
        shelf = by_tenant.get(tenant.name)
        if shelf is None:
            shelf = by_tenant[tenant.name] = self._next_shelf
            self._next_shelf += 1
            self._owner_of_shelf[shelf] = tenant, (holder.number, size)
            tenant.shelves.add(shelf)
        return shelf

    def _forget_shelf(self, shelf: int) -> None:
        """An empty one."""
        self._candidates.pop(shelf, None)
        del self._on_shelf[shelf]
        tenant, place = self._owner_of_shelf.pop(shelf)
        tenant.shelves.remove(shelf)
        del self._shelves[place][tenant.name]
        if not self._shelves[place]:
            del self._shelves[place]

    def requeue(self, entry: ArenaEntry) -> None:
        if entry.is_queued or not entry.may_go:
            return
        entry.is_queued = True
        heap = self._candidates.setdefault(entry.shelf, [])
        heapq.heappush(heap, (entry.tick, id(entry), entry))
        if len(heap) > 64 and len(heap) > 2 * self._on_shelf[entry.shelf]:  # what was dropped must not pile up
            heap[:] = [item for item in heap if item[2].is_linked]
            heapq.heapify(heap)

    def forget_holder(self, holder: SegmentHolder) -> None:
        """A holder is gone; what it published stays on its shelves."""
        for name in [name for name in self._open if name[0] == holder.number]:
            del self._open[name]

    # check -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """IntegrityError names the first broken rule."""
        held = [entry for segment in self.segments.values() for entry in segment.entries]
        tenants = self.tenants.values()
        rules = (
            ("every copy found has a slot", set(self.linked()) <= set(held)),
            ("used bytes are the held slots", sum(entry.slot_bytes for entry in held) == self.used_bytes),
            ("tenants share the used bytes", sum(one.used_bytes for one in tenants) == self.used_bytes),
            ("tenants are counted", self._tenants_with_copies == sum(one.used_bytes > 0 for one in tenants)),
            ("used bytes fit the segments", self.used_bytes <= self.held_bytes),
            (
                "slots of a segment do not meet",
                all(
                    len({*one.free_offsets, *(entry.offset for entry in one.entries)})
                    == len(one.free_offsets) + len(one.entries)
                    for one in self.segments.values()
                ),
            ),
            ("free segments are empty", all(not one.entries and one.holder is None for one in self._free_segments)),
            ("shelves are counted", Counter(entry.shelf for entry in held) == self._on_shelf),
            ("shelves are kept for a reason", set(self._on_shelf) == set(self._owner_of_shelf)),
            ("tenants know their shelves", set(self._on_shelf) == set().union(*(one.shelves for one in tenants))),
            ("codecs share the used bytes", sum(self.codec_bytes.values()) == self.used_bytes),
        )
        broken = [name for name, holds in rules if not holds] + self.broken_rules()
        if broken:
            raise IntegrityError(f"arena: broken rule: {broken[0]}")
