"""int8k's keys against a plain-Python encoder written from docs/formats/int4.md, section 11, and its promises."""

from __future__ import annotations

import struct

import pytest
import torch

from quant import BlockShape, BlockTooLossy, get_codec
from quant.int4_records import encode_records
from quant.int8k import int8k_layout
from quant.record_layout import record_layout
from tests.quant.plain_int4 import constant, f32


def fp16_bits(x: float, up: bool) -> int:
    """binary16 of a float, rounded toward +inf or -inf."""
    bits = int(struct.unpack("<H", struct.pack("<e", x))[0])
    near = fp16_value(bits)
    if near < x if up else near > x:
        bits += 1 if (near >= 0) == up and not (near == 0 and not up) else -1
        if near == 0:
            bits = 0x0001 if up else 0x8001
    return bits


def fp16_value(bits: int) -> float:
    return float(struct.unpack("<e", struct.pack("<H", bits))[0])


def plain_keys(rows: list[list[float]]) -> tuple[bytes, bytes]:
    """(codes, scales and minima) of 16 tokens."""
    dim = len(rows[0])
    codes, scales, minima = bytearray(16 * dim), b"", b""
    for t, row in enumerate(rows):
        m = fp16_bits(min(row), up=False)
        s = fp16_bits(max(f32(f32(max(row) - fp16_value(m)) * constant(0x3B808081)), 2.0**-24), up=True)
        inverse = f32(1.0 / fp16_value(s))
        for c, x in enumerate(row):
            q = min(max(round(f32(f32(x - fp16_value(m)) * inverse)), 0), 255)
            codes[64 * (c // 4) + 4 * t + c % 4] = q
        scales += struct.pack("<H", s)
        minima += struct.pack("<H", m)
    return bytes(codes), scales + minima


@pytest.mark.parametrize("kind", ["random", "offset", "tiny", "constant", "zero", "large"])
@pytest.mark.parametrize("dim", [8, 64])
def test_keys_equal_the_plain_encoder_bit_for_bit(kind: str, dim: int) -> None:
    keys = torch.randn(1, 1, 16, dim)
    keys = {
        "random": keys,
        "offset": keys * 0.01 - 300.0,
        "tiny": keys * 1e-6,
        "constant": torch.full_like(keys, -0.1),
        "zero": torch.zeros_like(keys),
        "large": keys * 9000.0,
    }[kind]
    values = torch.randn(1, 1, 16, 64)
    record = get_codec("int8k").encode(keys, values)
    codes, scales = plain_keys([[float(x) for x in row] for row in keys[0, 0]])
    at = int8k_layout(dim, 64)
    assert record[: 16 * dim] == codes
    assert record[at.key_scales : at.key_scales + 64] == scales
    int4 = encode_records(torch.randn(1, 16, 8), values[0]).numpy().tobytes()
    other = record_layout(8, 64)
    for part, size in (("value_codes", 8 * 64), ("value_scales", 16), ("value_zeros", 8), ("value_base", 2)):
        here, there = getattr(at, part), getattr(other, part)
        assert record[here : here + size] == int4[there : there + size], part


def test_bits_a_value() -> None:
    for dim, most in ((64, 6.36), (128, 6.19), (256, 6.11)):
        layout = int8k_layout(dim, dim)
        assert layout.used_bytes * 8 / (32 * dim) <= most


def test_beyond_fp16_is_refused() -> None:
    codec, shape = get_codec("int8k"), BlockShape(1, 1, 16, 64, 64)
    keys = torch.randn(shape.keys_shape)
    for value in (-7e4, 2e7):
        keys[0, 0, 2, 2] = value
        with pytest.raises(BlockTooLossy):
            codec.encode(keys, torch.randn(shape.values_shape))
