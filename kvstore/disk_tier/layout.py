"""The bytes and names of a disk directory: record, size classes, files. Specified in docs/formats/disk.md.

Constants and pure functions; any thread.
"""

from __future__ import annotations

import hashlib
import re
import struct
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey

FORMAT_VERSION = 1
INDEX_NAME = "index.lmdb"
LOCK_NAME = "lock"
READERS_NAME = "readers"
BALLAST_NAME = "ballast"
BALLAST_BYTES = 128 << 10
"""A file that goes when the file system is full, so that the index can still be written to take copies out."""
_SLOT_NAME = re.compile(r"slots-([1-9][0-9]{0,15})")

PAGE_BYTES = 4096
INLINE_MOST_BYTES = 64 << 10
"""Payloads up to here lie in the index, larger ones in a slot file."""
VALUE_BYTES = PAGE_BYTES - 16
"""An index value of this length fills one page exactly: any free page will do, so no room is lost to gaps."""

_RECORD = struct.Struct("<HHIQQQQQQ32sI")
_WRITTEN_AT = struct.Struct("<Q")
_CHECK_BYTES = 8
_INLINE, _SLOT = 0, 1
_KEY = struct.Struct("<8s32s32sH16sBHHHHI")
_KEY_MAGIC = b"kvcopy1\x00"
_REST_STEP = 256
_CLASS_STEP_BITS = 6  # 64 size classes for every doubling: under 1.6 % is lost to rounding


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """What the index says of one copy. slot: number in the file of slot_bytes; None: the frame lies in the index.

    generation  unlike any other copy's of this directory, ever: a late clean-up names the copy that it means
    tick        recency when it was stored; a later use is in the table `recency`
    written_at  wall clock, seconds; for people only
    """

    key: CopyKey
    payload_bytes: int
    frame_bytes: int
    slot_bytes: int
    slot: int | None
    generation: int
    tick: int
    written_at: int
    parent: bytes | None

    def to_bytes(self) -> bytes:
        return record_bytes(
            self.key.to_bytes(),
            self.parent,
            (self.payload_bytes, self.frame_bytes, self.slot_bytes, self.slot),
            self.generation,
            self.tick,
            self.written_at,
        )


def record_bytes(
    key: bytes,
    parent: bytes | None,
    place: tuple[int, int, int, int | None],
    generation: int,
    tick: int,
    written_at: int,
) -> bytes:
    """DiskRecord.to_bytes without the object. key: CopyKey.to_bytes; place: payload, frame and slot bytes, slot."""
    payload_bytes, frame_bytes, slot_bytes, slot = place
    start = _RECORD.pack(
        FORMAT_VERSION,
        _INLINE if slot is None else _SLOT,
        0 if parent is None else 1,
        payload_bytes,
        frame_bytes,
        slot_bytes,
        slot or 0,
        generation,
        tick,
        parent or bytes(32),
        len(key),
    )
    body = start + _WRITTEN_AT.pack(written_at) + key
    return body + xxhash.xxh3_64_digest(body)


def parse_record(digest: bytes, row: bytes) -> DiskRecord | None:
    """A record as the index holds it under `digest`; None for anything that is not one, whatever the bytes."""
    if len(row) < _RECORD.size + 8 + _CHECK_BYTES or xxhash.xxh3_64_digest(row[:-_CHECK_BYTES]) != row[-_CHECK_BYTES:]:
        return None
    version, place, has_parent, payload, frame, slot_bytes, slot, generation, tick, parent, key_bytes = (
        _RECORD.unpack_from(row)
    )
    if version != FORMAT_VERSION or place not in (_INLINE, _SLOT) or has_parent not in (0, 1):
        return None
    key_at = _RECORD.size + 8
    if len(row) != key_at + key_bytes + _CHECK_BYTES:
        return None
    key = parse_key(row[key_at:-_CHECK_BYTES])
    if key is None or key_digest(key) != digest or not (payload and 0 < frame <= slot_bytes):
        return None
    if place == _SLOT and slot_bytes != class_bytes(slot_bytes):
        return None
    (written_at,) = _WRITTEN_AT.unpack_from(row, _RECORD.size)
    return DiskRecord(
        key,
        payload,
        frame,
        slot_bytes,
        slot if place == _SLOT else None,
        generation,
        tick,
        written_at,
        parent if has_parent else None,
    )


def key_digest(key: CopyKey) -> bytes:
    """The name of a copy in the index, see digest_of."""
    return digest_of(key.to_bytes())


def digest_of(key: bytes) -> bytes:
    """The name of a copy in the index: BLAKE2b, 32 bytes, of its key's canonical bytes."""
    return hashlib.blake2b(key, digest_size=32).digest()


def parse_key(row: bytes) -> CopyKey | None:
    """CopyKey.to_bytes read back; None for anything else."""
    if len(row) < _KEY.size:
        return None
    magic, root, hash, group, codec, exact, *ends, length = _KEY.unpack_from(row)
    if magic != _KEY_MAGIC or exact > 1 or len(row) != _KEY.size + length:
        return None
    try:
        name = codec.rstrip(b"\x00").decode("ascii")
        return CopyKey(root, group, hash, name, bool(exact), (ends[0], ends[1]), (ends[2], ends[3]), row[_KEY.size :])
    except (UsageError, UnicodeDecodeError):
        return None


@lru_cache(maxsize=1024)
def class_bytes(frame_bytes: int) -> int:
    """The slot size for a frame: a multiple of a page, in steps of at most a 64th."""
    step = max(PAGE_BYTES, 1 << max(0, frame_bytes.bit_length() - 1) >> _CLASS_STEP_BITS)
    return -(-frame_bytes // step) * step


def value_pieces(frame_bytes: int) -> int:
    """Pieces that a frame in the index is cut into, and the most pages it takes."""
    return -(-frame_bytes // VALUE_BYTES)


def value_charge_bytes(frame_bytes: int) -> int:
    """What a frame in the index is charged: a page a whole piece; a short last piece shares one with others."""
    whole, rest = divmod(frame_bytes, VALUE_BYTES)
    return whole * PAGE_BYTES + (PAGE_BYTES if rest > PAGE_BYTES // 4 else -(-rest // _REST_STEP) * _REST_STEP)


def slot_file_name(slot_bytes: int) -> str:
    return f"slots-{slot_bytes}"


def slot_file_bytes(name: str) -> int | None:
    """The slot size that a file's name says; None for files that are not ours."""
    match = _SLOT_NAME.fullmatch(name)
    size = int(match[1]) if match else 0
    return size if size and size == class_bytes(size) else None
