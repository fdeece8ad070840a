"""What the kernels must agree on with the torch reference, for any device: used behind the shim and on real cards."""

from __future__ import annotations

import torch

from quant import BlockShape, get_codec
from quant.cuda.codec import CudaCodec
from quant.int4 import Int4Codec
from quant.testing import bits_equal
from tests.quant.cuda.inputs import blocks


def codec_of(bits: tuple[int, int], error_bound: float = 0.15) -> Int4Codec:
    codec = get_codec("int4", key_bits=bits[0], value_bits=bits[1], error_bound=error_bound)
    assert isinstance(codec, Int4Codec)
    return codec


def reference(codec: Int4Codec, keys: torch.Tensor, values: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, accepted) of CPU tensors by the torch code."""
    shape = BlockShape(*keys.shape[1:], 0 if values is None else values.shape[-1])
    payload = torch.zeros((keys.shape[0], codec.encoded_bytes(shape, keys.dtype)), dtype=torch.uint8)
    return payload, codec.encode_batch(keys, values, payload)


def check(
    kernels: CudaCodec, codec: Int4Codec, name: str, dims: tuple[int, int], dtype: torch.dtype, device: str
) -> int:
    """Encodes and decodes a named kind of input on `device` and compares bits; the number of accepted blocks."""
    keys, values = blocks(name, dims, dtype)
    payload, accepted = reference(codec, keys, values)
    shape = BlockShape(*keys.shape[1:], dims[1])
    runs = codec._head_runs(shape)
    on_device = keys.to(device), None if values is None else values.to(device)
    out = torch.full(payload.shape, 0xAB, dtype=torch.uint8, device=device)
    got = kernels.encode(*on_device, out, runs, codec.error_bound).cpu()
    assert got.tolist() == accepted.tolist(), (name, dims, dtype)
    assert torch.equal(out.cpu()[got], payload[got]), (name, dims, dtype)
    if not bool(got.any()):
        return 0
    good = payload[got]
    expected = torch.empty_like(keys[got]), None if values is None else torch.empty_like(values[got])
    codec.decode_into(good, *expected)
    found = [None if part is None else torch.empty_like(part, device=device) for part in expected]
    assert found[0] is not None
    kernels.decode(good.to(device), found[0], found[1], runs)
    for part, wanted in zip(found, expected, strict=True):
        assert bits_equal(None if part is None else part.cpu(), wanted), (name, dims, dtype)
    return int(got.sum())
