"""A disk directory read without changing it, also while another process writes to it. For inspection.

While it is open the writer cannot use freed pages of the index again (it counts and, short of room, refuses puts), so
open it briefly. Any thread, one at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from allocator.errors import TierError
from kvstore.disk_catalog import CatalogError, DiskCatalog
from kvstore.disk_layout import INDEX_NAME, DiskRecord, parse_record, slot_file_name
from kvstore.disk_lock import InspectionLock
from kvstore.disk_slots import SlotFiles
from kvstore.frame import FrameFault, parse_frame
from kvstore.frame_specs import SpecSource


class DiskReader:
    """TierError when there is no disk directory here, or it cannot be read."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        if not (self.directory / INDEX_NAME).is_file():
            raise TierError(f"disk tier {directory}: no {INDEX_NAME} here; expected a directory of a disk tier")
        self._inspection = InspectionLock(self.directory, exclusive=False)
        self._slots = SlotFiles(self.directory, readonly=True)
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
        self._slots.close()
        self._inspection.release()

    def records(self) -> Iterator[DiskRecord | None]:
        """Every copy that the index names, as of one moment; None for a damaged record."""
        for digest, row in self._catalog.records():
            yield parse_record(digest, row)

    def last_uses(self) -> dict[int, int]:
        """generation -> tick of the last use; a larger tick is a later use."""
        return self._catalog.recency()

    def verify(self, record: DiskRecord, specs: SpecSource, secret: bytes | None = None) -> FrameFault | str | None:
        """Read the copy as a get would. None: it is whole. It may have gone meanwhile: "gone"."""
        spec = specs(record.key, record.payload_bytes)
        if record.slot is None:
            value = self._catalog.read_value(record.generation, record.frame_bytes)
            if value is None:
                return "gone"
            frame = parse_frame(value, spec, secret=secret)
            return frame if isinstance(frame, FrameFault) else None
        if not os.path.exists(self.directory / slot_file_name(record.slot_bytes)):
            return "gone"
        room = np.empty(record.payload_bytes, np.uint8)
        self._slots.open_readonly(record.slot_bytes)
        return self._slots.read_frame(record.slot, spec, [room], secret, record.slot_bytes)
