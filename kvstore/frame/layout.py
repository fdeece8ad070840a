"""The bytes of a frame's header: fields, sizes, order. Specified in docs/formats/frame.md; used by reader and writer.

Constants and pure functions; any thread.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey
from kvstore.tier import ByteRow

MAGIC = b"KVFRAME\x00"
VERSION = 1
ALIGN_BYTES = 64
SECRET_BYTES = (16, 64)  # shortest and longest

EXACT_FLAG, KEYED_FLAG = 1, 2
FIXED = struct.Struct("<8sHHI32s16s16s16sHHIHHHHIIQQIHH")
SEGMENT = struct.Struct("<QQHHI16s")
HASH_AT, SEGMENT_SUM_AT = 16, 24  # in the fixed fields, in a segment
MAC_BYTES, CHECK_BYTES = 32, 16
MOST_SEGMENTS = 4096
_LEAST_SEGMENT_BYTES = 1 << 20  # worth an I/O and a round of a transfer; our own writers make none shorter
_SEGMENTS_MOST = 8
_UNIFORM_PARAMETERS_BYTES = 3  # of a codec that gives every layer the same bits; a table is longer
NAME_BYTES = 16
ROOT_BYTES = 16
_PERSON = b"kvstore frame"


@dataclass(frozen=True, slots=True)
class FrameSpec:
    """What a frame holds: the copy's key, and the shape and size that its key implies.

    block_tokens, key_dim, value_dim (0: latent), dtype (of the decoded KV), payload_bytes (as the codec gives them).
    """

    key: CopyKey
    block_tokens: int
    key_dim: int
    value_dim: int
    dtype: str
    payload_bytes: int

    def __post_init__(self) -> None:
        limits = (("block_tokens", 1, 32), ("key_dim", 1, 32), ("value_dim", 0, 32), ("payload_bytes", 1, 63))
        for name, least, bits in limits:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << bits:
                raise UsageError(f"frame {name}: got {value!r}; expected an int in [{least}, 2**{bits})")
        if not (self.dtype.isascii() and self.dtype.isprintable() and 0 < len(self.dtype) <= NAME_BYTES):
            raise UsageError(f"frame dtype: got {self.dtype!r}; expected 1 to 16 printable ASCII characters")

    def header_bytes(self, segment_count: int) -> int:
        return header_layout(len(self.key.parameters), segment_count)[2]

    def frame_bytes(self, segment_count: int) -> int:
        return self.header_bytes(segment_count) + self.payload_bytes


@dataclass(frozen=True, slots=True)
class Cut:
    """A payload by layer groups, as our writers cut it: (first layer, end) and bytes of each."""

    layers: tuple[tuple[int, int], ...]
    sizes: tuple[int, ...]


def cut_of(key: CopyKey, payload_bytes: int) -> Cut:
    """How the payload of a copy is cut when it is written, unless it is signed: nothing signed is good before its end.

    What is small stays whole, and what may have layers of different sizes (a codec's table of bits).
    """
    first, last = key.layers
    count = min(_SEGMENTS_MOST, last - first, payload_bytes // _LEAST_SEGMENT_BYTES)
    layer_bytes, rest = divmod(payload_bytes, last - first)
    if count < 2 or rest or len(key.parameters) > _UNIFORM_PARAMETERS_BYTES:
        return Cut(((first, last),), (payload_bytes,))
    ends = [(last - first) * place // count for place in range(count + 1)]
    layers = tuple((first + start, first + stop) for start, stop in pairwise(ends))
    return Cut(layers, tuple((stop - start) * layer_bytes for start, stop in layers))


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the payload: layers [start, stop) of the copy, whole; offset counts from the payload's start."""

    offset: int
    byte_count: int
    layers: tuple[int, int]
    checksum: bytes


def header_layout(parameters_bytes: int, segment_count: int) -> tuple[int, int, int]:
    """Where the table begins and ends, and the header's length."""
    table_at = FIXED.size + -(-parameters_bytes // 8) * 8
    table_end = table_at + segment_count * SEGMENT.size
    whole = table_end + MAC_BYTES + CHECK_BYTES
    return table_at, table_end, -(-whole // ALIGN_BYTES) * ALIGN_BYTES


def padded_name(text: str) -> bytes:
    return text.encode("ascii").ljust(NAME_BYTES, b"\x00")


def keyed_hash(secret: bytes, start: bytes, pieces: Iterable[ByteRow]) -> bytes:
    if not isinstance(secret, bytes) or not SECRET_BYTES[0] <= len(secret) <= SECRET_BYTES[1]:
        raise UsageError(f"frame secret: got {len(secret)} bytes; expected {SECRET_BYTES[0]} to {SECRET_BYTES[1]}")
    state = hashlib.blake2b(start, key=secret, digest_size=MAC_BYTES, person=_PERSON)
    for piece in pieces:
        state.update(piece.data)
    return state.digest()
