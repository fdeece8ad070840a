"""Frames on their way to and from a remote server: names of keys, and a value that is checked while it arrives.

Pure functions and one-use objects; the executor's thread. No client, no socket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from kvstore.compression import parse_staged, unpack
from kvstore.copy_key import CopyKey
from kvstore.frame import FrameFault, FrameSpec, parse_header
from kvstore.frame_layout import MOST_SEGMENTS
from kvstore.frame_specs import SpecSource
from kvstore.tier import ByteRow, Job

_CHUNK_BYTES = 1 << 20  # received and checked while it lies in cache


class KeyNames:
    """Text keys, as docs/formats/redis-keys.md gives them. Remembers the part that blocks of one prompt share."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._families: dict[object, str] = {}

    def of(self, key: CopyKey) -> bytes:
        family = key.family
        start = self._families.get(family)
        if start is None:
            if len(self._families) >= 4096:
                self._families.clear()
            start = self._families[family] = self._start(key)
        return (start + key.hash.hex()).encode("ascii")

    def _start(self, key: CopyKey) -> str:
        parameters = hashlib.sha256(key.parameters).hexdigest()[:16] if key.parameters else "0"
        codec = "".join(one if one.isalnum() or one in "_.-" else f"%{ord(one):02x}" for one in key.codec)
        heads, layers = (f"{start}-{stop}" for start, stop in (key.heads, key.layers))
        form = "x" if key.exact else "l"
        return f"{self.namespace}:{key.root.hex()}:g{key.group}:{codec}:{form}:h{heads}:l{layers}:p{parameters}:"

    @property
    def epoch(self) -> bytes:
        return f"{self.namespace}:epoch".encode("ascii")

    def root(self, root: bytes) -> bytes:
        return f"{self.namespace}:root:{root.hex()}".encode("ascii")


def joined_checksum(rows: Sequence[ByteRow]) -> bytes:
    """XXH3-128 over pieces in order."""
    if len(rows) == 1:
        return xxhash.xxh3_128_digest(rows[0].data)
    state = xxhash.xxh3_128()
    for row in rows:
        state.update(row.data)
    return state.digest()


class Specs:
    """A tier's SpecSource, asked once a family and size: the specs of a prompt's blocks differ in their key only."""

    def __init__(self, source: SpecSource) -> None:
        self._source = source
        self._known: dict[tuple[object, int], FrameSpec] = {}

    def of(self, key: CopyKey, payload_bytes: int) -> FrameSpec:
        place = (key.family, payload_bytes)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= 4096:
                self._known.clear()
            known = self._known[place] = self._source(key, payload_bytes)
        spec = object.__new__(FrameSpec)  # what the first one checked holds for all of its family
        put = object.__setattr__
        put(spec, "key", key)
        put(spec, "block_tokens", known.block_tokens)
        put(spec, "key_dim", known.key_dim)
        put(spec, "value_dim", known.value_dim)
        put(spec, "dtype", known.dtype)
        put(spec, "payload_bytes", payload_bytes)
        return spec


class FrameSink:
    """One value into one job's buffers. `fault` says what was wrong, None when every byte was right."""

    __slots__ = ("_job", "_secret", "_spec", "fault", "head_bytes", "size_bytes")

    def __init__(self, job: Job, spec: FrameSpec, secret: bytes | None) -> None:
        self._job = job
        self._spec = spec
        self._secret = secret
        self.head_bytes = spec.header_bytes(1)
        self.size_bytes = self.head_bytes + spec.payload_bytes
        self.fault: FrameFault | None = FrameFault.LENGTH

    def targets(self, length: int) -> Iterator[memoryview]:
        spec = self._spec
        if length < spec.payload_bytes:
            yield from self._packed_targets(length, spec)
            return
        header_bytes = length - spec.payload_bytes
        layers = spec.key.layers[1] - spec.key.layers[0]
        if not spec.header_bytes(1) <= header_bytes <= spec.header_bytes(min(MOST_SEGMENTS, layers)):
            return
        header = bytearray(header_bytes)
        yield memoryview(header)
        parsed = parse_header(header, spec, frame_bytes=length, keyed=self._secret is not None)
        if isinstance(parsed, FrameFault):
            self.fault = parsed
            return
        rows = iter(self._job.rows)
        row, at = next(rows), 0
        for segment in parsed.segments:
            state, left = xxhash.xxh3_128(), segment.byte_count
            while left:
                while at == row.nbytes:
                    row, at = next(rows), 0
                stop = min(row.nbytes, at + left, at + _CHUNK_BYTES)
                view = row[at:stop].data
                yield view
                state.update(view)
                left -= stop - at
                at = stop
            if state.digest() != segment.checksum:
                self.fault = FrameFault.PAYLOAD_CHECKSUM
                return
        self.fault = parsed.check_keyed(self._job.rows, self._secret)

    def _packed_targets(self, length: int, spec: FrameSpec) -> Iterator[memoryview]:
        """A value that is shorter than its payload: packed, or nothing of use."""
        if length <= self.head_bytes:
            return
        header = bytearray(self.head_bytes)
        yield memoryview(header)
        parsed = parse_staged(header, spec, frame_bytes=length, keyed=self._secret is not None)
        if isinstance(parsed, FrameFault):
            self.fault = parsed
            return
        stored = np.empty(parsed.stored_bytes, np.uint8)
        yield stored.data
        self.fault = parsed.check(stored, self._secret) or unpack(stored, parsed.stage, self._job.rows)
