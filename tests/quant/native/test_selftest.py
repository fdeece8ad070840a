"""The codec's self-test: its digests are what the torch reference makes of the same inputs, and it can fail."""

from __future__ import annotations

import struct

import pytest
import torch

from quant import native
from quant.int4_records import decode_records_into, encode_records_into
from quant.record_layout import record_layout

pytestmark = pytest.mark.skipif(native.kernels is None, reason=f"no C kernels: {native.reason}")
CASES = [
    (64, 64, torch.bfloat16),
    (128, 128, torch.bfloat16),
    (128, 128, torch.float32),
    (96, 80, torch.float16),
    (576, 0, torch.bfloat16),
    (8, 256, torch.float32),
]


def digest(before: int, content: bytes) -> int:
    content += bytes(-len(content) % 8)
    for (word,) in struct.iter_unpack("<Q", content):
        before = (before ^ word) * 0x100000001B3 % 2**64
    return before


class Generator:
    def __init__(self) -> None:
        self.state = 1

    def rows(self, dim: int, dtype: torch.dtype) -> torch.Tensor:
        numbers = []
        for index in range(16 * dim):
            self.state = (self.state * 1664525 + 1013904223) % 2**32
            c = index % dim
            numbers.append(((self.state >> 24) - (128 if c % 3 else 40)) * 2.0 ** (c % 5 - 7))
        return torch.tensor(numbers).view(1, 16, dim).to(dtype)


def reference_digests() -> tuple[int, int]:
    encoded = decoded = 0xCBF29CE484222325
    generator = Generator()
    for key_dim, value_dim, dtype in CASES:
        layout = record_layout(key_dim, value_dim)
        keys = generator.rows(key_dim, dtype)
        values = generator.rows(value_dim, dtype) if value_dim else None
        record = torch.empty((1, layout.record_bytes), dtype=torch.uint8)
        accepted = encode_records_into(keys, values, record, layout)
        encoded = digest(digest(encoded, bytes(accepted.tolist())), record.numpy().tobytes())
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            got = torch.empty((1, 16, key_dim), dtype=kind), torch.empty((1, 16, value_dim), dtype=kind)
            decode_records_into(record, got[0], got[1] if value_dim else None, layout)
            for part in got:
                decoded = digest(decoded, part.view(torch.uint8).numpy().tobytes()) if part.numel() else decoded
    return encoded, decoded


def test_digests_are_the_references() -> None:
    expected = reference_digests()
    for name in native.available_paths():
        with native.forced_path(name):
            passed, encoded, decoded = native.kernels.codec_selftest()
            assert (encoded, decoded) == expected, name
            assert passed is True
            assert native.codec_selftest()
