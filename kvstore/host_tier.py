"""Copies in this process's host memory: one arena with a hard byte budget.

The arena is one private anonymous mapping, cut into extents; an extent holds slots of one size and takes another size
when it is empty, so that full and INT4 copies of any mix find room. Eviction is least recently used, leaves first: a
copy whose block still has stored children stays while any leaf can go. A copy that is pinned, being written or being
read is never evicted; reads are protected from submit_get on.

Own-process copies carry no checksum. `_lock` guards the index and is never held while bytes are copied; copies go
past the cache where the C kernels are there, and let other threads run meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from allocator.errors import ConfigError, IntegrityError
from kvstore.copy_key import CopyKey
from kvstore.executor import Executor
from kvstore.host_arena import HostArena
from kvstore.host_index import HostEntry, HostIndex
from kvstore.queued_tier import QueuedTier
from kvstore.tier import Fading, Job, Loan, ResultCode
from quant.native import pages


class HostTier(QueuedTier):
    """The host tier.

    capacity_bytes  budget; the arena is this long and nothing else holds payload
    executor        where copies run; None: inline
    slot_bytes      sizes to expect (full and INT4 block bytes of each group), so that extents fit them well
    prefault        touch the arena's pages in the background, so that first writes do not pay for it
    """

    private_memory = True
    put_batch_copies = 1

    def __init__(
        self,
        capacity_bytes: int,
        executor: Executor | None = None,
        *,
        name: str = "host",
        slot_bytes: Sequence[int] = (),
        prefault: bool = False,
        queue_limit_items: int = 65536,
    ) -> None:
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < 1:
            raise ConfigError(f"capacity_bytes: got {capacity_bytes!r}; expected an int >= 1")
        super().__init__(name, executor, queue_limit_items=queue_limit_items)
        self._lock = threading.Lock()
        self._arena = HostArena(capacity_bytes, prefault=prefault)
        self._index = HostIndex(capacity_bytes, slot_bytes)
        self._generation = 0

    # the contract ----------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        with self._lock:
            find = self._index.find
            return [find(key) is not None for key in keys]

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        with self._lock:
            family = self._index.families.get(key.family)
            if not family:
                return 0
            for count, hash in enumerate(hashes):
                if hash not in family:
                    return count
            return len(hashes)

    def delete(self, keys: Sequence[CopyKey]) -> int:
        with self._lock:
            found = [self._index.find(key) for key in dict.fromkeys(keys)]
            entries = [entry for entry in found if entry is not None and entry.pin_count == 0]
            for entry in entries:
                self._index.unlink(entry)
            return len(entries)

    def clear(self) -> None:
        with self._lock:
            self._generation += 1
        super().clear()
        with self._lock:
            for family in list(self._index.families.values()):
                for entry in list(family.values()):
                    self._index.unlink(entry)

    def touch(self, keys: Sequence[CopyKey]) -> None:
        with self._lock:
            for key in keys:
                entry = self._index.find(key)
                if entry is not None:
                    self._index.touch(entry)
                    entry.use_count += 1

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        with self._lock:
            return self._index.pin(keys)

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        with self._lock:
            self._index.unpin(keys, self.name)

    def lend(self, keys: Sequence[CopyKey]) -> list[Loan | None]:
        loans: list[Loan | None] = []
        with self._lock:
            for key in keys:
                entry = self._index.find(key)
                if entry is None:
                    loans.append(None)
                    continue
                entry.reader_count += 1
                row = self._arena.memory[entry.offset : entry.offset + entry.size_bytes]
                loans.append(Loan(row, partial(self._release, (entry,))))
        return loans

    def fading(self, count: int) -> list[Fading]:
        with self._lock:
            return [
                Fading(entry.key, entry.parent, entry.size_bytes, entry.use_count > 0)
                for entry in self._index.fading(count)
            ]

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that used_bytes has been."""
        return self._index.peak_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    @property
    def copy_count(self) -> int:
        return self._index.copy_count

    @property
    def orphan_count(self) -> int:
        """Stored copies whose parent block was named and has no stored copy here."""
        return self._index.orphan_count

    def collect_orphans(self) -> int:
        """Drop the orphans, and what becomes one by that; how many copies. For a store that knows no other tier."""
        with self._lock:
            return self._index.collect_orphans()

    def counters(self) -> dict[str, int]:
        with self._lock:
            own = dict(self._index.counts)
        return super().counters() | own

    def wait_prefaulted(self, timeout_seconds: float) -> bool:
        """True once every page has been touched, or when this system cannot do it in the background."""
        return self._arena.wait_prefaulted(timeout_seconds)

    def close(self) -> None:
        super().close()
        self._arena.close()

    def check_invariants(self) -> None:
        """IntegrityError names the first rule of the index that does not hold."""
        with self._lock:
            self._index.check()
            if self.used_bytes > self.capacity_bytes:
                raise IntegrityError(f"host tier uses {self.used_bytes} of {self.capacity_bytes} bytes")

    # hooks -----------------------------------------------------------------------------------------------------------

    def _put_one(self, job: Job) -> ResultCode:
        with self._lock:
            generation = self._generation
            known = self._index.find(job.key)
            if known is not None:
                self._index.touch(known)
                return ResultCode.OK
            if not self._index.fits(job.size_bytes):
                return ResultCode.TOO_LARGE
            entry = self._index.reserve(job.key, job.size_bytes, job.parent)
            if entry is None:
                return ResultCode.FULL
        result = ResultCode.FAILED
        try:
            self._copy_in(entry, job)
            result = ResultCode.OK
        finally:
            with self._lock:
                if generation != self._generation:
                    result = ResultCode.CANCELLED  # cleared meanwhile: what was written belongs to the past
                if result is ResultCode.OK and self._index.twin(entry) is None:
                    self._index.publish(entry)
                else:
                    self._index.abandon(entry)
        return result

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

    def _get_one(self, job: Job, claim: Any) -> ResultCode:
        entry: HostEntry | None = claim
        if entry is None:
            return ResultCode.MISS
        if entry.size_bytes != job.size_bytes:
            self._count("size_mismatch")
            return ResultCode.CORRUPT
        self._copy_out(entry, job)
        return ResultCode.OK

    def _copy_in(self, entry: HostEntry, job: Job) -> None:
        memory, at = self._arena.memory, entry.offset
        for row in job.rows:
            pages.move(row, 0, memory, at, row.nbytes)
            at += row.nbytes

    def _copy_out(self, entry: HostEntry, job: Job) -> None:
        memory, at = self._arena.memory, entry.offset
        for row in job.rows:
            pages.move(memory, at, row, 0, row.nbytes)
            at += row.nbytes
