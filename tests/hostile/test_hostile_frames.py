"""Bytes that somebody else made: every one of them is a miss, none an exception, and none makes us allocate.

FRAME_FUZZ_COUNT sets how many random mutations are tried (20,000 by default).
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import xxhash
import zstandard

from kvstore import CopyKey
from kvstore.frame.parsing import Frame, FrameFault, FrameHeader, FrameSpec, build_scatter, parse_frame, parse_header

FUZZ_COUNT = int(os.environ.get("FRAME_FUZZ_COUNT", "20000"))
SECRET = b"sixteen or more bytes"
KEY = CopyKey(b"\x11" * 32, 0, b"\x22" * 32, "int4", True, (0, 3), (0, 4), b"bits")
SPEC = FrameSpec(KEY, 16, 64, 64, "bfloat16", 200)
PAYLOAD = np.random.default_rng(5).integers(0, 256, 200, dtype=np.uint8).tobytes()


def frame(secret: bytes | None = None, payload: bytes = PAYLOAD) -> bytes:
    pieces = [payload[:60], payload[60:]]
    return b"".join(build_scatter(SPEC, pieces, layer_ranges=[(0, 1), (1, 4)], secret=secret))


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_bit_of_every_byte_counts(secret: bytes | None) -> None:
    good = frame(secret)
    causes: Counter[FrameFault] = Counter()
    for place in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            result = parse_frame(bad, SPEC, secret=secret)
            assert isinstance(result, FrameFault), (place, bit)
            causes[result] += 1
    assert {FrameFault.MAGIC, FrameFault.HASH, FrameFault.TABLE, FrameFault.PAYLOAD_CHECKSUM} <= set(causes)


def test_every_byte_takes_every_value() -> None:
    good = frame()
    for place in range(SPEC.header_bytes(2)):
        for value in range(0, 256, 5):
            bad = bytearray(good)
            bad[place] = value
            if bytes(bad) != good:
                assert isinstance(parse_frame(bad, SPEC), FrameFault), (place, value)


def _mutated(draw: random.Random, good: bytes) -> bytes:
    bad = bytearray(good)
    for _ in range(draw.randrange(1, 5)):
        choice = draw.randrange(7)
        at = draw.randrange(len(bad)) if bad else 0
        if choice == 0 and bad:
            bad[at] ^= 1 << draw.randrange(8)
        elif choice == 1:
            bad[at : at + 8] = draw.choice((b"\xff" * 8, bytes(8), struct.pack("<q", -1 << draw.randrange(63))))
        elif choice == 2:
            del bad[at : at + draw.randrange(1, 40)]
        elif choice == 3:
            bad[at:at] = draw.randbytes(draw.randrange(1, 40))
        elif choice == 4:
            bad[at : at + 16] = bad[at // 2 : at // 2 + 16]
        elif choice == 5:
            del bad[at:]
        else:
            stop = min(len(bad), at + draw.randrange(1, 64))
            bad[at:stop] = draw.randbytes(stop - at)
    return bytes(bad)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "checksums made good"])
def test_random_mutations_are_misses(sealed: bool) -> None:
    """With good checksums over bad contents too: then only the checks of the fields themselves stand."""
    draw = random.Random(20_261_129)
    good = frame()
    head = SPEC.header_bytes(2)
    survivors = 0
    tracemalloc.start()
    try:
        for _ in range(FUZZ_COUNT // 2):
            bad = _mutated(draw, good)
            if sealed and len(bad) >= head:
                body = bytearray(bad)
                body[head - 16 : head] = xxhash.xxh3_128(bytes(body[: head - 16])).digest()
                bad = bytes(body)
            result = parse_frame(bad, SPEC)
            if isinstance(result, Frame):
                survivors += 1
                assert bad == good, "a frame that was changed was accepted"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert survivors < FUZZ_COUNT // 100
    assert peak < 4 << 20


def test_case_019_what_an_attacker_may_write_is_a_miss() -> None:

    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    oversized = bytearray(frame())
    oversized[120:136] = struct.pack("<QQ", 10 << 30, 10 << 30)
    deep = bytearray(frame())
    deep[140:142] = struct.pack("<H", 0xFFFF)
    wide = bytearray(frame())
    wide[136:140] = struct.pack("<I", 0xFFFFFFFF)
    tall = bytearray(frame())
    tall[12:16] = struct.pack("<I", 0xFFFFFFC0)
    staged = bytearray(frame())
    staged[98:100] = struct.pack("<H", 1)
    other_block = b"".join(build_scatter(replace(SPEC, key=KEY.with_hash(b"\x33" * 32)), [PAYLOAD]))
    other_dtype = b"".join(build_scatter(replace(SPEC, dtype="float8_e4m3fn"), [PAYLOAD]))
    values = [
        b"",
        b"\x00",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04}\x94\x8c\x03key\x94K\x01s.",  # a pickled dict
        bomb,
        frame()[:320] + bomb,
        b"\x00" * 10_000,
        b"\xff" * 10_000,
        bytes(oversized),
        bytes(deep),
        bytes(wide),
        bytes(tall),
        bytes(staged),
        other_block,
        other_dtype,
        frame() * 2,
        b"KVFRAME\x00",
    ]
    tracemalloc.start()
    try:
        for value in values:
            assert isinstance(parse_frame(value, SPEC), FrameFault), value[:32]
            assert isinstance(parse_frame(value, SPEC, secret=SECRET), FrameFault)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_changes_while_it_is_read_is_found_out() -> None:
    shared = np.frombuffer(bytearray(frame()), dtype=np.uint8)
    header = parse_header(shared, SPEC, frame_bytes=shared.nbytes, keyed=False)
    assert isinstance(header, FrameHeader)
    shared[: header.header_bytes] = 0  # what was checked was copied
    out = bytearray(200)
    assert header.copy_payload(shared[header.header_bytes :], out) is None
    shared[-3] ^= 4
    assert header.copy_payload(shared[header.header_bytes :], out) is FrameFault.PAYLOAD_CHECKSUM
