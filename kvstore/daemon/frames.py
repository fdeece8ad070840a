"""Frames in shared memory: sealed while they are written, checked while they are read out. One segment a frame.

Pure functions over buffers; the executor's thread. Others may write to what is read here: only what has arrived in the
reader's own buffers is checked.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from kvstore.frame import FrameFault, FrameSpec, parse_header
from kvstore.frame_build import build_joined_header
from kvstore.frame_layout import cache_chunks
from kvstore.tier import ByteRow


def write_frame(memory: ByteRow, offset: int, spec: FrameSpec, rows: Sequence[ByteRow]) -> None:
    """Copy payload pieces behind their header's place, then write the header over what arrived."""
    header_bytes = spec.header_bytes(1)
    at, state = offset + header_bytes, xxhash.xxh3_128()
    for row in rows:
        for start, stop in cache_chunks(0, row.nbytes):
            target = memory[at : at + stop - start]
            np.copyto(target, row[start:stop])
            state.update(target.data)
            at += stop - start
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
    if len(rows) == 1:
        return header.copy_payload(frame[header.header_bytes :], rows[0])
    at, state = header.header_bytes, xxhash.xxh3_128()
    for row in rows:
        for start, stop in cache_chunks(0, row.nbytes):
            target = row[start:stop]
            np.copyto(target, frame[at : at + stop - start])
            state.update(target.data)
            at += stop - start
    return None if state.digest() == header.segments[0].checksum else FrameFault.PAYLOAD_CHECKSUM
