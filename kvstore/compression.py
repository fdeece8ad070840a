"""The second stage of a frame: its payload packed by zstd. Off unless a tier is given a level; specified in frame.md.

A writer packs a copy where that makes it smaller (Packer, one per tier, on the executor's thread) and hands on a whole
frame. Readers bring every frame here that is shorter than the payload they want, whatever their own setting: checksum
and keyed hash first, then unpacking, into the caller's rows and never past them. Pure functions but for Packer; any
thread.

16-bit values are packed with their low bytes first and their high bytes (sign and exponent) after them: those of one
kind lie together then.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.frame import FrameFault, Segment, check_keyed, parse_header
from kvstore.frame_build import build_joined_header
from kvstore.frame_layout import CHECK_BYTES, MAC_BYTES, FrameSpec, keyed_hash
from kvstore.tier import Buffer, ByteRow, as_byte_row
from quant.native.checksum import checksum

if TYPE_CHECKING:
    import zstandard

ZSTD, ZSTD_SPLIT = 1, 2
"""Values of the header's field `stage`."""
_STAGE_AT, _PAYLOAD_AT, _RAW_AT = 98, 120, 128  # see frame_layout.FIXED
_WORTH = 0.97  # of the payload: a packed frame that is longer is not worth its unpacking
_SPLIT_DTYPES = ("bfloat16", "float16")
_LEAST_WINDOW_BYTES, _MOST_WINDOW_BYTES = 1 << 10, 1 << 27


class Packer:
    """Packs payloads at one level, 1 to 19. One thread at a time."""

    def __init__(self, level: int, secret: bytes | None) -> None:
        import zstandard

        self._secret = secret
        self._compressor = zstandard.ZstdCompressor(level=level, write_checksum=False)

    def pack(self, spec: FrameSpec, rows: Sequence[ByteRow]) -> bytes | None:
        """The whole frame of a copy; None where it would not be worth it."""
        payload = np.concatenate(rows) if len(rows) != 1 else rows[0]
        stage = stage_for(spec)
        stored = self._compressor.compress(_split(payload) if stage == ZSTD_SPLIT else payload.data)
        if spec.header_bytes(1) + len(stored) > payload.nbytes * _WORTH:
            return None
        return staged_header(spec, stored, stage, self._secret) + stored


def stage_for(spec: FrameSpec) -> int:
    """How a copy is packed, if it is: its name, dtype and size say so, and readers take nothing else."""
    splits = spec.key.codec == "raw" and spec.dtype in _SPLIT_DTYPES and spec.payload_bytes % 2 == 0
    return ZSTD_SPLIT if splits else ZSTD


def staged_header(spec: FrameSpec, stored: Buffer, stage: int, secret: bytes | None) -> bytes:
    """The header over a packed payload: that of a plain one of this length, with stage and raw bytes set."""
    plain = replace(spec, payload_bytes=len(stored))
    header = bytearray(build_joined_header(plain, [stored], checksum(stored), secret=secret))
    _set_stage(header, stage, spec.payload_bytes)
    mac_at = len(header) - CHECK_BYTES - MAC_BYTES
    if secret is not None:
        header[mac_at : mac_at + MAC_BYTES] = keyed_hash(secret, bytes(header[:mac_at]), [as_byte_row(stored)])
    header[-CHECK_BYTES:] = checksum(header[:-CHECK_BYTES])
    return bytes(header)


def stage_of(header: bytes) -> tuple[int, int, int]:
    """Stage, payload bytes and raw bytes, as a header says them."""
    (stage,) = struct.unpack_from("<H", header, _STAGE_AT)
    return (stage, *struct.unpack_from("<QQ", header, _PAYLOAD_AT))


def _set_stage(header: bytearray, stage: int, raw_bytes: int) -> None:
    struct.pack_into("<H", header, _STAGE_AT, stage)
    struct.pack_into("<Q", header, _RAW_AT, raw_bytes)


class StagedHeader(NamedTuple):
    """A header of a packed copy that has been checked; the stored bytes have not been looked at."""

    header: bytes
    stage: int
    segments: tuple[Segment, ...]

    @property
    def stored_bytes(self) -> int:
        return self.segments[0].byte_count

    def check(self, stored: ByteRow, secret: bytes | None) -> FrameFault | None:
        if checksum(stored) != self.segments[0].checksum:
            return FrameFault.PAYLOAD_CHECKSUM
        return None if secret is None else check_keyed(self.header, [stored], secret)


def parse_staged(start: Buffer, spec: FrameSpec, *, frame_bytes: int, keyed: bool) -> StagedHeader | FrameFault:
    """As frame.parse_header, for a frame that says of itself that it is packed. `spec` is that of the copy unpacked."""
    head_bytes = spec.header_bytes(1)
    stored_bytes = frame_bytes - head_bytes
    if not head_bytes < frame_bytes < spec.payload_bytes or as_byte_row(start).nbytes < head_bytes:
        return FrameFault.LENGTH
    header = as_byte_row(start)[:head_bytes].tobytes()
    stage, payload_bytes, raw_bytes = stage_of(header)
    if (payload_bytes, raw_bytes) != (stored_bytes, spec.payload_bytes):
        return FrameFault.SIZE
    if stage != stage_for(spec):
        return FrameFault.STAGE
    if checksum(header[:-CHECK_BYTES]) != header[-CHECK_BYTES:]:
        return FrameFault.HEADER_CHECKSUM
    plain = bytearray(header)  # all that is left to check is as in a plain frame of this length
    _set_stage(plain, 0, stored_bytes)
    plain[-CHECK_BYTES:] = checksum(plain[:-CHECK_BYTES])
    parsed = parse_header(plain, replace(spec, payload_bytes=stored_bytes), frame_bytes=frame_bytes, keyed=keyed)
    if isinstance(parsed, FrameFault):
        return parsed
    return StagedHeader(header, stage, parsed.segments)


def read_staged(frame: Buffer, spec: FrameSpec, rows: Sequence[ByteRow], secret: bytes | None) -> FrameFault | None:
    """Check a whole packed frame and unpack it into `rows`. A fault: they hold nothing of use."""
    view = as_byte_row(frame)
    header = parse_staged(view, spec, frame_bytes=view.nbytes, keyed=secret is not None)
    if isinstance(header, FrameFault):
        return header
    stored = view[len(header.header) :]
    return header.check(stored, secret) or unpack(stored, header.stage, rows)


def unpack(stored: ByteRow, stage: int, rows: Sequence[ByteRow]) -> FrameFault | None:
    """Unpack into exactly these rows. What would be longer or shorter, or asks for more memory, is a fault."""
    import zstandard

    total = sum(row.nbytes for row in rows)
    scratch = [np.empty(total, np.uint8)] if stage == ZSTD_SPLIT else rows
    window = min(_MOST_WINDOW_BYTES, max(_LEAST_WINDOW_BYTES, 1 << (total - 1).bit_length()))
    source = zstandard.ZstdDecompressor(max_window_size=window).stream_reader(stored.data, read_across_frames=False)
    try:
        if not _fill(source, scratch):
            return FrameFault.STAGE
    except zstandard.ZstdError:
        return FrameFault.STAGE
    if stage == ZSTD_SPLIT:
        _join(scratch[0], rows)
    return None


def _fill(source: zstandard.ZstdDecompressionReader, rows: Sequence[ByteRow]) -> bool:
    for row in rows:
        view = row.data
        while view.nbytes:
            done = source.readinto(view)
            if not done:
                return False
            view = view[done:]
    return not source.readinto(bytearray(1))


def _split(payload: ByteRow) -> memoryview:
    return np.ascontiguousarray(payload.reshape(-1, 2).T).data.cast("B")


def _join(planes: ByteRow, rows: Sequence[ByteRow]) -> None:
    """The reverse of _split; a value may lie across the border of two rows."""
    half = planes.nbytes // 2
    low, high, at = planes[:half], planes[half:], 0
    for row in rows:
        end = at + row.nbytes
        for odd, plane in ((0, low), (1, high)):
            first = at + (at % 2 != odd)
            row[first - at :: 2] = plane[first // 2 : (end - odd + 1) // 2]
        at = end
