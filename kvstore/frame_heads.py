"""Heads of frames of one segment, packed once for all copies of a form: per copy only its hash and two sums differ.

A frame is right when its head equals, byte by byte, the head that its spec and its payload's sum lead to; only one that
is not gets parsed, to say what is wrong with it. Bytes in docs/formats/frame.md.

Pure functions over buffers; any thread. A FrameHeads is a cache: a lost race costs one more packing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.copy_key import CopyKey
from kvstore.frame import FrameFault, parse_header
from kvstore.frame_build import blank_header, build_joined_header, joined_checksum
from kvstore.frame_layout import CHECK_BYTES, HASH_AT, SEGMENT_SUM_AT, FrameSpec, header_layout
from kvstore.frame_specs import SpecSource
from kvstore.tier import ByteRow
from quant.native.checksum import Checksum, checksum

_FORMS_MOST = 256
_HASH_END = HASH_AT + 32


class FrameHead(NamedTuple):
    """template: without hash, sums and keyed hash. sum_at: where the payload's goes."""

    template: bytes
    sum_at: int
    frame_bytes: int

    def of(self, hash: bytes) -> bytearray:
        """The head of one copy, its sums still to be filled in."""
        head = bytearray(self.template)
        head[HASH_AT:_HASH_END] = hash
        return head

    def filled(self, hash: bytes, payload_sum: bytes) -> bytearray:
        head = self.of(hash)
        head[self.sum_at : self.sum_at + CHECK_BYTES] = payload_sum
        head[-CHECK_BYTES:] = checksum(head[:-CHECK_BYTES])
        return head

    def unpacked(self, hash: bytes, frame: bytearray, rows: Sequence[ByteRow]) -> tuple[bytearray, bytes | None]:
        """A frame in memory, frame_bytes long, into rows: the head that its payload leads to, and the one that it has
        (None: the same).
        """
        head_bytes, state = len(self.template), Checksum()
        at, view = head_bytes, memoryview(frame)
        for row in rows:
            state.copy(view[at : at + row.nbytes], row)
            at += row.nbytes
        head, found = self.filled(hash, state.digest()), frame[:head_bytes]
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
        header = parse_header(found, spec, frame_bytes=spec.frame_bytes(1), keyed=secret is not None)
        if isinstance(header, FrameFault):
            return header
        if len(header.segments) != 1:
            return FrameFault.TABLE
        if head[self.sum_at : self.sum_at + CHECK_BYTES] != header.segments[0].checksum:
            return FrameFault.PAYLOAD_CHECKSUM
        return header.check_keyed(rows, secret)


class FrameHeads:
    """Heads by form and size. specs: of two keys of one family, the specs differ in the key only."""

    def __init__(self, specs: SpecSource) -> None:
        self._specs = specs
        self._known: dict[tuple[object, int], FrameHead] = {}

    def head(self, key: CopyKey, family: object, payload_bytes: int) -> FrameHead:
        """family: key.family, which the caller has at hand."""
        found = self._known.get((family, payload_bytes))
        if found is None:
            if len(self._known) >= _FORMS_MOST:  # tenants and adapters come and go
                self._known.clear()
            found = self._known[family, payload_bytes] = head_of(self._specs(key, payload_bytes))
        return found


def head_of(spec: FrameSpec) -> FrameHead:
    """The head of an unsigned frame."""
    header = bytearray(blank_header(spec))
    header[HASH_AT:_HASH_END] = bytes(32)
    table_at = header_layout(len(spec.key.parameters), 1)[0]
    return FrameHead(bytes(header), table_at + SEGMENT_SUM_AT, len(header) + spec.payload_bytes)


def signed_head(spec: FrameSpec, rows: Sequence[ByteRow], secret: bytes) -> bytearray:
    """The whole head of a signed frame."""
    return bytearray(build_joined_header(spec, rows, joined_checksum(rows), secret=secret))
