"""The second stage: packed copies come back exactly, cost less room, and no packed bytes break a reader."""

from __future__ import annotations

import itertools
import os
import resource
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard

from kvstore.compression import ZSTD, ZSTD_SPLIT, Packer, parse_staged, read_staged, stage_for, stage_of, staged_header
from kvstore.copy_key import CopyKey
from kvstore.disk_tier.reader import DiskReader
from kvstore.disk_tier.tier import DiskTier
from kvstore.frame.parsing import FrameFault, FrameSpec, parse_frame
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ByteRow, ResultCode
from tests.hostile.mutations import Mutator
from tests.kvstore.redis_kit import options
from tests.servers import shared_server

OK, CORRUPT, MISS = ResultCode.OK, ResultCode.CORRUPT, ResultCode.MISS
SECRET = b"sixteen or more bytes"
MIB = 1 << 20
SIZE = 100_000


def specs(key: CopyKey, payload_bytes: int) -> FrameSpec:
    return FrameSpec(key, 16, 64, 64, "bfloat16", payload_bytes)


def values(size_bytes: int, seed: int = 1) -> ByteRow:
    """bf16 values of a normal distribution: their exponents repeat, their mantissas do not."""
    floats = np.random.default_rng(seed).standard_normal(-(-size_bytes // 2)).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)[:size_bytes].copy()


def cut(payload: ByteRow, *sizes: int) -> list[ByteRow]:
    ends = np.cumsum([0, *sizes])
    return [payload[start:stop] for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("sizes", [(SIZE,), (1, SIZE - 1), (3, 50_000, SIZE - 50_003), (SIZE // 2, SIZE // 2)])
def test_what_was_packed_comes_back(secret: bytes | None, codec: str, sizes: tuple[int, ...]) -> None:
    payload = values(SIZE)
    spec = specs(key_of(1, codec=codec), SIZE)
    frame = Packer(1, secret).pack(spec, cut(payload, *sizes))
    assert frame is not None
    assert stage_of(frame) == (ZSTD_SPLIT if codec == "raw" else ZSTD, len(frame) - spec.header_bytes(1), SIZE)
    out = np.zeros(SIZE, np.uint8)
    assert read_staged(frame, spec, cut(out, *sizes), secret) is None
    assert np.array_equal(out, payload)


def test_split_bytes_pack_better_and_noise_is_left_alone() -> None:
    packer, payload = Packer(1, None), values(SIZE)
    split = packer.pack(specs(key_of(1), SIZE), [payload])
    plain = packer.pack(specs(key_of(1, codec="int4"), SIZE), [payload])
    assert split is not None
    assert plain is not None
    assert len(split) < len(plain) < 0.8 * SIZE
    noise = np.random.default_rng(2).integers(0, 256, SIZE, dtype=np.uint8)
    assert packer.pack(specs(key_of(1), SIZE), [noise]) is None
    assert packer.pack(specs(key_of(1), 200), [np.zeros(200, np.uint8)]) is None, (
        "the header is longer than what it saves"
    )


def test_a_reader_that_knows_no_second_stage_misses() -> None:
    """What a reader of plain frames says of one: another size, or another stage; never OK."""
    spec = specs(key_of(1), SIZE)
    frame = Packer(1, None).pack(spec, [values(SIZE)])
    assert frame is not None
    assert parse_frame(frame, spec) is FrameFault.SIZE
    shorter = specs(key_of(1), len(frame) - spec.header_bytes(1))
    assert parse_frame(frame, shorter) in (FrameFault.SIZE, FrameFault.STAGE)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
def test_every_bit_of_the_header_and_every_truncation_counts(secret: bytes | None) -> None:
    spec = specs(key_of(1), 4000)
    frame = Packer(1, secret).pack(spec, [values(4000)])
    assert frame is not None
    out = [np.zeros(4000, np.uint8)]
    for place in range(spec.header_bytes(1) + 64):
        for bit in range(8):
            bad = bytearray(frame)
            bad[place] ^= 1 << bit
            assert isinstance(read_staged(bad, spec, out, secret), FrameFault), (place, bit)
    for length in range(len(frame)):
        assert isinstance(read_staged(frame[:length], spec, out, secret), FrameFault)
    assert isinstance(read_staged(frame + b"\x00", spec, out, secret), FrameFault)


def bombs(raw_bytes: int) -> dict[str, bytes]:
    """Packed payloads with right checksums around them."""
    whole = zstandard.ZstdCompressor(level=1)
    stream = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    wide = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_content_size=False)
    window = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    lying = bytearray(whole.compress(bytes(raw_bytes)))
    return {
        "too long": whole.compress(bytes(200 * MIB)),
        "too long, size not said": stream.compress(bytes(64 * MIB)) + stream.flush(),
        "one byte too long": whole.compress(bytes(raw_bytes + 1)),
        "one byte too short": whole.compress(bytes(raw_bytes - 1)),
        "empty": whole.compress(b""),
        "the right bytes in a window of 128 MiB": window.compress(bytes(raw_bytes)) + window.flush(),
        "no zstd": b"\x80\x04}\x94." * 20,
        "cut": bytes(lying[:-3]),
        "claims 2**60 bytes": b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 60) + b"\x01\x00\x00",
        "skippable frames": b"\x50\x2a\x4d\x18" + struct.pack("<I", 20) + bytes(20),
    }


@pytest.mark.parametrize("what", list(bombs(SIZE)))
@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_bombs_are_misses_that_cost_no_memory(what: str, codec: str) -> None:
    spec = specs(key_of(1, codec=codec), SIZE)
    stored = bombs(SIZE)[what]
    frame = staged_header(spec, stored, stage_for(spec), None) + stored
    out = [np.zeros(SIZE, np.uint8)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    fault = read_staged(frame, spec, out, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert fault is FrameFault.STAGE
    assert peak < 2 * SIZE + len(frame) + MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 8 << 10, "KiB"


@pytest.mark.parametrize("stage", [0, ZSTD, 3, 0xFFFF])
def test_another_stage_than_the_copys_own_is_a_miss(stage: int) -> None:
    spec, payload = specs(key_of(1), SIZE), values(SIZE)
    good = Packer(1, None).pack(spec, [payload])
    assert good is not None
    stored = good[spec.header_bytes(1) :]
    assert read_staged(staged_header(spec, stored, stage, None) + stored, spec, [payload], None) is FrameFault.STAGE


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
def test_mutated_packed_frames_are_misses(secret: bytes | None) -> None:
    spec, payload = specs(key_of(1), 4000), values(4000)
    good = Packer(1, secret).pack(spec, [payload])
    assert good is not None
    mutator, out, spared = Mutator(9, spec, good, secret, lambda: ()), np.zeros(4000, np.uint8), 0
    for _ in range(4000):
        bad = mutator.next()
        if read_staged(bad, spec, [out], secret) is None:
            spared += 1
            assert bad == good
            assert np.array_equal(out, payload)
    assert spared < 200


# tiers ---------------------------------------------------------------------------------------------------------------


def put_and_get(tier: DiskTier | RedisTier, keys: list[CopyKey], size: int) -> list[ResultCode]:
    tier.submit_put([(key, [values(size, n)]) for n, key in enumerate(keys)])
    assert set(tier.poll()[-1].results) == {OK}
    return got(tier, keys, size)


def got(tier: DiskTier | RedisTier, keys: list[CopyKey], size: int) -> list[ResultCode]:
    buffers = [np.zeros(size, np.uint8) for _ in keys]
    tier.submit_get(list(zip(keys, buffers, strict=True)))
    results = list(tier.poll()[-1].results)
    for n, (buffer, code) in enumerate(zip(buffers, results, strict=True)):
        assert code is not OK or np.array_equal(buffer, values(size, n))
    return results


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
@pytest.mark.parametrize("size", [20_000, 200_000], ids=["index", "slots"])
def test_packed_on_disk(tmp_path: Path, size: int, secret: bytes | None) -> None:
    keys = [key_of(n) for n in range(12)]
    used = {}
    for level in (0, 1):
        tier = DiskTier(tmp_path / str(level), 16 * MIB, specs=specs, secret=secret)
        if level:
            tier.pack(level)
        assert put_and_get(tier, keys, size) == [OK] * 12
        used[level] = tier.used_bytes
        tier.check_invariants()
        tier.close()
    assert used[1] < 0.85 * used[0]
    with DiskReader(tmp_path / "1") as reader:
        assert [reader.verify(record, None, secret) for record in reader.records() if record is not None] == [None] * 12
    tier = DiskTier(tmp_path / "1", 16 * MIB, specs=specs, secret=secret)  # does not pack, and reads what was packed
    assert got(tier, keys, size) == [OK] * 12
    entry = tier._index.find(keys[3])
    assert entry is not None
    if entry.slot is not None:
        os.pwrite(tier._slots._fd(entry.slot_bytes), b"other", entry.slot * entry.slot_bytes + 5000)
        assert got(tier, keys, size) == [OK] * 3 + [CORRUPT] + [OK] * 8
        assert tier.counters()["corrupt_payload_checksum"] == 1
    tier.check_invariants()
    tier.close()
    other = DiskTier(tmp_path / "1", 16 * MIB, specs=specs, secret=b"another secret of some bytes")
    assert OK not in got(other, keys, size)
    other.close()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["checksums", "signed"])
@pytest.mark.parametrize("plain", [False, True], ids=["own wire", "redis-py"])
def test_packed_on_a_server(secret: bytes | None, plain: bool) -> None:
    keys = [key_of(n) for n in range(12)]
    url = f"{shared_server().unix_url}?namespace=packed{plain}{secret is None}"
    packing = options(plain=plain, zstd_level=1)
    writer = RedisTier(url, spec_of=specs, secret=secret, options=packing)
    assert put_and_get(writer, keys, 200_000) == [OK] * 12
    assert writer.used_bytes < 12 * 170_000
    reader = RedisTier(url, spec_of=specs, secret=secret, options=options(plain=plain))
    assert got(reader, keys, 200_000) == [OK] * 12
    stranger = RedisTier(url, spec_of=specs, secret=None if secret else SECRET, options=options(plain=plain))
    assert got(stranger, keys, 200_000) == [MISS] * 12
    with shared_server().client() as client:
        spec = specs(keys[0], 200_000)
        for what, stored in bombs(200_000).items():
            client.set(reader._names.of(keys[0]), staged_header(spec, stored, stage_for(spec), secret) + stored)
            assert got(reader, keys, 200_000) == [CORRUPT] + [OK] * 11, what
    for tier in (writer, reader, stranger):
        tier.close()


def test_staged_headers_are_checked_before_anything_is_allocated() -> None:
    spec = specs(key_of(1), 1 << 40)
    header = bytearray(staged_header(specs(key_of(1), 1 << 40), b"x" * 100, ZSTD, None))
    struct.pack_into("<Q", header, 120, 1 << 39)
    assert parse_staged(header, spec, frame_bytes=len(header) + 100, keyed=False) is FrameFault.SIZE
