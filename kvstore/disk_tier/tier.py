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
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from allocator.errors import ConfigError, TierError, UsageError
from kvstore.compression import Packer, read_staged
from kvstore.copy_key import CopyKey
from kvstore.disk_tier.catalog import CatalogError, CatalogFullError
from kvstore.disk_tier.index import LEAST_BYTES, DiskEntry, DiskIndex
from kvstore.disk_tier.lock import DirectoryLock
from kvstore.disk_tier.map_room import map_bytes_for, why_not_mapped
from kvstore.disk_tier.opening import make_directory, new_catalog, note_dropped, open_catalog, recover
from kvstore.disk_tier.slots import SlotFiles
from kvstore.disk_tier.writer import DiskSettings, DiskWriter
from kvstore.executor import Executor
from kvstore.frame.build import stretches
from kvstore.frame.heads import FrameHead, FrameHeads
from kvstore.frame.parsing import FrameFault, parse_header
from kvstore.frame.specs import SpecSource, plain_specs
from kvstore.indexed_tier import IndexedTier
from kvstore.tier import Job, ResultCode, Transfer

SYNC_POLICIES = ("none", "batch", "always")
_GROUP_COPIES = 16


class DiskTier(IndexedTier[DiskEntry]):
    """The disk tier. TierError when the directory cannot be opened, or is open for writing elsewhere.

    directory       made if absent; one writer at a time
    capacity_bytes  budget of everything in the directory, at least 1 MiB
    executor        where files are read and written; None: inline
    sync            none: survives the process; batch: and a power cut, up to the last transfer; always: every OK
    specs           what frames say of a copy's shape, see frame.specs
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
        problem = None if map_bytes else why_not_mapped(capacity_bytes)
        if problem is not None:
            raise ConfigError(problem)
        super().__init__("disk", executor)
        self.directory = Path(directory)
        self._sync, self._specs, self._secret = sync, specs, secret
        self.delivers_layers = secret is None  # nothing signed is good before its end
        self._heads = FrameHeads(specs)
        self._lock = threading.Lock()
        self._writing = threading.RLock()
        make_directory(self.directory)
        self._directory_lock = DirectoryLock(self.directory, sync)
        self._slots = SlotFiles(self.directory)
        counts: Counter[str] = Counter()
        try:
            self._open_directory(capacity_bytes, map_bytes or map_bytes_for(capacity_bytes), counts)
            settings = DiskSettings(self.directory, sync, specs, self._heads, secret, retry_seconds)
            self._writer = DiskWriter(
                settings, self._catalog, self._index, self._slots, self._directory_lock, self._lock, self._count
            )
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
        for last in (False, True):
            self._index: DiskIndex = DiskIndex(capacity_bytes, self._slots, self._catalog.account)
            try:
                recover(self._catalog, self._index, self._slots, self.directory, counts)
                break
            except CatalogError as error:
                self._catalog.close()
                if last or isinstance(error, CatalogFullError):
                    raise TierError(f"disk tier {self.directory}: cannot be recovered ({error})") from error
                note_dropped(self.directory, error.cause, str(error), counts)  # damaged pages: a cache may begin anew
                self._slots.close()
                self._slots = SlotFiles(self.directory)
                self._catalog = new_catalog(self.directory, map_bytes, self._sync)
        self._epoch = self._catalog.epoch()
        counts["stale_readers"] += self._catalog.stale_readers

    def _abandon_open(self) -> None:
        self._slots.close()
        self._directory_lock.release()
        self._executor.close()

    def pack(self, level: int) -> None:
        """Pack copies by zstd at this level from now on, where that makes them smaller. Before the first put."""
        self._writer.packer = Packer(level, self._secret)

    # the contract ----------------------------------------------------------------------------------------------------

    def delete(self, keys: Sequence[CopyKey]) -> int:
        count = super().delete(keys)
        self._tidy()
        return count

    def delete_root(self, root: bytes) -> int:
        """Drop every copy of one root that is not pinned; how many."""
        with self._lock:
            families = [family for name, family in self._index.families.items() if name[0] == root]
            keys = [entry.key for family in families for entry in family.values()]
        return self.delete(keys)

    def clear(self) -> None:
        super().clear()
        with self._writing:
            self._check_process()
            try:
                self._writer.clear()
            except CatalogError as error:
                raise TierError(f"disk tier {self.directory}: could not be emptied ({error})") from error

    def read_epoch(self) -> int:
        return self._epoch

    def raise_epoch(self, least: int) -> int:
        with self._writing:
            self._check_process()
            epoch = max(self._epoch + 1, least)
            try:
                self._catalog.write(epoch=epoch)
            except CatalogError as error:
                raise TierError(f"disk tier {self.directory}: the epoch could not be kept ({error})") from error
            self._epoch = epoch
            return epoch

    def seen_epoch(self) -> int | None:
        return self._epoch

    def follow_epoch(self, epoch: int) -> None:
        def follow() -> None:
            try:
                if self._epoch < epoch:
                    self.raise_epoch(epoch)
                self.clear()
            except TierError:
                self._count("epoch_not_followed")

        self._executor.submit(follow)

    @property
    def capacity_bytes(self) -> int:
        return self._index.capacity_bytes

    @property
    def file_bytes(self) -> int:
        """What the directory's files take, by the file system's account."""
        return sum(file.stat().st_blocks * 512 for file in self.directory.iterdir())

    def close(self) -> None:
        super().close()
        with self._writing:
            if self._directory_lock.is_ours:
                try:
                    self._writer.finish()
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
                results += self._writer.put_group(transfer, group)
        return results

    def _put_one(self, job: Job) -> ResultCode:
        raise NotImplementedError("puts go by group")

    # get -------------------------------------------------------------------------------------------------------------

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
        if entry.frame_bytes < entry.size_bytes:
            return self._read_packed(job, entry)
        rows = job.rows
        form = self._form(job, entry)
        head = form.of(job.key.hash)
        if entry.slot is not None:
            found = self._slots.read_rows(entry.slot, entry.slot_bytes, head, form.sums, rows)
        else:
            value = self._catalog.read_value(entry.generation, entry.frame_bytes)
            if value is None:
                return "gone"
            head, found = form.unpacked(job.key.hash, value, rows)
        if found is None and self._secret is None:
            return None
        return form.fault(found, head, self._specs(job.key, job.size_bytes), rows, self._secret)

    def _layers_of(self, job: Job, claim: Any) -> Generator[int, None, ResultCode]:
        entry: DiskEntry | None = claim
        if entry is None or entry.slot is None or entry.size_bytes != job.size_bytes:
            return self._get_one(job, claim)
        if self._secret is not None or entry.frame_bytes < entry.size_bytes:  # good as a whole only: signed, or packed
            return self._get_one(job, claim)
        self._check_process()
        try:
            fault = yield from self._read_layers(job, entry, entry.slot)
        except OSError as error:
            return self._drop(entry, f"read_{errno.errorcode.get(error.errno or 0, 'OSError')}")
        return ResultCode.OK if fault is None else self._drop(entry, f"corrupt_{fault}")

    def _read_layers(self, job: Job, entry: DiskEntry, slot: int) -> Generator[int, None, FrameFault | None]:
        spec, head_bytes = self._specs(job.key, job.size_bytes), entry.frame_bytes - entry.size_bytes
        head = self._slots.read_whole(slot, head_bytes, entry.slot_bytes)
        if head is None:
            return FrameFault.LENGTH
        header = parse_header(head, spec, frame_bytes=entry.frame_bytes, keyed=False)
        if isinstance(header, FrameFault):
            return header
        for segment, rows in zip(
            header.segments, stretches(job.rows, [one.byte_count for one in header.segments]), strict=True
        ):
            found = self._slots.read_part(slot, entry.slot_bytes, head_bytes + segment.offset, rows)
            if found is None:
                return FrameFault.LENGTH
            if found != segment.checksum:
                return FrameFault.PAYLOAD_CHECKSUM
            yield segment.layers[1]
        return None

    def _form(self, job: Job, entry: DiskEntry) -> FrameHead:
        """As it was written: signed frames and those of before layer groups have one segment."""
        is_signed = self._secret is not None
        form = self._heads.head(job.key, entry.family, job.size_bytes, is_whole=is_signed)
        if entry.frame_bytes != form.frame_bytes:
            form = self._heads.head(job.key, entry.family, job.size_bytes, is_whole=not is_signed)
        return form

    def _read_packed(self, job: Job, entry: DiskEntry) -> FrameFault | str | None:
        frame: bytes | bytearray | None
        if entry.slot is not None:
            frame = self._slots.read_whole(entry.slot, entry.frame_bytes, entry.slot_bytes)
        else:
            frame = self._catalog.read_value(entry.generation, entry.frame_bytes)
            if frame is None:
                return "gone"
        spec = self._specs(job.key, job.size_bytes)
        return FrameFault.LENGTH if frame is None else read_staged(frame, spec, job.rows, self._secret)

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
                self._writer.commit_removals()
            except CatalogError as error:
                self._count(f"tidy_{error.cause}")
            finally:
                self._writing.release()

    def _check_process(self) -> None:
        if not self._directory_lock.is_ours:
            raise UsageError(f"disk tier {self.directory}: used in another process than it was opened in, or closed")
