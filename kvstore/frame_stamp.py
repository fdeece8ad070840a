"""Headers of many frames that differ in block and payload only, made and checked without taking them apart.

A prompt's blocks in one form have headers of one segment that are equal but for the block's hash, the payload's
checksum and the header's own. A stamp has the rest ready. What does not fit a stamp goes through parse_header, which
says what is wrong with it. Immutable; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.frame_build import build_joined_header
from kvstore.frame_layout import CHECK_BYTES, SEGMENT, FrameSpec, header_layout
from kvstore.tier import ByteRow
from quant.native.checksum import checksum as checksum_of

_HASH_AT, _HASH_END = 16, 48  # see frame_layout.FIXED


class HeaderStamp:
    """For unsigned frames of one segment: a signature covers every byte, so there is nothing to have ready."""

    __slots__ = ("_end", "_middle", "_start", "header_bytes")

    def __init__(self, spec: FrameSpec, rows: Sequence[ByteRow]) -> None:
        """rows: as many bytes as the spec's payload, in any pieces; they are not read."""
        header = build_joined_header(spec, rows, bytes(CHECK_BYTES))
        checksum_end = header_layout(len(spec.key.parameters), 1)[0] + SEGMENT.size
        assert header[_HASH_AT:_HASH_END] == spec.key.hash
        self._start = header[:_HASH_AT]
        self._middle = header[_HASH_END : checksum_end - CHECK_BYTES]
        self._end = header[checksum_end:-CHECK_BYTES]
        self.header_bytes = len(header)

    def build(self, block_hash: bytes, checksum: bytes) -> bytes:
        """The header of a block's frame; checksum: XXH3-128 over its payload."""
        body = b"".join((self._start, block_hash, self._middle, checksum, self._end))
        return body + checksum_of(body)

    def checksum_in(self, header: bytes | bytearray, block_hash: bytes) -> bytes | None:
        """The payload's checksum; None when a single byte is not as `build` makes it."""
        at = _HASH_END + len(self._middle)
        checksum = bytes(header[at : at + CHECK_BYTES])
        return checksum if header == self.build(block_hash, checksum) else None
