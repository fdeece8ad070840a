"""What the daemon does, without its sockets: arenas by trust domain, leases, lower tiers, quotas, counts.

A Session calls the methods of Core on its own thread. `lock` guards every index, lease and queue, and is never held
while bytes move or a lower tier is asked; lookups in the arena take no lock (a dict's own operations are atomic).
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from typing import TYPE_CHECKING

from allocator.errors import TierError
from kvstore.copy_index import leading_run
from kvstore.daemon.arena import ArenaIndex
from kvstore.daemon.epochs import DomainEpochs
from kvstore.daemon.forms import Form, KnownForms
from kvstore.daemon.holder import Holder, LeaseBook
from kvstore.daemon.lower import LowerTier
from kvstore.daemon.protocol import PLACE, Cause, Place
from kvstore.daemon.segment_pool import MAKING_SECONDS, SegmentPool
from kvstore.daemon.segments import SegmentMemory
from kvstore.daemon.settings import DaemonSettings
from kvstore.daemon.slots import ArenaSegment, stored_event
from kvstore.daemon.spilling import Spilling
from kvstore.daemon.tally import Tally
from kvstore.daemon.tell_tale import TellTales
from kvstore.events import Event, EventStream
from kvstore.tier import Tier

if TYPE_CHECKING:
    from kvstore.daemon.handover import Handover
    from kvstore.daemon.recording import DaemonRecording


_MISS = PLACE.pack(Place.MISS, 0, 0, 0)


class RefusedError(Exception):
    """A request that does nothing. Becomes a Refused answer, or the connection's end."""

    def __init__(self, cause: Cause, message: str = "", *, is_fatal: bool = False) -> None:
        super().__init__(message)
        self.cause, self.message, self.is_fatal = cause, message, is_fatal


class Core:
    """See the module. lowers: tiers below, fast to slow; this object drives and closes them. handover: shared memory
    outlives this object there, and begins with what was found. TierError where there is no shared memory at all."""

    def __init__(
        self,
        settings: DaemonSettings,
        lowers: Sequence[Tier] = (),
        known_forms: KnownForms | None = None,
        clock: Callable[[], float] = time.monotonic,
        handover: Handover | None = None,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.known_forms = KnownForms() if known_forms is None else known_forms
        self.boot = os.urandom(16)
        self.lock = threading.Lock()
        self.tell_tales = TellTales()
        self.handover = handover
        make, forget = (SegmentMemory, None) if handover is None else (handover.make, handover.forget)
        self.pool = SegmentPool(settings.store.host_bytes, settings.segment_bytes, make, forget)
        self.book = LeaseBook(settings.lease_seconds, settings.write_lease_seconds)
        self.arenas: dict[str, ArenaIndex] = {}
        self.counts: Counter[str] = Counter()
        self.tally = Tally()
        self.recording: DaemonRecording | None = None  # of `kvstore record`
        self.holders: dict[int, Holder] = {}
        self.quotas = dict(settings.tenant_quotas)
        self.numbers = count(1)  # of holders
        self._daemons: dict[str, Holder] = {}
        self.events = EventStream()  # of the own domain's arena
        self.epochs = DomainEpochs(lowers, self.events.begin_epoch, handover)
        queue_bytes = min(settings.spill_queue_bytes, settings.store.host_bytes // 4)
        self.lowers = [
            LowerTier(tier, self.lock, queue_bytes, settings.checks, 1 << place) for place, tier in enumerate(lowers)
        ]
        self.spilling = Spilling(self.lowers, settings.store)
        self._prepare = threading.Event()
        self._made = threading.Condition(self.lock)
        if handover is not None:
            handover.take_over(self)
        self.pool.make_first()
        self._preparer = self.pool.prepare(self._made, self._prepare, all_of_it=settings.store.host_prefault)
        if not self.pool.limit:
            self.close(0)
            raise TierError(f"shared memory: the system has none for a segment of {settings.segment_bytes} bytes")

    # who is there ----------------------------------------------------------------------------------------------------

    def arena(self, domain: str) -> ArenaIndex:
        """The arena of a trust domain. Under the lock."""
        found = self.arenas.get(domain)
        if found is None:
            events = None if domain else self.events
            ledger, size = None if self.handover is None else self.handover.ledger, self.pool.segment_bytes
            found = self.arenas[domain] = ArenaIndex(size, self.pool.take, events, domain=domain, ledger=ledger)
            self._daemons[domain] = Holder(next(self.numbers), found)
            for name, quota in self.quotas.items():
                found.tenant(name).quota_bytes = quota
        return found

    def stranger(self, domain: str, name: str) -> Holder:
        """A holder that is no client: an operator's pins. Under the lock."""
        return Holder(next(self.numbers), self.arena(domain), name)

    def join(self, name: str, uid: int, pid: int, pid_fd: int) -> Holder:
        with self.lock:
            arena = self.arena(self.settings.domain_of(uid))
            holder = Holder(next(self.numbers), arena, name, is_remote=True, uid=uid, pid=pid, pid_fd=pid_fd)
            holder.token = os.urandom(16)
            self.holders[holder.number] = holder
            return holder

    def leave(self, holder: Holder, *, is_dead: bool) -> None:
        """A connection's end. What its process may still write to comes back when that has died (see reap)."""
        with self.lock:
            self.book.end(holder, is_dead=is_dead)
            if is_dead:
                self._forget(holder)

    def disown(self, holder: Holder, token: bytes) -> bool:
        """What an earlier connection of the same process held comes back; False while that is not at its end yet."""
        known = [one for one in list(self.holders.values()) if hmac.compare_digest(one.token, token)]
        for one in known:
            if one is holder or (one.uid, one.pid) != (holder.uid, holder.pid) or not one.is_quarantined:
                return False
            self.leave(one, is_dead=True)
        return True

    def reap(self, is_dead: Callable[[Holder], bool]) -> None:
        """End the holders that were waited for."""
        for holder in [one for one in list(self.holders.values()) if one.is_quarantined and is_dead(one)]:
            self.leave(holder, is_dead=True)

    def _forget(self, holder: Holder) -> None:
        self.holders.pop(holder.number, None)
        if holder.pid_fd >= 0:
            os.close(holder.pid_fd)
            holder.pid_fd = -1

    def everything(self) -> list[Event]:
        """What the own domain's arena holds, as events."""
        with self.lock:
            arena = self.arenas.get("")
            return [] if arena is None else [stored_event(one) for one in arena.linked()]

    # look up ---------------------------------------------------------------------------------------------------------

    def run(self, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> tuple[int, int]:
        """Leading hashes that are stored somewhere, and how many of the rest may show up yet."""
        found = leading_run(holder.arena.families.get(form.family), hashes)
        if found < len(hashes) and self.lowers:
            return self._run_below(holder, form, hashes, found)
        return found, 0

    def _run_below(self, holder: Holder, form: Form, hashes: tuple[bytes, ...], found: int) -> tuple[int, int]:
        before = -1
        while before < found < len(hashes):
            before = found
            for lower in self.lowers:
                found += lower.leading_run(form, hashes[found:])
            found += leading_run(holder.arena.families.get(form.family), hashes[found:])
        if found == len(hashes):
            return found, 0
        keys = form.lower_template.with_hashes(hashes[found:])
        return found, max([one.tier.pending_count(keys) for one in self.lowers if not one.is_dropped], default=0)

    def contains(self, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> bytes:
        family = holder.arena.families.get(form.family)
        flags = bytearray(map(family.__contains__, hashes)) if family else bytearray(len(hashes))
        for lower in self.lowers:
            open_places = [place for place, flag in enumerate(flags) if flag != 1]
            if not open_places:
                break
            found = lower.presence(form, [hashes[place] for place in open_places])
            for place, flag in zip(open_places, found, strict=True):
                flags[place] = flag or flags[place]
        return bytes(flags)

    def acquire(
        self, holder: Holder, form: Form, hashes: tuple[bytes, ...], payload_bytes: Sequence[int]
    ) -> tuple[int, bytes]:
        """One read lease on those that lie in the arena; the others are misses, or on their way up."""
        if len(payload_bytes) != len(hashes):
            raise RefusedError(Cause.GARBAGE, "payload_bytes: expected one a hash", is_fatal=True)
        if holder.read_count + len(hashes) > self.settings.leases_per_client:
            raise RefusedError(Cause.LEASES, f"expected at most {self.settings.leases_per_client} read leases")
        family = holder.arena.families.get(form.family) or {}
        absent = [place for place, hash in enumerate(hashes) if hash not in family] if self.lowers else []
        below = self.found_below(form, [hashes[place] for place in absent])
        with self.lock:
            family = holder.arena.families.get(form.family) or {}
            entries = [family.get(hash) for hash in hashes]
            held = [entry for entry in entries if entry is not None]
            lease = self.book.read(holder, held, self.clock()) if held else 0
            self.spilling.note_use(holder.arena, held)
            waiting = {}
            for place, lower in zip(absent, below, strict=True):
                if entries[place] is None and lower is not None:
                    daemon = self._daemons[self.settings.domain_of(holder.uid)]
                    waiting[place] = lower.fetch(daemon, form, hashes[place], payload_bytes[place])
            places = [
                _MISS
                if entry is None
                else PLACE.pack(Place.GRANTED, entry.segment.number, entry.offset, entry.size_bytes)
                for entry in entries
            ]
            for place, state in waiting.items():
                places[place] = PLACE.pack(state, 0, 0, 0)
        self.tally.read(form, len(held), sum([entry.size_bytes for entry in held]))
        return lease, b"".join(places)

    def found_below(self, form: Form, hashes: list[bytes]) -> list[LowerTier | None]:
        """The first lower tier that has each."""
        found: list[LowerTier | None] = [None] * len(hashes)
        for lower in self.lowers:
            open_places = [place for place, one in enumerate(found) if one is None]
            if not open_places:
                break
            presence = lower.presence(form, [hashes[place] for place in open_places])
            for place, flag in zip(open_places, presence, strict=True):
                found[place] = lower if flag == 1 else None
        return found

    def release(self, holder: Holder, leases: Sequence[int]) -> int:
        """How many of them named nothing."""
        with self.lock:
            return sum(not self.book.end_read(holder, number) for number in leases)

    # store -----------------------------------------------------------------------------------------------------------

    def reserve(
        self, holder: Holder, form: Form, hashes: tuple[bytes, ...], parents: tuple[bytes, ...], sizes: Sequence[int]
    ) -> bytes:
        if not len(hashes) == len(parents) == len(sizes):
            raise RefusedError(Cause.GARBAGE, "reserve: expected as many parents and sizes as hashes", is_fatal=True)
        if len(holder.writes) + len(hashes) > self.settings.leases_per_client:
            raise RefusedError(Cause.LEASES, f"expected at most {self.settings.leases_per_client} write leases")
        arena, now = holder.arena, self.clock()
        places, refused = [], 0
        with self._made:
            self._made.wait_for(lambda: not self.pool.is_making_last, MAKING_SECONDS)
            evicted = arena.counts["evicted"]
            for hash, parent, frame_bytes in zip(hashes, parents, sizes, strict=True):
                key = form.key(hash)
                known = arena.find(key)
                if known is not None:
                    arena.touch(known)
                    self.spilling.note_use(arena, [known])  # computed a second time
                    places.append(PLACE.pack(Place.THERE, 0, 0, 0))
                    continue
                if frame_bytes <= form.header_bytes or parent == hash:
                    raise RefusedError(Cause.GARBAGE, "reserve: expected a frame with a payload", is_fatal=True)
                entry = arena.reserve(holder, form, key, frame_bytes, parent)
                if isinstance(entry, Place):
                    refused += entry is Place.FULL
                    places.append(PLACE.pack(entry, 0, 0, 0))
                else:
                    lease = self.book.write(holder, entry, now)
                    places.append(PLACE.pack(Place.GRANTED, entry.segment.number, entry.offset, lease))
        if len(self.arenas) > 1 and (refused or arena.counts["evicted"] > evicted):
            self._shed_for(arena)
        if self.pool.is_short:
            self._prepare.set()
        return b"".join(places)

    def publish(self, holder: Holder, leases: Sequence[int]) -> bytes:
        flags, published = bytearray(), []
        with self.lock:
            for number in leases:
                is_ours = number in holder.writes
                entry = self.book.publish(holder, number)
                flags.append(entry is not None)
                if entry is not None:
                    published.append(entry)
                elif not is_ours:
                    self.counts["refused_stale"] += 1
            self.tally.stored(holder.arena.domain, sum([entry.size_bytes for entry in published]))
            self.spilling.note_use(holder.arena, published)
        return bytes(flags)

    def abandon(self, holder: Holder, leases: Sequence[int]) -> int:
        with self.lock:
            return sum(not self.book.abandon(holder, number) for number in leases)

    def touch(self, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> None:
        family = holder.arena.families.get(form.family) or {}
        with self.lock:
            used = [entry for entry in map(family.get, hashes) if entry is not None and entry.is_linked]
            for entry in used:
                holder.arena.touch(entry)
            self.spilling.note_use(holder.arena, used)

    # pins ------------------------------------------------------------------------------------------------------------

    def pin(self, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> bytes:
        with self.lock:
            if holder.pin_count + len(hashes) > self.settings.leases_per_client:
                raise RefusedError(Cause.LEASES, f"expected at most {self.settings.leases_per_client} pins")
            return bytes(self.book.pin(holder, form.template.with_hashes(hashes)))

    def unpin(self, holder: Holder, form: Form, hashes: tuple[bytes, ...]) -> None:
        with self.lock:
            if not self.book.unpin(holder, form.template.with_hashes(hashes)):
                raise RefusedError(Cause.PINS, "a copy was not pinned as often by this connection")

    # segments --------------------------------------------------------------------------------------------------------

    def descriptors(self, holder: Holder, numbers: Sequence[int], *, writable: bool) -> tuple[list[int], list[int]]:
        """Sizes, and duplicates of descriptors that the caller sends and closes."""
        with self.lock:
            found: list[ArenaSegment] = []
            for number in numbers:
                segment = holder.arena.segments.get(number)
                if segment is None or (writable and (segment.holder is not holder or segment.is_recalled)):
                    raise RefusedError(Cause.SEGMENT, f"segment {number} is not there, or not leased to this client")
                found.append(segment)
            own = [one.memory.write_fd if writable else one.memory.read_fd for one in found]
            copies: list[int] = []
            try:
                copies.extend(map(os.dup, own))
            except OSError as error:
                for descriptor in copies:
                    os.close(descriptor)
                raise RefusedError(Cause.SEGMENT, f"no descriptor is free ({error.strerror})") from None
            return [self.settings.segment_bytes] * len(found), copies

    def give_back(self, holder: Holder, numbers: Sequence[int]) -> None:
        with self.lock:
            written = {lease.entry.segment for lease in holder.writes.values()}
            for number in numbers:
                segment = holder.arena.segments.get(number)
                if segment is None or segment.holder is not holder:
                    self.counts["refused_segment"] += 1
                elif segment not in written:
                    holder.arena.returned(segment)

    def news(self, holder: Holder) -> tuple[int, int, list[int], list[int]]:
        with self.lock:
            arena = holder.arena
            recalled = [one.number for one in holder.segments if one.is_recalled]
            capacity = self.pool.limit * self.settings.segment_bytes
            return arena.used_bytes, capacity, recalled, list(arena.segments)

    def _shed_for(self, arena: ArenaIndex) -> None:
        """An arena below its share of the budget is full: the largest one gives up its coldest segment."""
        with self.lock:
            largest = max(self.arenas.values(), key=lambda one: len(one.segments))
            share = self.pool.limit // max(1, len(self.arenas))
            if len(arena.segments) >= share or len(largest.segments) <= max(1, share):
                return
            segment = largest.pick_to_shed()
            if segment is None:
                return
            if segment.needs_recall:
                largest.recall(segment)
                return
            if not largest.is_free(segment):
                largest.empty(segment)
            if largest.is_free(segment):
                largest.remove(segment)
                self.pool.renew(segment)
                self.counts["segments_shed"] += 1

    # time ------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Leases whose time is up. Called a few times a second."""
        with self.lock:
            self.book.expire(self.clock())

    def close(self, drain_seconds: float) -> bool:
        """Drain and close the lower tiers, give the memory back; whether all was written down."""
        until = time.monotonic() + drain_seconds
        drained = all([lower.drain(until) for lower in self.lowers])
        self.pool.stop()
        self._prepare.set()
        self._preparer.join()
        self.epochs.close()
        self.tell_tales.close()
        for lower in self.lowers:
            try:
                lower.close()
            except TierError:
                self.counts[f"close_failed_{lower.tier.name}"] += 1
        with self.lock:
            for holder in list(self.holders.values()):
                self._forget(holder)
            if self.handover is not None:
                self.handover.close()
            used = [one.memory for arena in self.arenas.values() for one in arena.segments.values()]
            for memory in [*self.pool.ready, *used]:
                memory.close() if self.handover is None else memory.let_go()  # whoever keeps it has it all
        return drained
