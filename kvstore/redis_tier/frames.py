"""Frames on their way to and from a remote server: names of keys, and a value that is checked while it arrives.

Pure functions and one-use objects; the executor's thread. No client, no socket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvstore.compression import parse_staged, unpack
from kvstore.copy_key import CopyKey
from kvstore.frame.build import build_joined_header, joined_checksum, joined_checksums, stretches
from kvstore.frame.layout import MOST_SEGMENTS, cut_of
from kvstore.frame.parsing import FrameFault, FrameSpec, parse_header
from kvstore.frame.specs import SpecSource
from kvstore.frame.stamp import HeaderStamp
from kvstore.tier import Job
from quant.native.checksum import Checksum

_CHUNK_BYTES = 512 << 10  # received and checked while it lies in cache


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


class Form(NamedTuple):
    """What the frames of one family and payload size have in common. `spec` is of the first one that was seen."""

    spec: FrameSpec
    stamp: HeaderStamp

    def spec_of(self, key: CopyKey) -> FrameSpec:
        """What the first one's spec checked holds for all of its family."""
        spec, known = object.__new__(FrameSpec), self.spec
        put = object.__setattr__
        put(spec, "key", key)
        put(spec, "block_tokens", known.block_tokens)
        put(spec, "key_dim", known.key_dim)
        put(spec, "value_dim", known.value_dim)
        put(spec, "dtype", known.dtype)
        put(spec, "payload_bytes", known.payload_bytes)
        return spec


class Forms:
    """A tier's SpecSource, asked once a family and size: the specs of a prompt's blocks differ in their key only."""

    def __init__(self, source: SpecSource, *, is_signed: bool = False) -> None:
        self._source = source
        self._is_signed = is_signed
        self._known: dict[tuple[object, int], Form] = {}

    def of(self, job: Job) -> Form:
        place = (job.key.family, job.size_bytes)
        known = self._known.get(place)
        if known is None:
            if len(self._known) >= 4096:
                self._known.clear()
            spec = self._source(job.key, job.size_bytes)
            cut = None if self._is_signed else cut_of(job.key, job.size_bytes)
            known = self._known[place] = Form(spec, HeaderStamp(spec, cut))
        return known


def header_of(job: Job, form: Form, secret: bytes | None) -> bytes:
    """The header of a copy about to be sent; reads its bytes."""
    if secret is None:
        return form.stamp.build(job.key.hash, joined_checksums(job.rows, form.stamp.cut.sizes))
    return build_joined_header(form.spec_of(job.key), job.rows, joined_checksum(job.rows), secret=secret)


class FrameSink:
    """One value into one job's buffers. `fault` says what was wrong, None when every byte was right."""

    __slots__ = ("_form", "_job", "_secret", "fault", "head_bytes", "size_bytes")

    def __init__(self, job: Job, form: Form, secret: bytes | None) -> None:
        self._job = job
        self._form = form
        self._secret = secret
        self.head_bytes = form.stamp.header_bytes
        self.size_bytes = self.head_bytes + job.size_bytes
        self.fault: FrameFault | None = FrameFault.LENGTH

    def targets(self, length: int) -> Iterator[memoryview]:
        job = self._job
        if length < job.size_bytes:
            yield from self._packed_targets(length, self._form.spec_of(job.key))
            return
        header_bytes = length - job.size_bytes
        if header_bytes == self.head_bytes and self._secret is None:
            header = bytearray(header_bytes)
            yield memoryview(header)
            checksums = self._form.stamp.checksums_in(header, job.key.hash)
            if checksums is not None:
                yield from self._pour(list(zip(self._form.stamp.cut.sizes, checksums, strict=True)))
                return
        else:
            spec = self._form.spec
            layers = spec.key.layers[1] - spec.key.layers[0]
            if not spec.header_bytes(1) <= header_bytes <= spec.header_bytes(min(MOST_SEGMENTS, layers)):
                return
            header = bytearray(header_bytes)
            yield memoryview(header)
        spec = self._form.spec_of(job.key)
        parsed = parse_header(header, spec, frame_bytes=length, keyed=self._secret is not None)
        if isinstance(parsed, FrameFault):
            self.fault = parsed
            return
        yield from self._pour([(segment.byte_count, segment.checksum) for segment in parsed.segments])
        if self.fault is None:
            self.fault = parsed.check_keyed(job.rows, self._secret)

    def _pour(self, segments: Sequence[tuple[int, bytes]]) -> Iterator[memoryview]:
        """Segments in order over the job's rows, each checked piece by piece. Sets `fault`."""
        rows = iter(self._job.rows)
        row, at = next(rows), 0
        for size_bytes, checksum in segments:
            state, left = Checksum(), size_bytes
            while left:
                while at == row.nbytes:
                    row, at = next(rows), 0
                stop = min(row.nbytes, at + left, at + _CHUNK_BYTES)
                view = row[at:stop].data
                yield view
                state.update(view)
                left -= stop - at
                at = stop
            if state.digest() != checksum:
                self.fault = FrameFault.PAYLOAD_CHECKSUM
                return
        self.fault = None

    def _packed_targets(self, length: int, spec: FrameSpec) -> Iterator[memoryview]:
        """A value that is shorter than its payload: packed, or nothing of use."""
        head_bytes = spec.header_bytes(1)
        if length <= head_bytes:
            return
        header = bytearray(head_bytes)
        yield memoryview(header)
        parsed = parse_staged(header, spec, frame_bytes=length, keyed=self._secret is not None)
        if isinstance(parsed, FrameFault):
            self.fault = parsed
            return
        stored = np.empty(parsed.stored_bytes, np.uint8)
        yield stored.data
        self.fault = parsed.check(stored, self._secret) or unpack(stored, parsed.stage, self._job.rows)


class PartSink:
    """One layer group of a value into one job's buffers; the first brings the frame's header with it.

    Takes nothing but what our own writers make (see cut_of); everything else is a fault, for a FrameSink to look at.
    """

    __slots__ = (
        "_form",
        "_job",
        "_number",
        "checksums",
        "end_layer",
        "fault",
        "head_bytes",
        "is_last",
        "range",
        "size_bytes",
    )

    def __init__(self, job: Job, form: Form, number: int, checksums: Sequence[bytes]) -> None:
        """number: which layer group; checksums: of all of them, none for the first, which reads them."""
        self._job, self._form, self._number = job, form, number
        self.checksums = checksums
        sizes, header_bytes = form.stamp.cut.sizes, form.stamp.header_bytes
        self.head_bytes = 0 if number else header_bytes
        start = header_bytes + sum(sizes[:number]) if number else 0
        self.range = (start, header_bytes + sum(sizes[: number + 1]))
        self.size_bytes = self.range[1] - start
        self.end_layer = form.stamp.cut.layers[number][1]
        self.is_last = number + 1 == len(sizes)
        self.fault: FrameFault | None = FrameFault.LENGTH

    def targets(self, length: int) -> Iterator[memoryview]:
        self.fault = FrameFault.LENGTH  # this may be the second try
        if length != self.size_bytes:
            return
        if not self._number:
            header = bytearray(self.head_bytes)
            yield memoryview(header)
            found = self._form.stamp.checksums_in(header, self._job.key.hash)
            if found is None:
                self.fault = FrameFault.TABLE
                return
            self.checksums = found
        state = Checksum()
        for row in list(stretches(self._job.rows, self._form.stamp.cut.sizes))[self._number]:
            for at in range(0, row.nbytes, _CHUNK_BYTES):
                view = row[at : at + _CHUNK_BYTES].data
                yield view
                state.update(view)
        self.fault = None if state.digest() == self.checksums[self._number] else FrameFault.PAYLOAD_CHECKSUM
