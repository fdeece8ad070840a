"""Frames in shared memory: sealed while they are written, checked while they are read out. One segment a frame.

Pure functions over buffers; the executor's thread. Others may write to what is read here: only what has arrived in the
reader's own buffers is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.frame import FrameFault, FrameSpec, parse_header
from kvstore.frame_build import build_joined_header
from kvstore.tier import ByteRow
from quant.native.checksum import Checksum


def write_frame(memory: ByteRow, offset: int, spec: FrameSpec, rows: Sequence[ByteRow]) -> None:
    """Copy payload pieces behind their header's place, then write the header over what arrived."""
    header_bytes = spec.header_bytes(1)
    at, state = offset + header_bytes, Checksum()
    for row in rows:
        state.copy(row, memory[at : at + row.nbytes])
        at += row.nbytes
    payload = memory[offset + header_bytes : at]
    header = build_joined_header(spec, [payload], state.digest())
    memory[offset : offset + header_bytes] = np.frombuffer(header, np.uint8)


def read_frame(frame: ByteRow, spec: FrameSpec, rows: Sequence[ByteRow]) -> FrameFault | None:
    """Copy the payload to the pieces and check what arrived there."""
    header = parse_header(frame, spec, frame_bytes=frame.nbytes, keyed=False)
    if isinstance(header, FrameFault):
        return header
    if len(header.segments) != 1:
        return FrameFault.TABLE
    at, state = header.header_bytes, Checksum()
    for row in rows:
        state.copy(frame[at : at + row.nbytes], row)
        at += row.nbytes
    return None if state.digest() == header.segments[0].checksum else FrameFault.PAYLOAD_CHECKSUM
