"""Headers of many frames that differ in block and payload only, made and checked without taking them apart.

A prompt's blocks in one form have headers that are equal but for the block's hash, the payload's checksums (one a
segment) and the header's own. A stamp has the rest ready. What does not fit a stamp goes through parse_header, which
says what is wrong with it. Immutable; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from kvstore.frame.build import blank_header
from kvstore.frame.layout import CHECK_BYTES, SEGMENT, SEGMENT_SUM_AT, Cut, FrameSpec, header_layout
from quant.native.checksum import checksum as checksum_of

_HASH_AT, _HASH_END = 16, 48  # see frame.layout.FIXED


class HeaderStamp:
    """For unsigned frames: a signature covers every byte, so there is nothing to have ready. cut: None: one segment."""

    __slots__ = ("_end", "_joints", "_middle", "_start", "cut", "header_bytes")

    def __init__(self, spec: FrameSpec, cut: Cut | None = None) -> None:
        self.cut = cut or Cut((spec.key.layers,), (spec.payload_bytes,))
        header = blank_header(spec, self.cut)
        table_at = header_layout(len(spec.key.parameters), len(self.cut.sizes))[0]
        sums = [table_at + place * SEGMENT.size + SEGMENT_SUM_AT for place in range(len(self.cut.sizes))]
        assert header[_HASH_AT:_HASH_END] == spec.key.hash
        self._start = header[:_HASH_AT]
        self._middle = header[_HASH_END : sums[0]]
        self._joints = [header[one + CHECK_BYTES : following] for one, following in pairwise(sums)]
        self._end = header[sums[-1] + CHECK_BYTES : -CHECK_BYTES]
        self.header_bytes = len(header)

    def build(self, block_hash: bytes, checksums: Sequence[bytes]) -> bytes:
        """The header of a block's frame; checksums: XXH3-128 of each segment."""
        parts = [self._start, block_hash, self._middle, checksums[0]]
        for joint, checksum in zip(self._joints, checksums[1:], strict=True):
            parts += (joint, checksum)
        body = b"".join((*parts, self._end))
        return body + checksum_of(body)

    def checksums_in(self, header: bytes | bytearray, block_hash: bytes) -> list[bytes] | None:
        """The segments' checksums; None when a single byte is not as `build` makes it."""
        at = _HASH_END + len(self._middle)
        checksums = [bytes(header[at : at + CHECK_BYTES])]
        for joint in self._joints:
            at += CHECK_BYTES + len(joint)
            checksums.append(bytes(header[at : at + CHECK_BYTES]))
        return checksums if header == self.build(block_hash, checksums) else None
