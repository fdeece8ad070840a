"""Copies in this process's host memory: one arena with a hard byte budget.

The arena is one private anonymous mapping, cut into extents; an extent holds slots of one size and takes another size
when it is empty, so that full and INT4 copies of any mix find room. Eviction is least recently used of the lowest
priority, leaves first: a copy whose block still has stored children stays while any leaf can go. A copy that is pinned,
being written or being read is never evicted; reads are protected from submit_get on.

Own-process copies carry no checksum. `_lock` guards the index and is never held while bytes are copied; copies go
past the cache where the C kernels are there, and let other threads run meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from allocator.block_marks import PLAIN, Steps
from allocator.errors import ConfigError, IntegrityError
from kvstore.copy_key import CopyKey
from kvstore.executor import Executor
from kvstore.host_tier.arena import HostArena
from kvstore.host_tier.index import HostEntry, HostIndex
from kvstore.indexed_tier import IndexedTier
from kvstore.tier import Fading, Job, Loan, ResultCode
from quant.native import pages


class HostTier(IndexedTier[HostEntry]):
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
        self._arena = self._make_arena(capacity_bytes, prefault)
        self._index: HostIndex = HostIndex(capacity_bytes, slot_bytes)
        self._generation = 0

    def _make_arena(self, capacity_bytes: int, prefault: bool) -> HostArena:
        return HostArena(capacity_bytes, prefault=prefault)

    # the contract ----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        with self._lock:
            self._generation += 1
        super().clear()
        with self._lock:
            for family in list(self._index.families.values()):
                for entry in list(family.values()):
                    self._index.unlink(entry)

    def follow_epoch(self, epoch: int) -> None:
        self.clear()

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

    def keep(self, keys: Sequence[CopyKey], steps: Steps) -> None:
        with self._lock:
            for key in keys if steps != PLAIN or self._index.marked_count else ():
                entry = self._index.find(key)
                if entry is not None:
                    self._index.keep(entry, steps)

    def expire(self, now: float) -> None:
        with self._lock:
            self._index.expire(now)

    @property
    def marked_count(self) -> int:
        return self._index.marked_count

    def set_quota(self, tenant: str, quota_bytes: int) -> None:
        with self._lock:
            self._index.set_quota(tenant, quota_bytes)

    def tenant_bytes(self, tenant: str) -> int:
        """What a tenant's copies take, of those that came since it had a quota."""
        return self._index.tenant_bytes(tenant)

    def describe_root(self, root: bytes, description: Mapping[str, str]) -> None:
        with self._lock:
            self._index.name_root(root, description.get("tenant", ""))

    def fading(self, count: int | None) -> list[Fading]:
        with self._lock:
            index = self._index
            found = index.fading(count) if count is not None else sorted(index.linked(), key=lambda one: -one.tick)
            return [Fading(one.key, one.parent, one.size_bytes, one.use_count > 0) for one in found]

    @property
    def peak_bytes(self) -> int:
        """The most that used_bytes has been."""
        return self._index.peak_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    def collect_orphans(self) -> int:
        """Drop the orphans, and what becomes one by that; how many copies. For a store that knows no other tier."""
        with self._lock:
            return self._index.collect_orphans()

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
                self._index.keep(known, job.steps)
                return ResultCode.OK
            if not self._index.fits(job.size_bytes):
                return ResultCode.TOO_LARGE
            entry = self._index.reserve(job.key, job.size_bytes, job.parent, job.steps)
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
