"""Writing frames: over payload pieces where they lie, or into a buffer of the caller's. Bytes in docs/formats/frame.md.

Pure functions over buffers; any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from allocator.errors import UsageError
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
    Cut,
    FrameSpec,
    header_layout,
    keyed_hash,
    padded_name,
)
from kvstore.tier import Buffer, ByteRow, as_byte_row
from quant.native.checksum import Checksum, checksum


def build_header(
    spec: FrameSpec,
    pieces: Sequence[Buffer],
    *,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
    secret: bytes | None = None,
) -> bytes:
    """The header over payload pieces where they lie; header and pieces in order are the frame.

    pieces: one buffer a segment, in layer order; layer_ranges says which layers each holds (None: one piece, all).
    UsageError when sizes or ranges do not add up to the spec, or the secret has a bad length.
    """
    rows = [as_byte_row(piece) for piece in pieces]
    ranges = _checked_ranges(spec, rows, layer_ranges)
    return _header(spec, ranges, rows, [checksum(row) for row in rows], secret)


def build_scatter(
    spec: FrameSpec,
    pieces: Sequence[Buffer],
    *,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
    secret: bytes | None = None,
) -> list[memoryview]:
    """Header and pieces as a list for sendmsg or pwritev. No payload is copied."""
    header = build_header(spec, pieces, layer_ranges=layer_ranges, secret=secret)
    return [memoryview(header), *(as_byte_row(piece).data for piece in pieces)]


def build_into(
    out: Buffer,
    spec: FrameSpec,
    pieces: Sequence[Buffer],
    *,
    layer_ranges: Sequence[tuple[int, int]] | None = None,
    secret: bytes | None = None,
) -> int:
    """Write the frame to the start of `out`, checksums taken from what was written. Returns the frame's bytes."""
    rows = [as_byte_row(piece) for piece in pieces]
    ranges = _checked_ranges(spec, rows, layer_ranges)
    target = as_byte_row(out, writable=True)
    size = spec.frame_bytes(len(rows))
    if target.nbytes < size:
        raise UsageError(f"frame: got a buffer of {target.nbytes} bytes; expected at least {size}")
    at, written, checksums = spec.header_bytes(len(rows)), [], []
    for row in rows:
        place = target[at : at + row.nbytes]
        state = Checksum()
        state.copy(row, place)
        written.append(place)
        checksums.append(state.digest())
        at += row.nbytes
    header = _header(spec, ranges, written, checksums, secret)
    target[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    return size


def build_joined_header(
    spec: FrameSpec,
    pieces: Sequence[Buffer],
    checksums: bytes | Sequence[bytes],
    *,
    cut: Cut | None = None,
    secret: bytes | None = None,
) -> bytes:
    """The header of a frame whose payload lies in several pieces, cut anywhere.

    cut: its segments (None: one). checksums: XXH3-128 of each (one: as it is), of a caller that had them in cache.
    """
    rows = [as_byte_row(piece) for piece in pieces]
    total = sum(row.nbytes for row in rows)
    cut = cut or Cut((spec.key.layers,), (total,))
    sums = [checksums] if isinstance(checksums, bytes) else checksums
    if total != spec.payload_bytes or len(sums) != len(cut.sizes) or any(len(one) != CHECK_BYTES for one in sums):
        raise UsageError(
            f"frame: got {total} bytes and {len(sums)} checksums; expected {spec.payload_bytes} and "
            f"{len(cut.sizes)} of 16 bytes"
        )
    return _header(spec, cut.layers, rows, sums, secret, cut.sizes)


def blank_header(spec: FrameSpec, cut: Cut | None = None) -> bytes:
    """The header of an unsigned frame of these segments (None: one), with zeros where the payload's checksums go."""
    cut = cut or Cut((spec.key.layers,), (spec.payload_bytes,))
    return _header(spec, cut.layers, [], [bytes(CHECK_BYTES)] * len(cut.sizes), None, cut.sizes)


def joined_checksum(pieces: Sequence[Buffer]) -> bytes:
    """XXH3-128 of the pieces in order, for build_joined_header."""
    state = Checksum()
    for piece in pieces:
        state.update(as_byte_row(piece))
    return state.digest()


def joined_checksums(pieces: Sequence[Buffer], sizes: Sequence[int]) -> list[bytes]:
    """XXH3-128 of each stretch of so many bytes of the pieces in order."""
    return [joined_checksum(stretch) for stretch in stretches([as_byte_row(piece) for piece in pieces], sizes)]


def stretches(rows: Sequence[ByteRow], sizes: Sequence[int]) -> Iterator[list[ByteRow]]:
    """The rows, one behind the other, cut into stretches of these sizes."""
    if len(sizes) == 1:
        yield list(rows)
        return
    at, place = 0, 0
    for size in sizes:
        parts, left = [], size
        while left:
            part = rows[place][at : at + left]
            left, at = left - part.nbytes, at + part.nbytes
            if part.nbytes:
                parts.append(part)
            if at == rows[place].nbytes:
                place, at = place + 1, 0
        yield parts


def _checked_ranges(
    spec: FrameSpec, rows: Sequence[ByteRow], layer_ranges: Sequence[tuple[int, int]] | None
) -> list[tuple[int, int]]:
    first, last = spec.key.layers
    ranges = [(first, last)] if layer_ranges is None else list(layer_ranges)
    total = sum(row.nbytes for row in rows)
    if total != spec.payload_bytes or any(row.nbytes == 0 for row in rows):
        raise UsageError(
            f"frame: got pieces of {total} bytes; expected {spec.payload_bytes} in pieces that are not empty"
        )
    if len(ranges) != len(rows) or len(rows) > MOST_SEGMENTS:
        raise UsageError(f"frame: got {len(rows)} pieces for {len(ranges)} layer ranges; expected one each")
    for start, stop in ranges:
        if start != first or not start < stop <= last:
            raise UsageError(
                f"frame: got layer ranges {ranges}; expected them to follow each other over {spec.key.layers}"
            )
        first = stop
    if first != last:
        raise UsageError(f"frame: got layer ranges {ranges}; expected them to cover {spec.key.layers}")
    return ranges


def _header(
    spec: FrameSpec,
    ranges: Sequence[tuple[int, int]],
    rows: Sequence[ByteRow],
    checksums: Sequence[bytes],
    secret: bytes | None,
    sizes: Sequence[int] | None = None,
) -> bytes:
    key = spec.key
    sizes = [row.nbytes for row in rows] if sizes is None else sizes
    table_at, _, header_bytes = header_layout(len(key.parameters), len(sizes))
    header = bytearray(header_bytes)
    FIXED.pack_into(
        header,
        0,
        MAGIC,
        VERSION,
        (EXACT_FLAG if key.exact else 0) | (KEYED_FLAG if secret is not None else 0),
        header_bytes,
        key.hash,
        key.root[:ROOT_BYTES],
        padded_name(key.codec),
        padded_name(spec.dtype),
        key.group,
        0,
        spec.block_tokens,
        *key.heads,
        *key.layers,
        spec.key_dim,
        spec.value_dim,
        spec.payload_bytes,
        spec.payload_bytes,
        len(key.parameters),
        len(sizes),
        0,
    )
    header[FIXED.size : FIXED.size + len(key.parameters)] = key.parameters
    offset = 0
    for index, (size, (start, stop), digest) in enumerate(zip(sizes, ranges, checksums, strict=True)):
        SEGMENT.pack_into(header, table_at + index * SEGMENT.size, offset, size, start, stop, 0, digest)
        offset += size
    mac_at = header_bytes - CHECK_BYTES - MAC_BYTES
    if secret is not None:
        header[mac_at : mac_at + MAC_BYTES] = keyed_hash(secret, bytes(header[:mac_at]), rows)
    header[-CHECK_BYTES:] = checksum(header[:-CHECK_BYTES])
    return bytes(header)
