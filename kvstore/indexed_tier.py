"""A tier that knows in memory what it holds: lookup, recency, pins and the claims of readers, over a CopyIndex.

Base of the host and the disk tier. `_lock` guards the index and is never held while bytes move.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Generic

from kvstore.copy_index import CopyIndex, Entry, leading_run
from kvstore.copy_key import CopyKey
from kvstore.queued_tier import QueuedTier
from kvstore.tier import Job


class IndexedTier(QueuedTier, Generic[Entry]):
    """See the module. A backend sets `_lock` and `_index` before its first call."""

    _lock: threading.Lock
    _index: CopyIndex[Entry]

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        with self._lock:
            find = self._index.find
            return [find(key) is not None for key in keys]

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        with self._lock:
            return leading_run(self._index.families.get(key.family), hashes)

    def delete(self, keys: Sequence[CopyKey]) -> int:
        with self._lock:
            found = [self._index.find(key) for key in dict.fromkeys(keys)]
            entries = [entry for entry in found if entry is not None and entry.pin_count == 0]
            for entry in entries:
                self._index.unlink(entry)
            return len(entries)

    def touch(self, keys: Sequence[CopyKey]) -> None:
        with self._lock:
            for key in keys:
                entry = self._index.find(key)
                if entry is not None:
                    entry.use_count += 1
                    self._index.touch(entry)

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Pins hold in this process: nothing writes them down."""
        with self._lock:
            return self._index.pin(keys)

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        with self._lock:
            self._index.unpin(keys, self.name)

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    @property
    def copy_count(self) -> int:
        return self._index.copy_count

    @property
    def orphan_count(self) -> int:
        """Stored copies whose parent block was named and has no stored copy here."""
        return self._index.orphan_count

    def counters(self) -> dict[str, int]:
        with self._lock:
            own = dict(self._index.counts)
        return super().counters() | own

    def _claim(self, jobs: Sequence[Job]) -> list[Any]:
        with self._lock:
            entries = [self._index.find(job.key) for job in jobs]
            for entry in entries:
                if entry is not None:
                    entry.reader_count += 1
                    entry.use_count += 1
                    self._index.touch(entry)
            return entries

    def _release(self, claims: Sequence[Any]) -> None:
        with self._lock:
            for entry in claims:
                if entry is not None:
                    self._index.end_read(entry)
