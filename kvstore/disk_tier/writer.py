"""How copies get into a disk directory and out of it: groups of puts, removals, what a full disk or map leads to.

A group goes through in this order, so that the files never hold more than the budget and nothing that can be found is
not whole: room is planned (evicting), the evicted leave the index file, holes are made, the index is rewritten if that
gives room, slots get room, frames are written, records are published.

Used by DiskTier only. The caller holds `writing`; `lock` guards the index and is taken here, in short.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvstore.compression import Packer
from kvstore.copy_key import CopyKey
from kvstore.disk_tier.catalog import Addition, CatalogError, CatalogFullError, DiskCatalog, Removal
from kvstore.disk_tier.index import Batch, DiskEntry, DiskIndex
from kvstore.disk_tier.layout import BALLAST_BYTES, BALLAST_NAME, digest_of, record_bytes
from kvstore.disk_tier.lock import DirectoryLock, InspectionLock
from kvstore.disk_tier.slots import NO_ROOM, SlotFiles
from kvstore.frame.heads import FrameHead, FrameHeads, signed_head
from kvstore.frame.specs import SpecSource
from kvstore.tier import Job, ResultCode, Transfer
from quant.native.summed_file import write_all_summed

_RECENCY_A_COMMIT = 256
_MOST_WAITING_PAGES = 64
_PAUSES_UNTIL_GROWTH = 10
_LOG = logging.getLogger(__name__)


class DiskSettings(NamedTuple):
    """What DiskTier was made with, see there."""

    directory: Path
    sync: str
    specs: SpecSource
    heads: FrameHeads
    secret: bytes | None
    retry_seconds: float


class _Fresh(NamedTuple):
    """A copy that is being stored."""

    job: Job
    entry: DiskEntry
    form: FrameHead
    packed: bytes | None
    key: bytes  # canonical


class DiskWriter:
    """See the module. count: adds one to a cause."""

    def __init__(
        self,
        settings: DiskSettings,
        catalog: DiskCatalog,
        index: DiskIndex,
        slots: SlotFiles,
        directory_lock: DirectoryLock,
        lock: threading.Lock,
        count: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._sync, self._specs, self._secret = settings.sync, settings.specs, settings.secret
        self._heads = settings.heads
        self._catalog, self._index, self._slots = catalog, index, slots
        self.packer: Packer | None = None
        self._directory_lock, self._lock, self._count = directory_lock, lock, count
        self._paused_until = self._raise_at = 0.0
        self._ballast = settings.directory / BALLAST_NAME
        self._take_ballast()

    def put_group(self, transfer: Transfer, jobs: Sequence[Job]) -> list[ResultCode]:
        batch = Batch()
        now = time.monotonic()
        paused = now < self._paused_until
        if not paused and self._raise_at and now >= self._raise_at:
            self._look_for_room(now)
        self._index.other_readers = self._directory_lock.is_inspected or self._catalog.check_readers()
        self._settle_freed()
        entries: dict[CopyKey, DiskEntry | ResultCode] = {}
        written: list[_Fresh] = []
        failure = None
        try:
            fresh: list[_Fresh] = []
            packed = self._packed(self.packer, jobs) if self.packer is not None and not paused else {}
            with self._lock:
                for job in jobs:
                    if job.key not in entries:
                        found = self._reserve(batch, job, paused, packed.get(job.key))
                        entries[job.key] = found if isinstance(found, ResultCode) else found.entry
                        if isinstance(found, _Fresh):
                            fresh.append(found)
            self._make_room(batch)
            if not transfer.cancelled:
                self._write_slots(fresh)
                written = fresh
            self._publish(written)
        except Exception as error:  # counted by cause: the reservations must go back whatever went wrong
            failure = self._put_failed(error)
        self._settle_entries(batch, entries, [] if failure is not None else written, failure)
        results = [entries.get(job.key, failure or ResultCode.FAILED) for job in jobs]
        return [ResultCode.OK if isinstance(one, DiskEntry) else one for one in results]

    def _packed(self, packer: Packer, jobs: Sequence[Job]) -> dict[CopyKey, bytes]:
        """Whole frames of those that are not there yet and become smaller."""
        with self._lock:
            fresh = [job for job in jobs if job.size_bytes and self._index.find(job.key) is None]
        frames = {}
        for job in fresh:
            frame = packer.pack(self._specs(job.key, job.size_bytes), [row for row in job.rows if row.nbytes])
            if frame is not None:
                frames[job.key] = frame
        return frames

    def _reserve(self, batch: Batch, job: Job, paused: bool, packed: bytes | None) -> _Fresh | ResultCode:
        known = self._index.find(job.key)
        if known is not None:
            self._index.touch(known)
            return ResultCode.OK
        if paused:
            self._index.counts["paused"] += 1
            return ResultCode.FULL
        if job.size_bytes == 0:
            self._index.counts["empty"] += 1
            return ResultCode.FAILED
        form = self._heads.head(job.key, job.key.family, job.size_bytes, is_whole=self._secret is not None)
        frame_bytes = form.frame_bytes if packed is None else len(packed)
        if not self._index.fits(job.size_bytes, frame_bytes):
            return ResultCode.TOO_LARGE
        key = job.key.to_bytes()
        entry = self._index.reserve(batch, job.key, job.size_bytes, job.parent, frame_bytes, digest_of(key))
        if entry is None and self._index.other_readers:  # freed pages cannot be used while an old state is read
            self._index.counts["reader_holds_room"] += 1
        return _Fresh(job, entry, form, packed, key) if entry is not None else ResultCode.FULL

    def _make_room(self, batch: Batch) -> None:
        """Before any slot is written: copies that went are out of the index file, and the files have their room."""
        self.commit_removals()
        if batch.freed_pages:
            self._catalog.settle()
            with self._lock:
                self._index.note_commit(0, 0)
        self._slots.give_room(batch.plan)
        if batch.compacts:
            with InspectionLock(self._settings.directory, exclusive=True, timeout_seconds=0):
                self._catalog.compact()
            with self._lock:
                self._index.note_compacted()
            self._count("index_compacted")
        self._slots.carry_out(batch.plan)

    def _settle_freed(self) -> None:
        """After many deletions: let what they freed be used, before the batch is fitted to the room there is."""
        if self._index.other_readers and self._index.room_bytes(Batch()) < 0:
            return
        if self._index.waiting_pages > _MOST_WAITING_PAGES or self._index.pending:
            with suppress(CatalogError):  # the batch's own commit meets and counts it
                self.commit_removals()
                for _ in range(2):
                    self._catalog.settle()
                    with self._lock:
                        self._index.note_commit(0, 0)

    def _head(self, one: _Fresh) -> bytearray:
        """The head of a copy's frame; of a signed one with its sums, for which it reads the rows once more."""
        job = one.job
        if self._secret is None:
            return one.form.of(job.key.hash)
        return signed_head(self._specs(job.key, job.size_bytes), job.rows, self._secret)

    def _write_slots(self, fresh: Sequence[_Fresh]) -> None:
        """What does not lie in the index. OSError: none of it counts."""
        writes = []
        for one in fresh:
            entry = one.entry
            if entry.slot is None:
                continue
            if one.packed is not None:
                self._slots.write_whole(entry.slot, one.packed, entry.slot_bytes)
            else:
                head = self._head(one)
                writes.append(self._slots.frame_write(entry.slot, entry.slot_bytes, head, one.form.sums, one.job))
        write_all_summed(writes)

    def _publish(self, written: Sequence[_Fresh]) -> None:
        if not written:
            return
        if self._sync != "none":
            self._slots.sync({one.entry.slot_bytes for one in written if one.entry.slot is not None})
        with self._lock:
            tick = self._index.tick
            recency = self._index.take_dirty(_RECENCY_A_COMMIT)
        now = int(time.time())
        additions = [self._addition(one, tick, now) for one in written]
        self._catalog.write(additions, (), recency, self._index.last_generation)
        with self._lock:
            self._index.note_commit(0, 0)
            for one in written:
                self._index.publish(one.entry)
                self._index.dirty.pop(one.entry.generation, None)

    def _addition(self, one: _Fresh, tick: int, written_at: int) -> Addition:
        job, entry, form, value, key = one
        place = (job.size_bytes, entry.frame_bytes, entry.slot_bytes, entry.slot)
        record = record_bytes(key, job.parent, place, entry.generation, tick, written_at)
        if entry.slot is None and value is None:
            head = form.filled(job.key.hash, job.rows)
            if self._secret is not None:
                head = signed_head(self._specs(job.key, job.size_bytes), job.rows, self._secret)
            value = b"".join((head, *(row.data for row in job.rows)))
        return Addition(entry.digest, record, entry.generation, value if entry.slot is None else None)

    def _settle_entries(
        self,
        batch: Batch,
        entries: dict[CopyKey, DiskEntry | ResultCode],
        published: Sequence[_Fresh],
        failure: ResultCode | None,
    ) -> None:
        """What was not published goes back, and what a failed plan did not reach is taken out of the account."""
        done = {id(one.entry) for one in published}
        with self._lock:
            for key, entry in entries.items():
                if isinstance(entry, DiskEntry) and id(entry) not in done:
                    self._index.abandon(entry)
                    entries[key] = failure if failure is not None else ResultCode.CANCELLED
            self._slots.undo(batch.plan)
            if failure is ResultCode.FULL and self._raise_at:
                self._index.note_full()

    def _put_failed(self, error: Exception) -> ResultCode:
        """Count it; when room was missing, pause puts and let the oldest go so that there is some afterwards."""
        full = isinstance(error, CatalogFullError) or (isinstance(error, OSError) and error.errno in NO_ROOM)
        if isinstance(error, CatalogError):
            cause = error.cause
        elif isinstance(error, OSError):
            cause = "disk_full" if full else f"write_{errno.errorcode.get(error.errno or 0, 'OSError')}"
        else:
            cause = f"failed_{type(error).__name__}"
        self._count(cause)
        _LOG.warning("kvstore: disk tier %s: put failed: %s", self._settings.directory, error)
        if cause == "map_full":
            self._relieve_map()
            return ResultCode.FULL
        now = time.monotonic()
        self._paused_until = now + self._settings.retry_seconds
        if full:
            self._ballast.unlink(missing_ok=True)
            self._raise_at = now + _PAUSES_UNTIL_GROWTH * self._settings.retry_seconds
        return ResultCode.FULL if full else ResultCode.FAILED

    def _take_ballast(self) -> bool:
        try:
            fd = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, BALLAST_BYTES)
            finally:
                os.close(fd)
        except OSError:
            with suppress(OSError):
                self._ballast.unlink(missing_ok=True)
            return False
        return True

    def _look_for_room(self, now: float) -> None:
        """Some time after the file system was full: allow growth again, a step at a time."""
        if self._take_ballast():
            with self._lock:
                self._index.raise_limit()
            done = self._index.limit_bytes == self._index.capacity_bytes
            self._raise_at = 0.0 if done else now + self._settings.retry_seconds
        else:
            self._raise_at = now + _PAUSES_UNTIL_GROWTH * self._settings.retry_seconds

    def _relieve_map(self) -> None:
        with self._lock:
            self._index.evict_oldest(max(1, self._index.copy_count // 8))
        try:
            self.commit_removals()
            self._catalog.settle()
        except CatalogError as error:  # no page left even to delete with: a cache may begin anew
            self._count(f"relieve_{error.cause}")
            try:
                self.clear()
            except CatalogError:
                self._paused_until = time.monotonic() + self._settings.retry_seconds

    # removals --------------------------------------------------------------------------------------------------------

    def commit_removals(self) -> None:
        while self._index.pending:
            with self._lock:
                some: list[Removal] = self._index.pending[: self._index.removals_a_commit]
            self._catalog.write(removals=some)
            with self._lock:
                del self._index.pending[: len(some)]
                self._index.note_commit(len(some), sum(removal.pieces for removal in some))

    def clear(self) -> None:
        """Empty index and files. CatalogError when the index cannot be emptied; then nothing has changed."""
        self._catalog.clear(self._index.last_generation)
        if self._sync != "none":
            self._catalog.sync()
        with self._lock:
            for entry in self._index.linked():
                self._index.unlink(entry)
            self._index.pending.clear()
            self._index.note_commit(0, 0)
        try:
            self._slots.empty()
        except OSError as error:  # counted: nothing can be found any more, only room is held
            self._count(f"not_given_back_{errno.errorcode.get(error.errno or 0, 'OSError')}")

    def finish(self) -> None:
        """At close: everything that is remembered, written down. CatalogError."""
        self.commit_removals()
        with self._lock:
            recency = self._index.take_dirty(self._index.copy_count)
        self._catalog.write(recency=recency, generation=self._index.last_generation)
        self._catalog.sync()
