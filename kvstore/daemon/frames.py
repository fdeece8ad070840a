"""Frames in shared memory: sealed while they are written, checked while they are read out. One segment a frame.

Frames of one form and size differ in hash, payload checksum and header checksum only, so the rest is built once and
compared as bytes; whatever differs goes through `parse_header`, which names the fault. Any thread. Others may write to
what is read here: only what has arrived in the reader's own buffers is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.copy_key import CopyKey
from kvstore.frame.build import build_joined_header
from kvstore.frame.layout import CHECK_BYTES, header_layout
from kvstore.frame.parsing import FrameFault, FrameSpec, parse_header
from kvstore.frame.specs import SpecSource
from kvstore.tier import ByteRow
from quant.native.checksum import Checksum, checksum
from quant.native.pages import move

_HASH_AT, _HASH_END = 16, 48
_SUM_IN_TABLE = 24
_MOST_KNOWN = 4096


class _Unchecked:
    """Copies as Checksum does, and sums nothing."""

    @staticmethod
    def copy(source: ByteRow, target: ByteRow) -> None:
        move(source, 0, target, 0, target.nbytes)

    @staticmethod
    def digest() -> bytes:
        return bytes(CHECK_BYTES)


class FrameForm:
    """Frames of one form and payload size."""

    __slots__ = ("_after_hash", "_after_sum", "_before_hash", "_sum_at", "frame_bytes", "header_bytes", "spec")

    def __init__(self, spec: FrameSpec) -> None:
        self.spec = spec
        table_at, _, self.header_bytes = header_layout(len(spec.key.parameters), 1)
        self.frame_bytes = self.header_bytes + spec.payload_bytes
        self._sum_at = table_at + _SUM_IN_TABLE
        header = build_joined_header(spec, [np.empty(spec.payload_bytes, np.uint8)], bytes(CHECK_BYTES))
        self._before_hash = header[:_HASH_AT]
        self._after_hash = header[_HASH_END : self._sum_at]
        self._after_sum = header[self._sum_at + CHECK_BYTES : -CHECK_BYTES]

    def header(self, hash: bytes, payload_sum: bytes) -> bytes:
        start = b"".join((self._before_hash, hash, self._after_hash, payload_sum, self._after_sum))
        return start + checksum(start)

    def write(self, key: CopyKey, memory: ByteRow, offset: int, rows: Sequence[ByteRow], checks: bool = True) -> None:
        """Copy payload pieces behind their header's place, then write the header over what arrived. Without checks it
        says zeros for a checksum, which no reader takes that checks."""
        at, state = offset + self.header_bytes, Checksum() if checks else _Unchecked()
        for row in rows:
            state.copy(row, memory[at : at + row.nbytes])
            at += row.nbytes
        memory.data[offset : offset + self.header_bytes] = self.header(key.hash, state.digest())

    def names(self, key: CopyKey, frame: ByteRow) -> bool:
        """Whether its header is whole and says what it must; the payload is not looked at."""
        given = frame[: self.header_bytes].tobytes()
        return given == self.header(key.hash, given[self._sum_at : self._sum_at + CHECK_BYTES])

    def read(self, key: CopyKey, frame: ByteRow, rows: Sequence[ByteRow], checks: bool = True) -> FrameFault | None:
        """Copy the payload to the pieces and check what arrived there; the header is checked in any case."""
        given = frame[: self.header_bytes].tobytes()
        payload_sum = given[self._sum_at : self._sum_at + CHECK_BYTES]
        if given != self.header(key.hash, payload_sum):
            return self._fault(key, frame)
        at, state = self.header_bytes, Checksum() if checks else _Unchecked()
        for row in rows:
            state.copy(frame[at : at + row.nbytes], row)
            at += row.nbytes
        return None if not checks or state.digest() == payload_sum else FrameFault.PAYLOAD_CHECKSUM

    def _fault(self, key: CopyKey, frame: ByteRow) -> FrameFault:
        spec = self.spec
        own = FrameSpec(key, spec.block_tokens, spec.key_dim, spec.value_dim, spec.dtype, spec.payload_bytes)
        parsed = parse_header(frame, own, frame_bytes=frame.nbytes, keyed=False)
        return parsed if isinstance(parsed, FrameFault) else FrameFault.TABLE  # whole, but not as a daemon's are


class FrameForms:
    """The forms of a tier's frames, from its SpecSource."""

    def __init__(self, source: SpecSource) -> None:
        self._source = source
        self._known: dict[tuple[object, int], FrameForm] = {}

    def of(self, key: CopyKey, payload_bytes: int) -> FrameForm:
        place = (key.family, payload_bytes)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[place] = FrameForm(self._source(key, payload_bytes))
        return known
