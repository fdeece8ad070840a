"""Every built-in codec, in several settings, keeps the public contract."""

from __future__ import annotations

import torch

from quant import BlockCodec, BlockShape, get_codec
from quant.testing import CodecContract


class TestRaw(CodecContract):
    def make_codec(self) -> BlockCodec:
        return get_codec("raw")

    def shapes(self) -> tuple[BlockShape, ...]:
        return (*super().shapes(), BlockShape(1, 2, 5, 7, 3))

    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (*super().dtypes(), torch.float8_e4m3fn, torch.float8_e5m2)


class TestInt4(CodecContract):
    def make_codec(self) -> BlockCodec:
        return get_codec("int4")


class TestInt4FiveBitKeys(CodecContract):
    def make_codec(self) -> BlockCodec:
        return get_codec("int4", key_bits=5)

    def largest_error(self) -> float:
        return 0.13


class TestInt4ThreeBitValues(CodecContract):
    def make_codec(self) -> BlockCodec:
        return get_codec("int4", value_bits=3)

    def largest_error(self) -> float:
        return 0.32


class TestInt4Table(CodecContract):
    """Bits by (layer, head)."""

    def make_codec(self) -> BlockCodec:
        return get_codec("int4", key_bits=[[4, 5, 5], [4, 4, 5]], value_bits=[[4, 4, 3], [3, 4, 4]])

    def shapes(self) -> tuple[BlockShape, ...]:
        return (BlockShape(2, 3, 16, 64, 64), BlockShape(2, 3, 48, 80, 32))

    def largest_error(self) -> float:
        return 0.32


class TestInt8K(CodecContract):
    def make_codec(self) -> BlockCodec:
        return get_codec("int8k")
