"""A disk directory read without changing it, also while another process writes to it. For inspection.

While it is open the writer cannot use freed pages of the index again (it counts and, short of room, refuses puts), so
open it briefly. Any thread, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from allocator.errors import TierError
from kvstore.disk_tier.catalog import CatalogError, DiskCatalog
from kvstore.disk_tier.layout import INDEX_NAME, INLINE_MOST_BYTES, DiskRecord, key_digest, parse_record, slot_file_name
from kvstore.disk_tier.lock import InspectionLock
from kvstore.frame.inspection import ReadPiece, Statement, check_frame, read_statement, stated_spec
from kvstore.frame.parsing import FrameFault
from kvstore.frame.specs import SpecSource

GONE = "gone"


class Examined(NamedTuple):
    """cause: why a get would miss (GONE: it went meanwhile), None for a whole copy. statement: what its frame says."""

    cause: FrameFault | str | None
    statement: Statement | None


class DiskReader:
    """TierError when there is no disk directory here, or it cannot be read."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / INDEX_NAME).is_file():
            raise TierError(f"disk tier {directory}: no {INDEX_NAME} here; expected a directory of a disk tier")
        self._inspection = InspectionLock(self.directory, exclusive=False)
        try:
            self._catalog = DiskCatalog(self.directory, 0, "none", readonly=True)
        except CatalogError as error:
            self._inspection.release()
            raise TierError(f"disk tier {directory}: the index cannot be read ({error})") from error

    def __enter__(self) -> DiskReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._catalog.close()
        self._inspection.release()

    def records(self) -> Iterator[DiskRecord | None]:
        """Every copy that the index names, as of one moment; None for a damaged record. TierError: damaged index."""
        with self._translated():
            for digest, row in self._catalog.records():
                yield parse_record(digest, row)

    def record(self, digest: bytes) -> DiskRecord | None:
        """What the index says now of one copy (see layout.key_digest)."""
        with self._translated():
            row = self._catalog.record(digest)
            return None if row is None else parse_record(digest, row)

    def last_uses(self) -> dict[int, int]:
        """generation -> tick of the last use; a larger tick is a later use."""
        with self._translated():
            return self._catalog.recency()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except CatalogError as error:
            raise TierError(f"disk tier {self.directory}: the index is damaged ({error})") from error

    def verify(
        self, record: DiskRecord, specs: SpecSource | None = None, secret: bytes | None = None
    ) -> FrameFault | str | None:
        """Read the copy as a get would. None: it is whole. It may have gone meanwhile: "gone"."""
        return self.examine(record, specs, secret).cause

    def examine(self, record: DiskRecord, specs: SpecSource | None = None, secret: bytes | None = None) -> Examined:
        """As verify. specs: what frames must say of a copy's shape; None: whatever they say of themselves."""
        if record.frame_bytes > record.payload_bytes + (1 << 20):
            return Examined(FrameFault.LENGTH, None)
        try:
            if record.slot is not None:
                found = self._examine_slot(record, record.slot, specs, secret)
            else:
                found = self._examine_value(record, specs, secret)
            if found.cause is None:
                return found
            now = self.record(key_digest(record.key))  # a writer may have given its place to another copy
        except CatalogError as error:
            return Examined(error.cause, None)
        except OSError as error:
            return Examined(f"read_{error.strerror}", None)
        return found if now is not None and now.generation == record.generation else Examined(GONE, None)

    def _examine_value(self, record: DiskRecord, specs: SpecSource | None, secret: bytes | None) -> Examined:
        if record.payload_bytes > INLINE_MOST_BYTES:
            return Examined(FrameFault.LENGTH, None)
        value = self._catalog.read_value(record.generation, record.frame_bytes)
        if value is None:
            return Examined("value_missing", None)
        return _examine(lambda offset, length: bytes(value[offset : offset + length]), record, specs, secret)

    def _examine_slot(self, record: DiskRecord, slot: int, specs: SpecSource | None, secret: bytes | None) -> Examined:
        """Opened for this one copy: a writer may remove a slot file and make another of its name."""
        try:
            fd = os.open(self.directory / slot_file_name(record.slot_bytes), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return Examined("slot_missing", None)
        try:
            base = slot * record.slot_bytes
            if base + record.frame_bytes > os.fstat(fd).st_size:
                return Examined(FrameFault.LENGTH, None)
            return _examine(partial(_pread, fd, base), record, specs, secret)
        finally:
            os.close(fd)


def _pread(fd: int, base: int, offset: int, length: int) -> bytes:
    return os.pread(fd, length, base + offset)


def _examine(read: ReadPiece, record: DiskRecord, specs: SpecSource | None, secret: bytes | None) -> Examined:
    statement = read_statement(read, record.frame_bytes)
    if isinstance(statement, FrameFault):
        return Examined(statement, None)
    if statement.payload_bytes != record.payload_bytes:
        return Examined(FrameFault.SIZE, statement)
    if specs is not None:
        spec = specs(record.key, record.payload_bytes)
    else:
        found = stated_spec(statement, record.key)
        if isinstance(found, FrameFault):
            return Examined(found, statement)
        spec = found
    return Examined(check_frame(read, record.frame_bytes, spec, statement, secret), statement)
