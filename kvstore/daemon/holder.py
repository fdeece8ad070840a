"""Who holds leases: a connected client, the daemon itself, or a client that is gone and may still write.

A lease's number is its generation: numbers rise and none is given twice in a boot, so a stale one names nothing. Under
the daemon's lock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import TYPE_CHECKING

from kvstore.daemon.slots import ArenaEntry, SegmentHolder

if TYPE_CHECKING:
    from kvstore.copy_key import CopyKey
    from kvstore.daemon.arena import ArenaIndex


@dataclass(slots=True, eq=False)
class WriteLease:
    """One slot that a client may write. After its end the slot is quarantined until the holder lets go or dies."""

    number: int
    entry: ArenaEntry
    is_quarantined: bool = False


@dataclass(eq=False)
class Holder(SegmentHolder):
    """The leases, pins and segments of one writer in one arena."""

    arena: ArenaIndex
    name: str = "daemon"
    reads: dict[int, list[ArenaEntry]] = field(default_factory=dict)
    writes: dict[int, WriteLease] = field(default_factory=dict)
    pins: dict[CopyKey, list[ArenaEntry]] = field(default_factory=dict)
    read_count: int = 0
    pid_fd: int = -1
    prefill_tokens_per_second: float = 0.0  # as the client has said; 0: it has not
    unpriced_tokens: int = 0  # reused before it said so
    root: bytes = b""  # of its last lookup: whose speed it is
    missed: tuple[bytes, int, str] = (b"", 0, "")  # of its last message with misses: the prompt, its end, the cause

    @property
    def pin_count(self) -> int:
        return sum(map(len, self.pins.values()))


class LeaseBook:
    """Gives leases and ends them: when told, when their time is up, or with their holder."""

    def __init__(self, read_seconds: float, write_seconds: float) -> None:
        self.read_seconds, self.write_seconds = read_seconds, write_seconds
        self.counts: Counter[str] = Counter()
        self._numbers = count(1)
        self._reads: dict[int, tuple[float, Holder]] = {}  # those that have not ended, by their end
        self._writes: dict[int, tuple[float, Holder]] = {}

    def read(self, holder: Holder, entries: list[ArenaEntry], now: float) -> int:
        """One lease on all of them; each is fenced and touched."""
        for entry in entries:
            entry.reader_count += 1
            holder.arena.touch(entry)
        number = next(self._numbers)
        holder.reads[number] = entries
        holder.read_count += len(entries)
        self._reads[number] = now + self.read_seconds, holder
        return number

    def end_read(self, holder: Holder, number: int) -> bool:
        """False for a lease that has ended or is not this holder's."""
        entries = holder.reads.pop(number, None)
        if entries is None:
            return False
        del self._reads[number]
        holder.read_count -= len(entries)
        for entry in entries:
            holder.arena.end_read(entry)
        return True

    def write(self, holder: Holder, entry: ArenaEntry, now: float) -> int:
        number = next(self._numbers)
        holder.writes[number] = WriteLease(number, entry)
        self._writes[number] = now + self.write_seconds, holder
        return number

    def publish(self, holder: Holder, number: int) -> ArenaEntry | None:
        """The copy can be found from now on; None when the lease had ended. Either way the slot is let go."""
        lease = self._end_write(holder, number)
        if lease is None:
            return None
        arena, entry = holder.arena, lease.entry
        if lease.is_quarantined or arena.is_void(entry):
            arena.abandon(entry)
            return None
        twin = arena.twin(entry)
        if twin is not None:
            arena.abandon(entry)
            arena.touch(twin)
            return twin
        arena.publish(entry)
        return entry

    def abandon(self, holder: Holder, number: int) -> bool:
        lease = self._end_write(holder, number)
        if lease is None:
            return False
        holder.arena.abandon(lease.entry)
        return True

    def _end_write(self, holder: Holder, number: int) -> WriteLease | None:
        lease = holder.writes.pop(number, None)
        if lease is not None:
            self._writes.pop(number, None)  # not there once it is quarantined
        return lease

    def expire(self, now: float) -> None:
        """Reads end; slots being written are quarantined."""
        for number, holder in _over(self._reads, now):
            self.end_read(holder, number)
            self.counts["read_leases_expired"] += 1
        for number, holder in _over(self._writes, now):
            holder.writes[number].is_quarantined = True
            del self._writes[number]
            self.counts["write_leases_quarantined"] += 1

    def pin(self, holder: Holder, keys: list[CopyKey]) -> list[bool]:
        granted = []
        for key in keys:
            entry = holder.arena.find(key)
            if entry is not None:
                entry.pin_count += 1
                holder.pins.setdefault(key, []).append(entry)
            granted.append(entry is not None)
        return granted

    def unpin(self, holder: Holder, keys: list[CopyKey]) -> bool:
        """False when one was not pinned by this holder, and then nothing changes."""
        wanted = Counter(keys)
        if any(len(holder.pins.get(key, ())) < times for key, times in wanted.items()):
            return False
        for key in keys:
            entries = holder.pins[key]
            self._unpin(holder.arena, entries.pop())
            if not entries:
                del holder.pins[key]
        return True

    def end(self, holder: Holder, *, is_dead: bool) -> None:
        """Everything that a client held comes back; what it may still write to only once it is dead."""
        for number in list(holder.reads):
            self.end_read(holder, number)
        for entries in holder.pins.values():
            for entry in entries:
                self._unpin(holder.arena, entry)
        holder.pins.clear()
        if is_dead:
            for number in list(holder.writes):
                self.abandon(holder, number)
            for segment in list(holder.segments):
                holder.arena.returned(segment)
            holder.arena.forget_holder(holder)
        elif not holder.is_quarantined:
            holder.is_quarantined = True
            self.counts["clients_quarantined"] += 1

    @staticmethod
    def _unpin(arena: ArenaIndex, entry: ArenaEntry) -> None:
        if entry.is_linked:  # a copy that was cleared lost its pins with it
            entry.pin_count -= 1
            arena.requeue(entry)


def _over(leases: dict[int, tuple[float, Holder]], now: float) -> list[tuple[int, Holder]]:
    """Those whose time is up: the first ones, since all of a kind last equally long."""
    return [(number, holder) for number, (_, holder) in takewhile(lambda one: one[1][0] <= now, leases.items())]
