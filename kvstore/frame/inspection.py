"""A frame read for inspection: by what it says of itself, in pieces, so that no size that bytes claim costs memory.

A store knows the shape of its copies and compares (frame.py). An inspector knows a copy's name only: shape and dtype
are taken from the frame, everything else is checked as a store would. Pure functions; any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from allocator.errors import UsageError
from kvstore.compression import parse_staged, stage_of
from kvstore.copy_key import CopyKey
from kvstore.frame.layout import FIXED, KEYED_FLAG, MAGIC, MOST_SEGMENTS, VERSION, FrameSpec, header_layout
from kvstore.frame.parsing import FrameFault, Segment, check_keyed, parse_header
from kvstore.tier import ByteRow
from quant.native.checksum import Checksum

START_BYTES = 1024
"""Enough of a frame for its statement, and in practice for all of its header."""
PIECE_BYTES = 1 << 20
_MOST_PARAMETERS_BYTES = 64 << 10

ReadPiece: TypeAlias = Callable[[int, int], bytes]
"""(offset in the frame, bytes) -> at most so many bytes of it; fewer where it ends."""


@dataclass(frozen=True, slots=True)
class Statement:
    """What a frame says of its copy's shape, unchecked."""

    is_keyed: bool
    header_bytes: int
    block_tokens: int
    key_dim: int
    value_dim: int
    dtype: str
    payload_bytes: int
    stage: int
    parameters: bytes

    def spec(self, key: CopyKey) -> FrameSpec:
        return FrameSpec(key, self.block_tokens, self.key_dim, self.value_dim, self.dtype, self.payload_bytes)


def read_statement(read: ReadPiece, frame_bytes: int) -> Statement | FrameFault:
    """The statement at the start of a frame of this length; a fault where the bytes cannot be a frame."""
    start = read(0, min(START_BYTES, frame_bytes))
    if len(start) < FIXED.size:
        return FrameFault.LENGTH
    magic, version, flags, header_bytes, *_ = fixed = FIXED.unpack_from(start)
    tokens, key_dim, value_dim = fixed[10], fixed[15], fixed[16]
    stage, stored_bytes, payload_bytes = stage_of(start)
    parameters_bytes = fixed[-3]
    if magic != MAGIC:
        return FrameFault.MAGIC
    if version != VERSION:
        return FrameFault.VERSION
    if parameters_bytes > _MOST_PARAMETERS_BYTES:
        return FrameFault.PARAMETERS
    if not header_layout(parameters_bytes, 1)[2] <= header_bytes <= header_layout(parameters_bytes, MOST_SEGMENTS)[2]:
        return FrameFault.LENGTH
    if header_bytes + stored_bytes != frame_bytes:
        return FrameFault.LENGTH
    stop = FIXED.size + parameters_bytes
    parameters = start[FIXED.size : stop] if stop <= len(start) else read(FIXED.size, parameters_bytes)
    try:
        dtype = fixed[7].rstrip(b"\x00").decode("ascii")
    except UnicodeDecodeError:
        return FrameFault.SHAPE
    keyed = bool(flags & KEYED_FLAG)
    return Statement(keyed, header_bytes, tokens, key_dim, value_dim, dtype, payload_bytes, stage, parameters)


def check_frame(
    read: ReadPiece, frame_bytes: int, spec: FrameSpec, statement: Statement, secret: bytes | None
) -> FrameFault | None:
    """Check every byte against `spec`, a piece at a time. None: whole.

    NO_SECRET and UNSIGNED are said of frames whose checksums are right: only that nobody can vouch for them, or nobody
    has, is wrong. A packed payload is checked as it is stored, not unpacked.
    """
    start = read(0, statement.header_bytes)
    parse = parse_staged if statement.stage else parse_header
    header = parse(start, spec, frame_bytes=frame_bytes, keyed=statement.is_keyed)
    if isinstance(header, FrameFault):
        return header
    found: list[FrameFault] = []
    pieces = _checked_pieces(read, len(header.header), header.segments, found)
    if statement.is_keyed and secret is not None:
        forged = check_keyed(header.header, pieces, secret)
        return next(iter(found), forged)
    for _ in pieces:
        pass
    if found:
        return found[0]
    if statement.is_keyed:
        return FrameFault.NO_SECRET
    return FrameFault.UNSIGNED if secret is not None else None


def _checked_pieces(
    read: ReadPiece, header_bytes: int, segments: Sequence[Segment], found: list[FrameFault]
) -> Iterator[ByteRow]:
    """The payload in pieces; a wrong checksum or a missing byte is appended to `found` and ends it."""
    for segment in segments:
        state, at, stop = Checksum(), segment.offset, segment.offset + segment.byte_count
        while at < stop:
            piece = read(header_bytes + at, min(PIECE_BYTES, stop - at))
            if not piece:
                found.append(FrameFault.LENGTH)
                return
            state.update(piece)
            yield np.frombuffer(piece, np.uint8)
            at += len(piece)
        if state.digest() != segment.checksum:
            found.append(FrameFault.PAYLOAD_CHECKSUM)
            return


def stated_spec(statement: Statement, key: CopyKey) -> FrameSpec | FrameFault:
    """The spec of a frame under this key, shape as it says."""
    try:
        return statement.spec(key)
    except UsageError:
        return FrameFault.SHAPE
