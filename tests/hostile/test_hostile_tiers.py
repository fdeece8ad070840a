"""Mutated frames through the real read paths: the parser, slot files and index values of a disk tier, a real server.

Every one is a miss unless it is the good frame again; none raises, and none makes a reader allocate. The usual run
tries HOSTILE_COUNT frames (12,000); `make test-faults` tries more than ten times as many.
"""

from __future__ import annotations

import os
import resource
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvstore.copy_key import CopyKey
from kvstore.disk_tier.catalog import Addition
from kvstore.disk_tier.tier import DiskTier
from kvstore.frame.parsing import Frame, FrameFault, FrameHeader, FrameSpec, parse_frame, parse_header
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import ResultCode
from tests.hostile.mutations import FIELDS, Mutator, frame_of, sealed
from tests.kvstore.redis_kit import options
from tests.servers import Server

COUNT = int(os.environ.get("HOSTILE_COUNT", "12000"))
SECRET, OTHER_SECRET = b"sixteen or more bytes", b"another secret of some bytes"
OK, MISS, CORRUPT = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT
MIB = 1 << 20
SMALL, LARGE = 700, 70_000
BATCH = 100


def specs(key: CopyKey, payload_bytes: int) -> FrameSpec:
    return FrameSpec(key, 16, 8, 8, "bfloat16", payload_bytes)


def good_frame(key: CopyKey, size: int, secret: bytes | None = None) -> bytes:
    return frame_of(specs(key, size), payload_of(key, size).tobytes(), secret)


def strangers(key: CopyKey, size: int, secret: bytes | None) -> tuple[bytes, ...]:
    """Well-formed frames that are not this copy's, or not by a friend."""
    keys = (
        key.with_hash(b"\x99" * 32),
        CopyKey(b"\x98" * 32, *key[1:]),
        CopyKey(*key[:3], "int4", *key[4:]),
        CopyKey(*key[:4], not key.exact, *key[5:]),
        CopyKey(*key[:5], (1, 3), *key[6:]),
        CopyKey(*key[:7], b"k5"),
    )
    frames = [good_frame(one, size, secret) for one in keys]
    frames.append(frame_of(replace(specs(key, size), dtype="float16"), payload_of(key, size).tobytes(), secret))
    frames.append(good_frame(key, size, None if secret else SECRET))
    if secret:
        frames.append(good_frame(key, size, OTHER_SECRET))
    return tuple(frames)


def mutator_of(key: CopyKey, size: int, secret: bytes | None, seed: int) -> Mutator:
    return Mutator(seed, specs(key, size), good_frame(key, size, secret), secret, lambda: strangers(key, size, secret))


@contextmanager
def bounded_memory(most_bytes: int) -> Iterator[None]:
    """Of this process, by the system's account, and by Python's."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most_bytes
    finally:
        tracemalloc.stop()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < most_bytes + (16 << 20)


# the parser ----------------------------------------------------------------------------------------------------------


def parser_rounds(count: int, secret: bytes | None, seed: int) -> int:
    key = key_of(1, parameters=b"k5v4")
    spec, good = specs(key, SMALL), good_frame(key, SMALL, secret)
    mutator = mutator_of(key, SMALL, secret, seed)
    out, spared = bytearray(SMALL), 0
    for _ in range(count):
        bad = mutator.next()
        result = parse_frame(bad, spec, secret=secret)
        header = parse_header(bad, spec, frame_bytes=len(bad), keyed=secret is not None)
        if isinstance(header, FrameHeader):
            copied = header.copy_payload(memoryview(bad)[header.header_bytes :], out, secret)
            assert (copied is None) == isinstance(result, Frame)
        if isinstance(result, Frame):
            spared += 1
            assert bad == good, "a frame that was changed was accepted"
    assert spared < count // 20
    return count


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
def test_mutated_frames_at_the_parser(secret: bytes | None) -> None:
    with bounded_memory(4 * MIB):
        parser_rounds(COUNT // 4, secret, 1)


def test_every_field_takes_extreme_values_with_good_checksums() -> None:
    key = key_of(1)
    spec, good = specs(key, SMALL), good_frame(key, SMALL)
    at = 0
    for size in FIELDS:
        for value in (0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), 0x5A):
            bad = bytearray(good)
            bad[at : at + size] = value.to_bytes(size, "little")
            result = parse_frame(sealed(bytes(bad), spec, payload=True), spec)
            assert isinstance(result, FrameFault) or bytes(bad) == good, (at, value)
        at += size


def test_every_truncation_and_every_tail() -> None:
    key = key_of(1)
    spec, good = specs(key, SMALL), good_frame(key, SMALL)
    for length in range(len(good)):
        assert isinstance(parse_frame(good[:length], spec), FrameFault), length
        assert isinstance(parse_frame(sealed(good[:length], spec, payload=True), spec), FrameFault), length
    for tail in (b"\x00", b"\xff" * 64, good):
        assert isinstance(parse_frame(good + tail, spec), FrameFault)


# the disk tier -------------------------------------------------------------------------------------------------------


def disk_rounds(directory: Path, count: int, size: int, secret: bytes | None) -> int:
    """Slots (or index values) of a tier overwritten behind its back, then read as a store reads them."""
    tier = DiskTier(directory, 64 * MIB, specs=specs, secret=secret)
    keys = [key_of(n) for n in range(BATCH)]
    buffers = [np.zeros(size, np.uint8) for _ in keys]
    good = {key: good_frame(key, size, secret) for key in keys}
    mutators = [mutator_of(key, size, secret, seed) for seed, key in enumerate(keys)]
    tried = spared = 0
    while tried < count:
        tier.submit_put([(key, [payload_of(key, size)]) for key in keys])
        assert set(tier.poll()[-1].results) == {OK}
        bads = [mutator.next() for mutator in mutators]
        whole = [overwrite(tier, key, bad) == good[key] for key, bad in zip(keys, bads, strict=True)]
        tier.submit_get(list(zip(keys, buffers, strict=True)))
        for key, buffer, code, is_good in zip(keys, buffers, tier.poll()[-1].results, whole, strict=True):
            assert code is (OK if is_good else CORRUPT), key
            assert code is not OK or np.array_equal(buffer, payload_of(key, size))
        tried, spared = tried + BATCH, spared + sum(whole)
    assert spared < tried // 20
    assert not [cause for cause in tier.counters() if cause.startswith("failed")]
    tier.check_invariants()
    tier.close()
    return tried


def overwrite(tier: DiskTier, key: CopyKey, bad: bytes) -> bytes:
    """Put bytes where a copy's frame lies; what a reader of that place finds now."""
    entry = tier._index.find(key)
    assert entry is not None
    if entry.slot is None:
        record = tier._catalog.record(entry.digest)
        assert record is not None
        value = (bad + bytes(entry.frame_bytes))[: entry.frame_bytes]
        tier._catalog.write([Addition(entry.digest, record, entry.generation, value)])
        return value
    fd, room = tier._slots._fd(entry.slot_bytes), entry.slot_bytes
    os.pwrite(fd, bad[:room].ljust(room, b"\x00"), entry.slot * room)
    return os.pread(fd, entry.frame_bytes, entry.slot * room)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["index", "slots"])
def test_mutated_frames_on_disk(tmp_path: Path, size: int, secret: bytes | None) -> None:
    disk_rounds(tmp_path, BATCH, size, secret)  # what the tier itself needs is allocated
    with bounded_memory(BATCH * size * 6 + 12 * MIB):  # the test's own frames; a bomb has 64 MiB
        disk_rounds(tmp_path, COUNT // 16, size, secret)


# the remote tier -----------------------------------------------------------------------------------------------------


def redis_rounds(server: Server, count: int, size: int, secret: bytes | None) -> int:
    keys = [key_of(n) for n in range(BATCH)]
    buffers = [np.zeros(size, np.uint8) for _ in keys]
    good = {key: good_frame(key, size, secret) for key in keys}
    mutators = [mutator_of(key, size, secret, seed) for seed, key in enumerate(keys)]
    patient = options(timeout_seconds=30.0)  # a busy machine is no fault here
    tier, tried, spared = RedisTier(server.unix_url, spec_of=specs, secret=secret, options=patient), 0, 0
    with server.client() as client:
        while tried < count:
            bads = [mutator.next() for mutator in mutators]
            client.mset({tier._names.of(key): bad for key, bad in zip(keys, bads, strict=True)})
            tier.submit_get(list(zip(keys, buffers, strict=True)))
            for key, buffer, code, bad in zip(keys, buffers, tier.poll()[-1].results, bads, strict=True):
                assert (code is OK) == (bad == good[key]), (key, code)
                assert code in (OK, MISS, CORRUPT)
                assert code is not OK or np.array_equal(buffer, payload_of(key, size))
            tried, spared = tried + BATCH, spared + sum(bad == good[key] for key, bad in zip(keys, bads, strict=True))
    assert spared < tried // 20
    assert not [cause for cause in tier.counters() if cause.startswith(("failed", "down"))], tier.counters()
    tier.close()
    return tried


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
def test_mutated_frames_on_a_server(secret: bytes | None) -> None:
    with Server() as server:
        redis_rounds(server, BATCH, SMALL, secret)
        with bounded_memory(8 * MIB):
            redis_rounds(server, COUNT // 8, SMALL, secret)


# the long run --------------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_a_hundred_thousand_mutated_frames(tmp_path: Path) -> None:
    """All read paths; the number is printed with -s and asserted here."""
    tried = 0
    with Server() as server, bounded_memory(64 * MIB):
        for number, secret in enumerate((None, SECRET)):
            tried += parser_rounds(40_000, secret, 100 + number)
            for size in (SMALL, LARGE):
                tried += disk_rounds(tmp_path / f"{number}-{size}", 7_500, size, secret)
                tried += redis_rounds(server, 7_500, size, secret)
    print(f"{tried} mutated frames")
    assert tried >= 140_000
