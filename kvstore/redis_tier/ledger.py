"""What a remote tier believes to be stored: presence for lookups that must not wait, and the account of its bytes.

One lock, never held during I/O. Beliefs age: a copy is believed in until its time to live has passed here or a read
misses it, an absence for a moment only, since other processes write too. Monotonic time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from allocator.errors import IntegrityError
from kvstore.copy_key import CopyKey


class Presence(StrEnum):
    """What a lookup says now."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # being looked up: ask again


@dataclass(slots=True)
class Believed:
    """A copy thought to be stored. Times are seconds of the monotonic clock."""

    size_bytes: int
    expires_seconds: float
    renewed_seconds: float  # when its time to live was last set by us
    checked_seconds: float


@dataclass(frozen=True, slots=True)
class LedgerLimits:
    ttl_seconds: float
    entries: int = 1 << 18
    recheck_seconds: float = 60.0  # a belief older than this is still given, and looked up again
    absent_seconds: float = 2.0
    pending_seconds: float = 1.0  # a lookup that takes longer is a miss


Known: TypeAlias = "CopyKey | bytes"
"""A copy's key, or the text name of one found in an earlier life's namespace, whose key is not known."""


class Ledger:
    def __init__(self, capacity_bytes: int, limits: LedgerLimits, clock: Callable[[], float]) -> None:
        """capacity_bytes 0: no cap; then the oldest beliefs are merely forgotten."""
        self.capacity_bytes = capacity_bytes
        self.limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._copies: OrderedDict[Known, Believed] = OrderedDict()  # least recently used first
        self._absent: OrderedDict[CopyKey, float] = OrderedDict()  # until when to believe it
        self._pending: OrderedDict[CopyKey, float] = OrderedDict()  # since when
        self._leaving: dict[Known, Believed] = {}  # being evicted: counted until the server has dropped them
        self.used_bytes = 0
        self._reserved_bytes = 0

    # lookups ---------------------------------------------------------------------------------------------------------

    def look(self, keys: Sequence[CopyKey]) -> tuple[list[Presence], list[CopyKey]]:
        """What is known of each key, and which of them to ask the server about (they are pending from now on)."""
        now = self._clock()
        found, wanted = [], []
        with self._lock:
            for key in keys:
                copy = self._copies.get(key)
                if copy is not None and copy.expires_seconds > now:
                    found.append(Presence.HIT)
                    if now - copy.checked_seconds > self.limits.recheck_seconds:
                        copy.checked_seconds = now
                        wanted.append(key)
                        self._pending[key] = now
                    continue
                since = self._pending.get(key)
                if since is not None:
                    late = now - since > self.limits.pending_seconds
                    found.append(Presence.MISS if late else Presence.PENDING)
                    if now - since > 10 * self.limits.pending_seconds:  # its answer was lost
                        self._pending[key] = now
                        wanted.append(key)
                elif self._absent.get(key, 0.0) > now:
                    found.append(Presence.MISS)
                else:
                    self._absent.pop(key, None)
                    self._pending[key] = now
                    _bound(self._pending, self.limits.entries)
                    wanted.append(key)
                    found.append(Presence.PENDING)
        return found, wanted

    def presence(self, keys: Sequence[CopyKey]) -> list[Presence]:
        """What is known, without asking for more."""
        now = self._clock()
        with self._lock:
            return [self._known(key, now) for key in keys]

    def _known(self, key: CopyKey, now: float) -> Presence:
        copy = self._copies.get(key)
        if copy is not None and copy.expires_seconds > now:
            return Presence.HIT
        since = self._pending.get(key)
        return Presence.MISS if since is None or now - since > self.limits.pending_seconds else Presence.PENDING

    def answer(self, key: CopyKey, size_bytes: int | None) -> None:
        """The server's word on a pending key; None: not there. Late answers change nothing."""
        now = self._clock()
        with self._lock:
            if self._pending.pop(key, None) is None:
                return
            copy = self._copies.get(key)
            if size_bytes is None:
                if copy is not None:
                    self._forget(key)
                self._set_absent(key, now)
            elif copy is None:
                # Until when it lives is not known: believe it for a while and look again.
                self._enter(key, Believed(size_bytes, now + self.limits.ttl_seconds, 0.0, now), of_ours=False)
            elif copy.expires_seconds <= now:  # others have kept it alive, or a put that seemed lost was not
                copy.expires_seconds, copy.checked_seconds = now + self.limits.ttl_seconds, now

    def unanswered(self, key: CopyKey) -> None:
        """The server could not say: nothing to be read now, but with a cap what may be there is counted still."""
        now = self._clock()
        with self._lock:
            if self._pending.pop(key, None) is None:
                return
            copy = self._copies.get(key)
            if copy is not None and self.capacity_bytes:
                copy.expires_seconds = min(copy.expires_seconds, now)
            else:
                self._forget(key)
            self._set_absent(key, now)

    # writes ----------------------------------------------------------------------------------------------------------

    def holds(self, key: CopyKey) -> bool:
        with self._lock:
            copy = self._copies.get(key)
            return copy is not None and copy.expires_seconds > self._clock()

    def pick_victims(self, size_bytes: int) -> list[Known]:
        """Copies to evict so that `size_bytes` more fit: least recently used first. They stay counted until `gone`."""
        if not self.capacity_bytes:
            return []
        victims: list[Known] = []
        with self._lock:
            over = self.used_bytes + self._reserved_bytes + size_bytes - self.capacity_bytes
            over -= self._leaving_bytes()
            for key, copy in self._copies.items():
                if not copy.size_bytes:  # written by others: theirs to keep
                    continue
                if over <= 0 and len(self._copies) - len(victims) < self.limits.entries:
                    break
                victims.append(key)
                over -= copy.size_bytes
            for key in victims:
                self._leaving[key] = self._copies.pop(key)
        return victims

    def gone(self, keys: Iterable[Known]) -> None:
        """The server has dropped these victims."""
        with self._lock:
            for key in keys:
                copy = self._leaving.pop(key, None)
                self.used_bytes -= 0 if copy is None else copy.size_bytes

    def stay(self, keys: Iterable[Known]) -> None:
        """These could not be dropped: they are copies again, first to be tried next time."""
        with self._lock:
            for key in keys:
                copy = self._leaving.pop(key, None)
                if copy is None:
                    continue
                if key in self._copies:  # written anew meanwhile, in its place
                    self.used_bytes -= copy.size_bytes
                    continue
                self._copies[key] = copy
                self._copies.move_to_end(key, last=False)

    def reserve(self, size_bytes: int) -> bool:
        """Room for a copy about to be written; False when there is none."""
        with self._lock:
            fits = not self.capacity_bytes or self.used_bytes + self._reserved_bytes + size_bytes <= self.capacity_bytes
            if fits:
                self._reserved_bytes += size_bytes
            return fits

    def stored(self, key: CopyKey, name: bytes, size_bytes: int) -> None:
        """A reserved copy is there."""
        now = self._clock()
        with self._lock:
            self._reserved_bytes -= size_bytes
            self._forget(name)
            self._enter(key, Believed(size_bytes, now + self.limits.ttl_seconds, now, now), of_ours=True)

    def doubt(self, key: CopyKey, name: bytes, size_bytes: int) -> None:
        """A copy may be there all the same, though no answer came: counted, first to be evicted, not believed in."""
        now = self._clock()
        with self._lock:
            self._forget(name)
            self._enter(key, Believed(size_bytes, now, now, now), of_ours=True)
            self._copies.move_to_end(key, last=False)

    def unreserve(self, size_bytes: int) -> None:
        with self._lock:
            self._reserved_bytes -= size_bytes

    def adopt(self, name: bytes, size_bytes: int) -> bool:
        """Count a copy of an earlier life of this process; False when there is no room for it."""
        now = self._clock()
        with self._lock:
            if self.used_bytes + self._reserved_bytes + size_bytes > self.capacity_bytes:
                return False
            self._forget(name)
            self._copies[name] = Believed(size_bytes, now + self.limits.ttl_seconds, 0.0, now)
            self.used_bytes += size_bytes
            return True

    # reads and ends --------------------------------------------------------------------------------------------------

    def touch(self, keys: Iterable[CopyKey]) -> list[CopyKey]:
        """Note a use; which copies are due for a new time to live on the server."""
        now = self._clock()
        due = []
        with self._lock:
            for key in keys:
                copy = self._copies.get(key)
                if copy is not None:
                    self._copies.move_to_end(key)
                    if now - copy.renewed_seconds > self.limits.ttl_seconds / 8:
                        copy.renewed_seconds = now
                        due.append(key)
        return due

    def renewed(self, key: CopyKey, size_bytes: int | None = None) -> None:
        """Seen on the server just now, its time to live set anew."""
        now = self._clock()
        with self._lock:
            self._pending.pop(key, None)
            copy = self._copies.get(key)
            if copy is None:
                if size_bytes is not None:
                    self._enter(key, Believed(size_bytes, now + self.limits.ttl_seconds, now, now), of_ours=False)
                return
            copy.expires_seconds, copy.renewed_seconds, copy.checked_seconds = now + self.limits.ttl_seconds, now, now
            self._copies.move_to_end(key)

    def missed(self, key: CopyKey) -> None:
        """A read found nothing."""
        with self._lock:
            self._forget(key)
            self._set_absent(key, self._clock())

    def drop(self, keys: Iterable[CopyKey]) -> int:
        """Not believed in from now on; how many were. With a cap they stay counted until `gone`."""
        now = self._clock()
        with self._lock:
            count = 0
            for key in keys:
                copy = self._copies.pop(key, None)
                count += copy is not None
                self._set_leaving(key, copy, now)
                self._set_absent(key, now)
                self._pending.pop(key, None)
            return count

    def clear(self) -> None:
        with self._lock:
            for table in (self._copies, self._absent, self._pending, self._leaving):
                table.clear()
            self.used_bytes = 0

    def check(self) -> None:
        """IntegrityError when the account does not add up."""
        with self._lock:
            total = sum(copy.size_bytes for copy in self._copies.values()) + self._leaving_bytes()
            if total != self.used_bytes or self._reserved_bytes < 0:
                raise IntegrityError(f"ledger: {self.used_bytes} bytes counted, {total} in copies")

    # under the lock --------------------------------------------------------------------------------------------------

    def _leaving_bytes(self) -> int:
        return sum(copy.size_bytes for copy in self._leaving.values())

    def _enter(self, key: CopyKey, copy: Believed, *, of_ours: bool) -> None:
        self._forget(key)
        self._absent.pop(key, None)
        self._pending.pop(key, None)
        if not of_ours and self.capacity_bytes:
            copy.size_bytes = 0  # somebody else wrote it: seen, not counted
            if len(self._copies) >= self.limits.entries:
                return
        self._copies[key] = copy
        self.used_bytes += copy.size_bytes
        if not self.capacity_bytes:
            while len(self._copies) > self.limits.entries:
                self._forget(next(iter(self._copies)))

    def _set_leaving(self, key: Known, copy: Believed | None, now: float) -> None:
        """`copy` is no copy any more, but its bytes are there until the server has dropped them."""
        if copy is None:
            return
        if not self.capacity_bytes or key in self._leaving:
            self.used_bytes -= copy.size_bytes
            return
        copy.expires_seconds = now
        self._leaving[key] = copy

    def _forget(self, key: Known) -> None:
        copy = self._copies.pop(key, None)
        if copy is not None:
            self.used_bytes -= copy.size_bytes

    def _set_absent(self, key: CopyKey, now: float) -> None:
        self._absent[key] = now + self.limits.absent_seconds
        self._absent.move_to_end(key)
        _bound(self._absent, self.limits.entries)


def _bound(table: OrderedDict[CopyKey, float], limit: int) -> None:
    while len(table) > limit:
        table.popitem(last=False)
