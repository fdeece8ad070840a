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
from typing import NamedTuple

import numpy as np

from kvstore.frame.build import build_joined_header
from kvstore.frame.layout import CHECK_BYTES, MAC_BYTES, FrameSpec, keyed_hash
from kvstore.frame.parsing import FrameFault, Segment, check_keyed, parse_header
from kvstore.tier import Buffer, ByteRow, as_byte_row
from quant.native.checksum import checksum

ZSTD, ZSTD_SPLIT = 1, 2
"""Values of the header's field `stage`."""
_STAGE_AT, _PAYLOAD_AT, _RAW_AT = 98, 120, 128  # see frame.layout.FIXED
_WORTH = 0.97  # of the payload: a packed frame that is longer is not worth its unpacking
_SPLIT_DTYPES = ("bfloat16", "float16")
_LEAST_WINDOW_BYTES = 1 << 10


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
        stored = self._compressor.compress((_split(payload) if stage == ZSTD_SPLIT else payload).data)
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
    """Unpack into exactly these rows. What says that it is longer or shorter, or asks for more memory, is a fault."""
    import zstandard

    total = sum(row.nbytes for row in rows)
    try:
        said = zstandard.get_frame_parameters(stored.data)
        if said.content_size != total or said.window_size > max(_LEAST_WINDOW_BYTES, 1 << (total - 1).bit_length()):
            return FrameFault.STAGE
        found = zstandard.ZstdDecompressor().decompress(stored.data)  # allocates what it says: as much as was asked for
    except zstandard.ZstdError:
        return FrameFault.STAGE
    if len(found) != total:
        return FrameFault.STAGE
    payload = np.frombuffer(found, np.uint8)
    _pour(_joined(payload) if stage == ZSTD_SPLIT else payload, rows)
    return None


def _pour(payload: ByteRow, rows: Sequence[ByteRow]) -> None:
    at = 0
    for row in rows:
        np.copyto(row, payload[at : at + row.nbytes])
        at += row.nbytes


def _split(payload: ByteRow) -> ByteRow:
    """The low bytes of all 16-bit values, then the high ones."""
    values, planes = payload.view("<u2"), np.empty(payload.nbytes, np.uint8)
    planes[: values.size] = values.astype(np.uint8)
    planes[values.size :] = (values >> 8).astype(np.uint8)
    return planes


def _joined(planes: ByteRow) -> ByteRow:
    half = planes.nbytes // 2
    values = np.left_shift(planes[half:], 8, dtype="<u2")
    np.bitwise_or(values, planes[:half], out=values)
    return values.view(np.uint8)
