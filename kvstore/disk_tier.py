"""Copies on a local file system: an LMDB index with small values in it, and slot files for large ones.

A put writes the frame, then publishes the index record: what can be found is whole. A get checks header, key and
checksum (and the keyed hash, where a secret is configured); anything wrong is CORRUPT, counted by cause, and that
generation of the copy is dropped. docs/how-to/disk.md says what each sync setting promises and what each fault does;
docs/formats/disk.md gives the bytes.

`_lock` guards the index in memory and is never held while bytes move. `_writing` is held by whoever changes files: a
group of puts, a delete, a clear. Order: `_writing`, then `_lock`.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from allocator.errors import ConfigError, TierError, UsageError
from kvstore.copy_key import CopyKey
from kvstore.disk_catalog import Addition, CatalogError, CatalogFullError, Removal
from kvstore.disk_index import LEAST_BYTES, Batch, DiskEntry, DiskIndex
from kvstore.disk_layout import DiskRecord
from kvstore.disk_lock import DirectoryLock, InspectionLock
from kvstore.disk_open import make_directory, open_catalog, recover
from kvstore.disk_slots import SlotFiles
from kvstore.executor import Executor
from kvstore.frame import FrameFault, FrameSpec, build_joined_header, parse_frame
from kvstore.frame_build import joined_checksum
from kvstore.frame_specs import SpecSource, plain_specs
from kvstore.queued_tier import QueuedTier
from kvstore.tier import Job, ResultCode, Transfer

SYNC_POLICIES = ("none", "batch", "always")
_GROUP_COPIES = 16
_RECENCY_A_COMMIT = 256
_MOST_WAITING_PAGES = 64
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LOG = logging.getLogger(__name__)


class _Fresh(NamedTuple):
    """A copy that is being stored."""

    job: Job
    entry: DiskEntry
    spec: FrameSpec


class DiskTier(QueuedTier):
    """The disk tier. TierError when the directory cannot be opened, or is open for writing elsewhere.

    directory       made if absent; one writer at a time
    capacity_bytes  budget of everything in the directory, at least 1 MiB
    executor        where files are read and written; None: inline
    sync            none: survives the process; batch: and a power cut, up to the last transfer; always: every OK
    specs           what frames say of a copy's shape, see frame_specs
    secret          keyed hash in every frame, for a directory that others can write
    map_bytes       size of LMDB's map, sparse; 0: far more than the budget
    retry_seconds   puts pause for this long after the file system was full
    """

    def __init__(
        self,
        directory: str | Path,
        capacity_bytes: int,
        executor: Executor | None = None,
        *,
        sync: str = "none",
        specs: SpecSource = plain_specs,
        secret: bytes | None = None,
        map_bytes: int = 0,
        retry_seconds: float = 1.0,
    ) -> None:
        if isinstance(capacity_bytes, bool) or not isinstance(capacity_bytes, int) or capacity_bytes < LEAST_BYTES:
            raise ConfigError(f"capacity_bytes: got {capacity_bytes!r}; expected an int >= {LEAST_BYTES}")
        if sync not in SYNC_POLICIES:
            raise ConfigError(f"sync: got {sync!r}; expected one of {', '.join(SYNC_POLICIES)}")
        super().__init__("disk", executor)
        self.directory = Path(directory)
        self._sync, self._specs, self._secret = sync, specs, secret
        self._retry_seconds = retry_seconds
        self._paused_until = 0.0
        self._clock: Callable[[], float] = time.monotonic
        self._lock = threading.Lock()
        self._writing = threading.RLock()
        make_directory(self.directory)
        self._directory_lock = DirectoryLock(self.directory, sync)
        self._slots = SlotFiles(self.directory)
        counts: Counter[str] = Counter()
        try:
            self._open_directory(capacity_bytes, map_bytes or max(1 << 30, 2 * capacity_bytes), counts)
        except OSError as error:
            self._abandon_open()
            raise TierError(f"disk tier {directory}: cannot be opened ({error})") from error
        except BaseException:
            self._abandon_open()
            raise
        self._counts.update({cause: count for cause, count in counts.items() if count})

    def _open_directory(self, capacity_bytes: int, map_bytes: int, counts: Counter[str]) -> None:
        self._catalog = open_catalog(
            self.directory, self._directory_lock, map_bytes, self._sync, capacity_bytes, counts
        )
        self._index = DiskIndex(capacity_bytes, self._slots, self._catalog.account)
        try:
            recover(self._catalog, self._index, self._slots, self.directory, counts)
        except CatalogError as error:
            self._catalog.close()
            raise TierError(f"disk tier {self.directory}: cannot be recovered ({error})") from error
        counts["stale_readers"] += self._catalog.stale_readers

    def _abandon_open(self) -> None:
        self._slots.close()
        self._directory_lock.release()
        self._executor.close()

    # the contract ----------------------------------------------------------------------------------------------------

    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        with self._lock:
            find = self._index.find
            return [find(key) is not None for key in keys]

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        with self._lock:
            family = self._index.families.get(key.family, {})
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
        self._tidy()
        return len(entries)

    def clear(self) -> None:
        super().clear()
        with self._writing:
            self._check_process()
            try:
                self._catalog.clear(self._index.last_generation)
                if self._sync != "none":
                    self._catalog.sync()
            except CatalogError as error:
                raise TierError(f"disk tier {self.directory}: could not be emptied ({error})") from error
            with self._lock:
                for entry in self._index.linked():
                    self._index.unlink(entry)
                self._index.pending.clear()
                self._index.note_commit(0, 0)
            try:
                self._slots.empty()
            except OSError as error:  # counted: nothing can be found any more, only room is held
                self._count(f"not_given_back_{errno.errorcode.get(error.errno or 0, 'OSError')}")

    def touch(self, keys: Sequence[CopyKey]) -> None:
        with self._lock:
            for key in keys:
                entry = self._index.find(key)
                if entry is not None:
                    self._index.touch(entry)

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Pins hold in this process: they are not written down."""
        with self._lock:
            return self._index.pin(keys)

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        with self._lock:
            self._index.unpin(keys, self.name)

    @property
    def used_bytes(self) -> int:
        return self._index.used_bytes

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    @property
    def copy_count(self) -> int:
        return self._index.copy_count

    @property
    def orphan_count(self) -> int:
        return self._index.orphan_count

    @property
    def file_bytes(self) -> int:
        """What the directory's files take, by the file system's account."""
        return sum(file.stat().st_blocks * 512 for file in self.directory.iterdir())

    def counters(self) -> dict[str, int]:
        with self._lock:
            own = dict(self._index.counts)
        return super().counters() | own

    def close(self) -> None:
        super().close()
        with self._writing:
            if self._directory_lock.is_ours:
                try:
                    self._commit_removals()
                    with self._lock:
                        recency = self._index.take_dirty(self._index.copy_count)
                    self._catalog.write(recency=recency, generation=self._index.last_generation)
                    self._catalog.sync()
                except CatalogError as error:
                    self._count(f"close_{error.cause}")
                self._catalog.close()
                self._slots.close()
            self._directory_lock.release()

    def check_invariants(self) -> None:
        """IntegrityError names the first rule of the index that does not hold. For a tier at rest."""
        with self._lock:
            self._index.check()

    # put -------------------------------------------------------------------------------------------------------------

    def _put_batch(self, transfer: Transfer, jobs: Sequence[Job]) -> list[ResultCode]:
        size = 1 if self._sync == "always" else _GROUP_COPIES
        results: list[ResultCode] = []
        for at in range(0, len(jobs), size):
            group = jobs[at : at + size]
            if transfer.cancelled:
                results += [ResultCode.CANCELLED] * len(group)
                continue
            with self._writing:
                self._check_process()
                results += self._put_group(transfer, group)
        return results

    def _put_one(self, job: Job) -> ResultCode:
        raise NotImplementedError("puts go by group")

    def _put_group(self, transfer: Transfer, jobs: Sequence[Job]) -> list[ResultCode]:
        batch = Batch()
        self._settle_freed()
        others = self._directory_lock.is_inspected or self._catalog.check_readers()
        paused = self._clock() < self._paused_until
        entries: dict[CopyKey, DiskEntry | ResultCode] = {}
        written: list[_Fresh] = []
        failure = None
        try:
            fresh: list[_Fresh] = []
            with self._lock:
                self._index.other_readers = others
                for job in jobs:
                    if job.key not in entries:
                        found = self._reserve(batch, job, paused)
                        entries[job.key] = found if isinstance(found, ResultCode) else found.entry
                        if isinstance(found, _Fresh):
                            fresh.append(found)
            self._make_room(batch)
            for one in fresh:
                if transfer.cancelled:
                    break
                self._write_slot(one)
                written.append(one)
            self._publish(written)
        except Exception as error:  # counted by cause: the reservations must go back whatever went wrong
            failure = self._put_failed(error)
        self._settle_entries(batch, entries, [] if failure is not None else written, failure)
        results = [entries.get(job.key, failure or ResultCode.FAILED) for job in jobs]
        return [ResultCode.OK if isinstance(one, DiskEntry) else one for one in results]

    def _reserve(self, batch: Batch, job: Job, paused: bool) -> _Fresh | ResultCode:
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
        spec = self._specs(job.key, job.size_bytes)
        frame_bytes = spec.frame_bytes(1)
        if not self._index.fits(job.size_bytes, frame_bytes):
            return ResultCode.TOO_LARGE
        entry = self._index.reserve(batch, job.key, job.size_bytes, job.parent, frame_bytes)
        if entry is None and self._index.other_readers:  # freed pages cannot be used while an old state is read
            self._index.counts["reader_holds_room"] += 1
        return _Fresh(job, entry, spec) if entry is not None else ResultCode.FULL

    def _make_room(self, batch: Batch) -> None:
        """Before any slot is written: copies that went are out of the index file, and the files have their room."""
        self._commit_removals()
        if batch.freed_pages:
            self._catalog.settle()
            with self._lock:
                self._index.note_commit(0, 0)
        self._slots.give_room(batch.plan)
        if batch.compacts:
            with InspectionLock(self.directory, exclusive=True, timeout_seconds=0):
                self._catalog.compact()
            with self._lock:
                self._index.note_compacted()
            self._count("index_compacted")
        self._slots.carry_out(batch.plan)

    def _settle_freed(self) -> None:
        """After many deletions: let what they freed be used, before the batch is fitted to the room there is."""
        if self._index.waiting_pages > _MOST_WAITING_PAGES or self._index.pending:
            with suppress(CatalogError):  # the batch's own commit meets and counts it
                self._commit_removals()
                for _ in range(2):
                    self._catalog.settle()
                    with self._lock:
                        self._index.note_commit(0, 0)

    def _write_slot(self, one: _Fresh) -> None:
        entry = one.entry
        if entry.slot is not None:
            rows = [row for row in one.job.rows if row.nbytes]
            self._slots.write_frame(entry.slot, one.spec, rows, self._secret, entry.slot_bytes)
            if self._sync == "always":
                self._slots.sync({entry.slot_bytes})

    def _publish(self, written: Sequence[_Fresh]) -> None:
        if not written:
            return
        if self._sync == "batch":
            self._slots.sync({one.entry.slot_bytes for one in written if one.entry.slot is not None})
        with self._lock:
            tick = self._index.tick
            recency = self._index.take_dirty(_RECENCY_A_COMMIT)
        additions = [self._addition(one, tick) for one in written]
        self._catalog.write(additions, (), recency, self._index.last_generation)
        with self._lock:
            self._index.note_commit(0, 0)
            for one in written:
                self._index.publish(one.entry)
                self._index.dirty.pop(one.entry.generation, None)

    def _addition(self, one: _Fresh, tick: int) -> Addition:
        job, entry, spec = one
        record = DiskRecord(
            job.key,
            job.size_bytes,
            entry.frame_bytes,
            entry.slot_bytes,
            entry.slot,
            entry.generation,
            tick,
            int(time.time()),
            job.parent,
        )
        value = None
        if entry.slot is None:
            header = build_joined_header(spec, job.rows, joined_checksum(job.rows), secret=self._secret)
            value = b"".join((header, *(row.data for row in job.rows)))
        return Addition(entry.digest, record.to_bytes(), entry.generation, value)

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

    def _put_failed(self, error: Exception) -> ResultCode:
        """Count it; when room was missing, pause puts and let the oldest go so that there is some afterwards."""
        full = isinstance(error, CatalogFullError) or (isinstance(error, OSError) and error.errno in _NO_ROOM)
        if isinstance(error, CatalogError):
            cause = error.cause
        elif isinstance(error, OSError):
            cause = "disk_full" if full else f"write_{errno.errorcode.get(error.errno or 0, 'OSError')}"
        else:
            cause = f"failed_{type(error).__name__}"
        self._count(cause)
        _LOG.warning("kvstore: disk tier %s: put failed: %s", self.directory, error)
        if cause == "map_full":
            self._relieve_map()
        else:
            self._paused_until = self._clock() + self._retry_seconds
        return ResultCode.FULL if full else ResultCode.FAILED

    def _relieve_map(self) -> None:
        with self._lock:
            self._index.evict_oldest(max(1, self._index.copy_count // 8))
        try:
            self._commit_removals()
            self._catalog.settle()
        except CatalogError as error:  # no page left even to delete with: a cache may begin anew
            self._count(f"relieve_{error.cause}")
            try:
                self.clear()
            except TierError:
                self._paused_until = self._clock() + self._retry_seconds

    # get -------------------------------------------------------------------------------------------------------------

    def _claim(self, jobs: Sequence[Job]) -> list[Any]:
        with self._lock:
            entries = [self._index.find(job.key) for job in jobs]
            for entry in entries:
                if entry is not None:
                    entry.reader_count += 1
                    self._index.touch(entry)
            return entries

    def _release(self, claims: Sequence[Any]) -> None:
        with self._lock:
            for entry in claims:
                if entry is not None:
                    self._index.end_read(entry)

    def _get_one(self, job: Job, claim: Any) -> ResultCode:
        entry: DiskEntry | None = claim
        if entry is None:
            return ResultCode.MISS
        self._check_process()
        if entry.size_bytes != job.size_bytes:
            self._count("size_mismatch")
            return ResultCode.CORRUPT
        try:
            fault = self._read(job, entry)
        except OSError as error:
            return self._drop(entry, f"read_{errno.errorcode.get(error.errno or 0, 'OSError')}")
        except CatalogError as error:
            self._count(error.cause)
            return ResultCode.FAILED
        if fault == "gone":
            return self._drop(entry, "value_gone") if entry.is_linked else ResultCode.MISS
        return ResultCode.OK if fault is None else self._drop(entry, f"corrupt_{fault}")

    def _read(self, job: Job, entry: DiskEntry) -> FrameFault | str | None:
        spec = self._specs(job.key, job.size_bytes)
        rows = [row for row in job.rows if row.nbytes]
        if entry.slot is not None:
            return self._slots.read_frame(entry.slot, spec, rows, self._secret, entry.slot_bytes)
        value = self._catalog.read_value(entry.generation, entry.frame_bytes)
        if value is None:
            return "gone"
        frame = parse_frame(value, spec, secret=self._secret)
        if isinstance(frame, FrameFault):
            return frame
        at = 0
        for row in rows:
            row.data[:] = frame.payload[at : at + row.nbytes]
            at += row.nbytes
        return None

    def _drop(self, entry: DiskEntry, cause: str) -> ResultCode:
        """A copy that cannot be served goes, this generation of it and no other."""
        self._count(cause)
        with self._lock:
            if entry.is_linked:
                self._index.unlink(entry)
        self._tidy()
        return ResultCode.CORRUPT

    # the index file --------------------------------------------------------------------------------------------------

    def _tidy(self) -> None:
        """Take what went out of the index file, unless somebody is writing: the next group does it then."""
        if self._directory_lock.is_ours and self._writing.acquire(blocking=False):
            try:
                self._commit_removals()
            except CatalogError as error:
                self._count(f"tidy_{error.cause}")
            finally:
                self._writing.release()

    def _commit_removals(self) -> None:
        while self._index.pending:
            with self._lock:
                some: list[Removal] = self._index.pending[: self._index.removals_a_commit]
            self._catalog.write(removals=some)
            with self._lock:
                del self._index.pending[: len(some)]
                self._index.note_commit(len(some), sum(removal.pieces for removal in some))

    def _check_process(self) -> None:
        if not self._directory_lock.is_ours:
            raise UsageError(f"disk tier {self.directory}: used in another process than it was opened in, or closed")
