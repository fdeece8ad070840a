"""Inspection of a disk directory: what is in it, whether it is whole, and, asked for, deletion.

Looking opens the directory for short moments only, so that a store that has it can go on. Deletion opens it as a store
does: refused while one has it. One thread.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from allocator.errors import TierError
from kvstore.copy_key import CopyKey
from kvstore.disk_tier.layout import LOCK_NAME, key_digest
from kvstore.disk_tier.reader import GONE, DiskReader
from kvstore.inspection import Advance, Findings, Selection, family_name

_TURN_SECONDS = 0.2
_PAUSE_SECONDS = 0.005
_GIB = 1 << 30
_CAUSES_AT_OPEN = ("record", "value", "slot_range", "slot_twice", "slot_content")


def inspect_directory(
    directory: Path, *, verify: bool, secret: bytes | None, selection: Selection, advance: Advance
) -> Findings:
    """TierError when there is no disk directory here, or it cannot be read."""
    findings = Findings(str(directory), "disk", verify)
    holder = holder_of(directory)
    if holder is not None:
        findings.add_note(f"in use by process {holder}")
    digests = _list(directory, selection, findings)
    findings.file_bytes = _stored_bytes(directory)
    if verify:
        _verify(directory, digests, secret, findings, advance)
    return findings


def delete_from_directory(
    directory: Path, *, corrupt_only: bool, secret: bytes | None, selection: Selection, advance: Advance
) -> Findings:
    """Delete what is selected, or what of it is corrupt. TierError when a store has the directory."""
    from kvstore.disk_tier.tier import DiskTier

    def opened() -> DiskTier:
        return DiskTier(directory, max(_GIB, 2 * _stored_bytes(directory)), sync="batch")

    if not any(directory.glob("index.lmdb*")):
        raise TierError(f"disk tier {directory}: no index here; expected a directory of a disk tier")
    if (holder := holder_of(directory)) is not None:
        raise TierError(f"disk tier {directory}: in use by process {holder}; close it first, then delete")
    findings = Findings(str(directory), "disk", corrupt_only)
    keys: list[CopyKey] = []
    try:
        found = _list(directory, selection, findings)
        if corrupt_only:
            keys = _verify(directory, found, secret, findings, advance)
        else:
            with DiskReader(directory) as reader:
                keys = [record.key for digest in found if (record := reader.record(digest)) is not None]
    except TierError as error:  # opening it begins a damaged index anew
        findings.add_note(str(error))
    tier = opened()
    counts = {cause: count for cause, count in sorted(tier.counters().items()) if count}
    findings.notes += [f"at open: {cause} {count}" for cause, count in counts.items()]
    at_open = sum(count for cause, count in counts.items() if cause.removeprefix("recovered_") in _CAUSES_AT_OPEN)
    findings.deleted_count = at_open + tier.delete(keys)
    tier.close()
    opened().close()  # gives the room of free slots back
    findings.repaired = True
    return findings


def holder_of(directory: Path) -> int | None:
    """The process that has the directory open, as its lock file says; it is not touched."""
    try:
        row = json.loads((directory / LOCK_NAME).read_bytes()[:4096].rstrip(b" \n\x00"))
        process = int(row["pid"]) if row["state"] == "open" else 0
        os.kill(process, 0) if process > 0 else None
    except PermissionError:
        return process
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return process if process > 0 else None


def _stored_bytes(directory: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in directory.iterdir() if file.is_file())


def _list(directory: Path, selection: Selection, findings: Findings) -> list[bytes]:
    """Count what the index names; the digests of what is selected. About 100 bytes a copy are held."""
    digests: list[bytes] = []
    now = time.time()
    with DiskReader(directory) as reader:
        uses = reader.last_uses()
        findings.used_again_count = 0
        for record in reader.records():
            if record is None:
                findings.judge(None, "a record of the index", "record")
                continue
            name = family_name(record.key, _parameters(record.key))
            if not selection.matches(name, {}):
                continue
            family = findings.add(name, record.slot_bytes)
            family.age_seconds.add(max(0.0, now - record.written_at))
            findings.used_again_count += uses.get(record.generation, 0) > record.tick
            digests.append(key_digest(record.key))
    return digests


def _verify(
    directory: Path, digests: list[bytes], secret: bytes | None, findings: Findings, advance: Advance
) -> list[CopyKey]:
    """Read every byte; the keys of what is corrupt."""
    bad: list[CopyKey] = []
    done = 0
    for reader, digest in _in_turns(directory, digests):
        done += 1
        advance(done, len(digests))
        record = reader.record(digest)
        if record is None:
            findings.gone_count += 1
            continue
        cause, statement = reader.examine(record, None, secret)
        if cause == GONE:
            findings.gone_count += 1
            continue
        family = findings.family(family_name(record.key, _parameters(record.key)))
        findings.note_shape(family, statement)
        if findings.judge(family, str(record.key), cause):
            bad.append(record.key)
    return bad


def _in_turns(directory: Path, digests: list[bytes]) -> Iterator[tuple[DiskReader, bytes]]:
    """Each digest with a reader, which is never open for long."""
    at = 0
    while at < len(digests):
        with DiskReader(directory) as reader:
            deadline = time.monotonic() + _TURN_SECONDS
            while at < len(digests) and time.monotonic() < deadline:
                at += 1
                yield reader, digests[at - 1]
        time.sleep(_PAUSE_SECONDS)


def _parameters(key: CopyKey) -> str:
    return hashlib.sha256(key.parameters).hexdigest()[:16] if key.parameters else "0"
