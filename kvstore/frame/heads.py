"""Heads of frames, packed once for all copies of a form: per copy only its hash and the sums differ.

A frame is right when its head equals, byte by byte, the head that its spec and its payload's sum lead to; only one that
is not gets parsed, to say what is wrong with it. Bytes in docs/formats/frame.md.

Pure functions over buffers; any thread. A FrameHeads is a cache: a lost race costs one more packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.copy_key import CopyKey
from kvstore.frame.build import blank_header, build_joined_header, joined_checksum, joined_checksums
from kvstore.frame.layout import CHECK_BYTES, HASH_AT, SEGMENT, SEGMENT_SUM_AT, Cut, FrameSpec, cut_of, header_layout
from kvstore.frame.parsing import FrameFault, parse_header
from kvstore.frame.specs import SpecSource
from kvstore.tier import ByteRow
from quant.native.checksum import checksum
from quant.native.summed_file import Sums

_FORMS_MOST = 256
_HASH_END = HASH_AT + 32


class FrameHead(NamedTuple):
    """template: without hash, sums and keyed hash. sums: where each segment's goes, and its bytes."""

    template: bytes
    sums: Sums
    frame_bytes: int

    def of(self, hash: bytes) -> bytearray:
        """The head of one copy, its sums still to be filled in."""
        head = bytearray(self.template)
        head[HASH_AT:_HASH_END] = hash
        return head

    def filled(self, hash: bytes, rows: Sequence[ByteRow]) -> bytearray:
        head = self.of(hash)
        for (at, _), one in zip(self.sums, joined_checksums(rows, [size for _, size in self.sums]), strict=True):
            head[at : at + CHECK_BYTES] = one
        head[-CHECK_BYTES:] = checksum(head[:-CHECK_BYTES])
        return head

    def unpacked(self, hash: bytes, frame: bytearray, rows: Sequence[ByteRow]) -> tuple[bytearray, bytes | None]:
        """A frame in memory, frame_bytes long, into rows: the head that its payload leads to, and the one that it has
        (None: the same).
        """
        head_bytes = len(self.template)
        at, view = head_bytes, memoryview(frame)
        for row in rows:
            row[:] = view[at : at + row.nbytes]
            at += row.nbytes
        head, found = self.filled(hash, rows), frame[:head_bytes]
        return head, None if found == head else bytes(found)

    def fault(
        self, found: bytes | None, head: bytearray, spec: FrameSpec, rows: Sequence[ByteRow], secret: bytes | None
    ) -> FrameFault | None:
        """What is wrong with a frame. found: the head that lies there, None where it is `head`, the one that `rows`, as
        they were read, lead to.
        """
        if found is None and secret is None:
            return None
        found = bytes(head) if found is None else found
        header = parse_header(found, spec, frame_bytes=self.frame_bytes, keyed=secret is not None)
        if isinstance(header, FrameFault):
            return header
        if [one.byte_count for one in header.segments] != [size for _, size in self.sums]:
            return FrameFault.TABLE
        if any(
            head[at : at + CHECK_BYTES] != one.checksum for (at, _), one in zip(self.sums, header.segments, strict=True)
        ):
            return FrameFault.PAYLOAD_CHECKSUM
        return header.check_keyed(rows, secret)


class FrameHeads:
    """Heads by form and size. specs: of two keys of one family, the specs differ in the key only."""

    def __init__(self, specs: SpecSource) -> None:
        self._specs = specs
        self._known: dict[tuple[object, int, bool], FrameHead] = {}

    def head(self, key: CopyKey, family: object, payload_bytes: int, *, is_whole: bool) -> FrameHead:
        """family: key.family, which the caller has at hand. is_whole: of a frame of one segment."""
        place = (family, payload_bytes, is_whole)
        found = self._known.get(place)
        if found is None:
            if len(self._known) >= _FORMS_MOST:  # tenants and adapters come and go
                self._known.clear()
            cut = None if is_whole else cut_of(key, payload_bytes)
            found = self._known[place] = head_of(self._specs(key, payload_bytes), cut)
        return found


def head_of(spec: FrameSpec, cut: Cut | None = None) -> FrameHead:
    """The head of an unsigned frame; cut: None: of one segment."""
    header = bytearray(blank_header(spec, cut))
    header[HASH_AT:_HASH_END] = bytes(32)
    sizes = (spec.payload_bytes,) if cut is None else cut.sizes
    at = header_layout(len(spec.key.parameters), len(sizes))[0] + SEGMENT_SUM_AT
    sums = tuple((at + place * SEGMENT.size, size) for place, size in enumerate(sizes))
    return FrameHead(bytes(header), sums, len(header) + spec.payload_bytes)


def signed_head(spec: FrameSpec, rows: Sequence[ByteRow], secret: bytes) -> bytearray:
    """The whole head of a signed frame, which has one segment."""
    return bytearray(build_joined_header(spec, rows, joined_checksum(rows), secret=secret))
