"""Opening a disk directory: lock, index, recovery. What is there afterwards is whole, accounted for and within budget.

Found and put right: an index that cannot be read (or that a power cut may have torn, under sync "none") is begun anew;
records that are damaged, name a slot that is not there or holds another frame, or lack their value are dropped; values
and slots that no record names are given back; a budget smaller than before evicts. Called by DiskTier's constructor.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from allocator.errors import TierError
from kvstore.disk_tier.catalog import CatalogError, CatalogFullError, DiskCatalog, Removal
from kvstore.disk_tier.index import FIXED_BYTES, Batch, DiskEntry, DiskIndex
from kvstore.disk_tier.layout import (
    INDEX_NAME,
    PAGE_BYTES,
    DiskRecord,
    key_digest,
    parse_record,
    slot_file_bytes,
    value_charge_bytes,
    value_pieces,
)
from kvstore.disk_tier.lock import DirectoryLock, InspectionLock
from kvstore.disk_tier.slots import NO_ROOM, SlotFiles

_HASH_AT = 16  # in a frame's header
_RECORDS_A_COMMIT = 256
_BAD_CONTENT = (
    "not_lmdb", "empty", "damaged", "version",
    "index_CorruptedError", "index_PageNotFoundError", "index_VersionMismatchError", "index_IncompatibleError",
)  # fmt: skip
"""Causes that speak of the index itself. Any other, such as a process without descriptors, may be gone next time."""
_LOG = logging.getLogger(__name__)


def make_directory(directory: Path) -> None:
    """The directory, private to its user. TierError when it cannot be had."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise TierError(f"disk tier {directory}: cannot be made ({error.strerror})") from error


def open_catalog(
    directory: Path, lock: DirectoryLock, map_bytes: int, sync: str, capacity_bytes: int, counts: Counter[str]
) -> DiskCatalog:
    """The index, a fresh one where the old one cannot be trusted or would not fit the budget."""
    path = directory / INDEX_NAME
    (directory / f"{INDEX_NAME}.new").unlink(missing_ok=True)
    if not lock.survived_power_loss:
        note_dropped(directory, "power_loss", 'the machine has started anew, and sync is "none"', counts)
        _remove_index(directory)
    elif not path.exists() and _sizes(directory):
        note_dropped(directory, "missing", f"slot files without {INDEX_NAME}", counts)
    try:
        catalog = DiskCatalog(directory, map_bytes, sync)
    except CatalogError as error:
        if not path.exists() or error.cause not in _BAD_CONTENT:
            raise TierError(f"disk tier {directory}: the index cannot be opened ({error})") from error
        note_dropped(directory, error.cause, str(error), counts)
        catalog = new_catalog(directory, map_bytes, sync)
    return _compacted(catalog, directory, map_bytes, sync, capacity_bytes, counts)


def note_dropped(directory: Path, cause: str, why: str, counts: Counter[str]) -> None:
    """An index is begun anew where there was one: that is counted and said, since all that it named is lost."""
    counts[f"index_dropped_{cause}"] += 1
    _LOG.warning("kvstore: disk tier %s: the index is begun anew, empty: %s (%s)", directory, cause, why)


def new_catalog(directory: Path, map_bytes: int, sync: str) -> DiskCatalog:
    """An empty index in place of what is there."""
    _remove_index(directory)
    try:
        return DiskCatalog(directory, map_bytes, sync)
    except CatalogError as error:
        raise TierError(f"disk tier {directory}: the index cannot be made ({error})") from error


def _compacted(
    catalog: DiskCatalog, directory: Path, map_bytes: int, sync: str, capacity_bytes: int, counts: Counter[str]
) -> DiskCatalog:
    """Rewrite an index that takes half of the budget and is half free; drop one that is larger than the budget."""
    file_bytes, live_bytes = catalog.account.file_pages * PAGE_BYTES, catalog.account.live_pages * PAGE_BYTES
    if file_bytes <= capacity_bytes // 2:
        return catalog
    stored = sum(file.stat().st_blocks * 512 for file in directory.iterdir())
    if 2 * live_bytes <= file_bytes and stored + live_bytes <= capacity_bytes:
        with InspectionLock(directory, exclusive=True), suppress(CatalogError):
            catalog.compact()
            counts["index_compacted"] += 1
    if catalog.account.file_pages * PAGE_BYTES <= capacity_bytes - FIXED_BYTES:
        return catalog
    catalog.close()
    note_dropped(directory, "oversize", f"{file_bytes} bytes of a budget of {capacity_bytes}", counts)
    return new_catalog(directory, map_bytes, sync)


def _remove_index(directory: Path) -> None:
    with InspectionLock(directory, exclusive=True):
        for name in (INDEX_NAME, f"{INDEX_NAME}-lock"):
            (directory / name).unlink(missing_ok=True)


def recover(catalog: DiskCatalog, index: DiskIndex, slots: SlotFiles, directory: Path, counts: Counter[str]) -> None:
    """Fill `index` from the catalog, drop what is not whole, give back what nobody names. OSError, CatalogError."""
    recency, pieces = catalog.recency(), catalog.value_pieces()
    lengths = {size: slots.length_slots(size) for size in _sizes(directory)}
    good: list[tuple[int, DiskRecord]] = []
    bad: list[Removal] = []
    taken: dict[tuple[int, int], DiskRecord] = {}
    index.last_generation = catalog.last_generation()
    for digest, row in catalog.records():
        record = parse_record(digest, row)
        cause = "record" if record is None else _fault(record, pieces, lengths, taken)
        if record is None or cause is not None:
            counts[f"recovered_{cause}"] += 1
            generation = int.from_bytes(row[40:48], "little")
            bad.append(Removal(digest, generation, 0))
            continue
        if record.slot is None:
            pieces.pop(record.generation)
        else:
            taken[record.slot_bytes, record.slot] = record
        index.last_generation = max(index.last_generation, record.generation)
        good.append((recency.pop(record.generation, record.tick), record))
    used: dict[int, set[int]] = {}
    for size, slot in taken:
        used.setdefault(size, set()).add(slot)
    counts["opened_freed_slot_bytes"] += slots.adopt(used)
    for tick, record in sorted(good, key=lambda pair: (pair[0], pair[1].generation)):
        if record.slot is not None and not slots.starts_with(record.slot, record.slot_bytes, record.key.hash, _HASH_AT):
            counts["recovered_slot_content"] += 1
            bad.append(Removal(key_digest(record.key), record.generation, 0))
            slots.give_back(record.slot_bytes, record.slot)
            continue
        entry = DiskEntry(
            record.key,
            record.parent,
            record.payload_bytes,
            record.slot_bytes,
            record.slot,
            record.frame_bytes,
            key_digest(record.key),
        )
        index._tick = max(index._tick, tick)
        index.restore(entry, record.generation)
    counts["recovered_orphan_values"] += len(pieces)
    bad += [Removal(b"", generation, count) for generation, (_, count) in pieces.items()]
    bad += [Removal(b"", generation, 0) for generation in recency]
    index.pending += bad
    batch = Batch()
    index.shrink(batch)
    try:
        while index.pending:
            catalog.write(removals=index.pending[:_RECORDS_A_COMMIT])
            del index.pending[:_RECORDS_A_COMMIT]
    except CatalogFullError:  # nothing of it can be found; the first put takes out the rest before it writes a slot
        counts["recovery_put_off"] += 1
    try:
        slots.carry_out(batch.plan)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        slots.undo(batch.plan)  # a full file system cannot even note a hole: the slots stay allocated, and free
        counts["recovery_put_off"] += 1


def _sizes(directory: Path) -> list[int]:
    return [size for name in os.listdir(directory) if (size := slot_file_bytes(name)) is not None]


def _fault(
    record: DiskRecord,
    pieces: dict[int, tuple[int, int]],
    lengths: dict[int, int],
    taken: dict[tuple[int, int], DiskRecord],
) -> str | None:
    """Why a record cannot be served; None for a good one."""
    if record.slot is None:
        whole = pieces.get(record.generation) == (value_pieces(record.frame_bytes),) * 2
        return None if whole and record.slot_bytes == value_charge_bytes(record.frame_bytes) else "value"
    if record.slot >= lengths.get(record.slot_bytes, 0):
        return "slot_range"
    if (record.slot_bytes, record.slot) in taken:
        return "slot_twice"
    return None
