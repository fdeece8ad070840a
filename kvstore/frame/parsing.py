"""The stored form of a copy: a header, a table of segments, checksums, the payload. Bytes in docs/formats/frame.md.

Writers build the header over payload pieces where they lie (scatter list) or copy both into a buffer of the caller's
(frame.build). Readers, here, say what they expect (FrameSpec) and get the frame's parts or a FrameFault; no bytes
whatever make them raise, and nothing is allocated by a length that the bytes claim.

Pure functions over buffers; any thread. A frame in memory that others can write is verified after it was copied out.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kvstore.frame.build import build_header, build_into, build_joined_header, build_scatter
from kvstore.frame.layout import (
    CHECK_BYTES,
    EXACT_FLAG,
    FIXED,
    KEYED_FLAG,
    MAC_BYTES,
    MAGIC,
    MOST_SEGMENTS,
    ROOT_BYTES,
    SEGMENT,
    VERSION,
    FrameSpec,
    Segment,
    header_layout,
    keyed_hash,
    padded_name,
)
from kvstore.tier import Buffer, ByteRow, as_byte_row
from quant.native.checksum import Checksum, checksum

__all__ = [
    "Frame",
    "FrameFault",
    "FrameHeader",
    "FrameSpec",
    "Segment",
    "build_header",
    "build_into",
    "build_joined_header",
    "build_scatter",
    "parse_frame",
    "parse_header",
]


class FrameFault(StrEnum):
    """Why bytes are not the copy that was asked for. The label under which the miss is counted."""

    LENGTH = "length"  # shorter or longer than what was expected, or than the header says
    MAGIC = "magic"
    VERSION = "version"
    FLAGS = "flags"
    HASH = "hash"  # another block
    ROOT = "root"  # another model, adapter, tenant or epoch
    GROUP = "group"
    CODEC = "codec"
    EXACTNESS = "exactness"
    RANGE = "range"  # other heads or layers
    SHAPE = "shape"  # other tokens, dims or dtype
    SIZE = "size"  # payload or raw bytes
    STAGE = "stage"  # a second stage this reader does not undo
    PARAMETERS = "parameters"
    TABLE = "table"
    HEADER_CHECKSUM = "header_checksum"
    PAYLOAD_CHECKSUM = "payload_checksum"
    UNSIGNED = "unsigned"  # no keyed hash where a secret is configured
    NO_SECRET = "no_secret"  # a keyed hash and no secret to check it
    FORGED = "forged"


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A header that has been checked against what was expected. The payload has not been looked at."""

    header: bytes
    payload_bytes: int
    segments: tuple[Segment, ...]
    is_keyed: bool

    @property
    def header_bytes(self) -> int:
        return len(self.header)

    def check_segment(self, index: int, row: Buffer) -> FrameFault | None:
        """Check one segment's bytes, so that its layers can be used before the rest is there.

        Where a secret is configured, only check_payload vouches for them.
        """
        segment, bytes_ = self.segments[index], as_byte_row(row)
        if bytes_.nbytes != segment.byte_count:
            return FrameFault.LENGTH
        if checksum(bytes_) != segment.checksum:
            return FrameFault.PAYLOAD_CHECKSUM
        return None

    def check_payload(self, payload: Buffer, secret: bytes | None = None) -> FrameFault | None:
        """Check all of the payload, and the keyed hash over header and payload when there is a secret."""
        row = as_byte_row(payload)
        if row.nbytes != self.payload_bytes:
            return FrameFault.LENGTH
        for index, segment in enumerate(self.segments):
            fault = self.check_segment(index, row[segment.offset : segment.offset + segment.byte_count])
            if fault is not None:
                return fault
        return self.check_keyed([row], secret)

    def copy_payload(self, payload: Buffer, out: Buffer, secret: bytes | None = None) -> FrameFault | None:
        """Copy the payload to `out` and check what arrived there, on the way."""
        source, target = as_byte_row(payload), as_byte_row(out, writable=True)
        if source.nbytes != self.payload_bytes or target.nbytes != self.payload_bytes:
            return FrameFault.LENGTH
        for segment in self.segments:
            state, stop = Checksum(), segment.offset + segment.byte_count
            state.copy(source[segment.offset : stop], target[segment.offset : stop])
            if state.digest() != segment.checksum:
                return FrameFault.PAYLOAD_CHECKSUM
        return self.check_keyed([target], secret)

    def check_keyed(self, pieces: Iterable[ByteRow], secret: bytes | None) -> FrameFault | None:
        """Check the keyed hash over header and payload; the checksums vouch for nothing against a forger."""
        return None if secret is None else check_keyed(self.header, pieces, secret)


def check_keyed(header: bytes, pieces: Iterable[ByteRow], secret: bytes) -> FrameFault | None:
    """Check the keyed hash that a header holds, over it and the payload as it is stored."""
    mac_at = len(header) - CHECK_BYTES - MAC_BYTES
    expected = keyed_hash(secret, header[:mac_at], pieces)
    return None if hmac.compare_digest(expected, header[mac_at : mac_at + MAC_BYTES]) else FrameFault.FORGED


@dataclass(frozen=True, slots=True)
class Frame:
    """A whole frame, checked. `payload` is a view of the bytes that were parsed."""

    header: FrameHeader
    payload: memoryview


def parse_frame(frame: Buffer, spec: FrameSpec, *, secret: bytes | None = None) -> Frame | FrameFault:
    """Check a whole frame against `spec`. The result's payload is a view of `frame`; nothing is copied."""
    view = as_byte_row(frame)
    header = parse_header(view, spec, frame_bytes=view.nbytes, keyed=secret is not None)
    if isinstance(header, FrameFault):
        return header
    payload = view[header.header_bytes :]
    fault = header.check_payload(payload, secret)
    return Frame(header, payload.data) if fault is None else fault


def parse_header(start: Buffer, spec: FrameSpec, *, frame_bytes: int, keyed: bool) -> FrameHeader | FrameFault:
    """Check a frame's header against `spec`. `start` holds at least the header; `frame_bytes` is the whole length.

    keyed: a secret is configured. Then an unsigned frame is a fault; without one, so is a signed frame, since nobody
    could tell whether it was signed by a friend.
    """
    view = as_byte_row(start)
    if view.nbytes < FIXED.size:
        return FrameFault.LENGTH
    prefix = view[: FIXED.size].tobytes()
    fixed = FIXED.unpack(prefix)
    magic, version, flags, header_bytes = fixed[:4]
    parameters_bytes, segment_count, reserved = fixed[-3:]
    if magic != MAGIC:
        return FrameFault.MAGIC
    if version != VERSION:
        return FrameFault.VERSION
    if flags & ~(EXACT_FLAG | KEYED_FLAG) or reserved:
        return FrameFault.FLAGS
    fault = _compare_fixed(fixed, spec)
    if fault is not None:
        return fault
    if parameters_bytes != len(spec.key.parameters):
        return FrameFault.PARAMETERS
    if not 1 <= segment_count <= min(MOST_SEGMENTS, spec.key.layers[1] - spec.key.layers[0]):
        return FrameFault.TABLE
    if header_bytes != spec.header_bytes(segment_count) or frame_bytes != header_bytes + spec.payload_bytes:
        return FrameFault.LENGTH
    if view.nbytes < header_bytes:
        return FrameFault.LENGTH
    header = view[:header_bytes].tobytes()  # bounded: its length is what we computed, not what the bytes claim
    if header[: FIXED.size] != prefix:  # someone is writing to these bytes
        return FrameFault.HEADER_CHECKSUM
    return _checked_header(header, spec, segment_count, is_keyed=bool(flags & KEYED_FLAG), keyed=keyed)


def _compare_fixed(fixed: tuple[object, ...], spec: FrameSpec) -> FrameFault | None:
    """The fixed fields against the spec, in the order in which a reader asks."""
    _, _, flags, _, hash, root, codec, dtype, group, stage, tokens, *rest = fixed
    head_start, head_stop, layer_start, layer_stop, key_dim, value_dim, payload_bytes, raw_bytes = rest[:8]
    key = spec.key
    rules = (
        (FrameFault.SIZE, (payload_bytes, raw_bytes), (spec.payload_bytes, spec.payload_bytes)),
        (FrameFault.SHAPE, (tokens, key_dim, value_dim), (spec.block_tokens, spec.key_dim, spec.value_dim)),
        (FrameFault.SHAPE, dtype, padded_name(spec.dtype)),
        (FrameFault.GROUP, group, key.group),
        (FrameFault.CODEC, codec, padded_name(key.codec)),
        (FrameFault.STAGE, stage, 0),
        (FrameFault.EXACTNESS, flags & EXACT_FLAG, EXACT_FLAG if key.exact else 0),  # type: ignore[operator]
        (FrameFault.RANGE, (head_start, head_stop, layer_start, layer_stop), (*key.heads, *key.layers)),
        (FrameFault.ROOT, root, key.root[:ROOT_BYTES]),
        (FrameFault.HASH, hash, key.hash),
    )
    return next((fault for fault, given, expected in rules if given != expected), None)


def _checked_header(
    header: bytes, spec: FrameSpec, segment_count: int, *, is_keyed: bool, keyed: bool
) -> FrameHeader | FrameFault:
    table_at, table_end, _ = header_layout(len(spec.key.parameters), segment_count)
    if header[FIXED.size : FIXED.size + len(spec.key.parameters)] != spec.key.parameters:
        return FrameFault.PARAMETERS
    segments = []
    offset, layer = 0, spec.key.layers[0]
    for index in range(segment_count):
        values = SEGMENT.unpack_from(header, table_at + index * SEGMENT.size)
        segment = Segment(values[0], values[1], (values[2], values[3]), values[5])
        first, last = segment.layers
        follows = segment.offset == offset and first == layer < last and values[4] == 0
        if not follows or not 0 < segment.byte_count <= spec.payload_bytes - offset:
            return FrameFault.TABLE
        offset, layer = offset + segment.byte_count, last
        segments.append(segment)
    if offset != spec.payload_bytes or layer != spec.key.layers[1]:
        return FrameFault.TABLE
    if checksum(header[:-CHECK_BYTES]) != header[-CHECK_BYTES:]:
        return FrameFault.HEADER_CHECKSUM
    padding = header[FIXED.size + len(spec.key.parameters) : table_at] + header[table_end : -CHECK_BYTES - MAC_BYTES]
    if any(padding) or (not is_keyed and any(header[-CHECK_BYTES - MAC_BYTES : -CHECK_BYTES])):
        return FrameFault.TABLE
    if keyed != is_keyed:
        return FrameFault.UNSIGNED if keyed else FrameFault.NO_SECRET
    return FrameHeader(header, spec.payload_bytes, tuple(segments), is_keyed)
