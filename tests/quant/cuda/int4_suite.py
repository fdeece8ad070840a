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


def shape_of(keys: torch.Tensor, values: torch.Tensor | None) -> BlockShape:
    _, layers, kv_heads, tokens, key_dim = keys.shape
    return BlockShape(layers, kv_heads, tokens, key_dim, 0 if values is None else values.shape[-1])


def reference(codec: Int4Codec, keys: torch.Tensor, values: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(payload, accepted) of CPU tensors by the normative torch code, even where the C kernels are built."""
    shape, count = shape_of(keys, values), keys.shape[0]
    payload = torch.zeros((count, codec.encoded_bytes(shape, keys.dtype)), dtype=torch.uint8)
    accepted = torch.ones(count, dtype=torch.bool)
    for run in codec._head_runs(shape):
        parts = [
            None if t is None else t[:, run.layers, run.kv_heads].reshape(-1, 16, t.shape[-1]) for t in (keys, values)
        ]
        assert parts[0] is not None
        records = torch.empty((parts[0].shape[0], run.record_bytes), dtype=torch.uint8)
        accepted &= codec._encode_piece(parts[0], parts[1], records, run.bits).view(count, -1).all(1)
        payload[:, run.offset : run.offset + records.numel() // count] = records.view(count, -1)
    return payload, accepted


def decoded(
    codec: Int4Codec, payload: torch.Tensor, like: tuple[torch.Tensor, torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys and values by the normative torch code, in tensors like the given ones; one pair of bits for all heads."""
    keys, values = torch.empty_like(like[0]), None if like[1] is None else torch.empty_like(like[1])
    (run,) = codec._head_runs(shape_of(keys, values))
    codec._decode_piece(payload.reshape(-1, run.record_bytes), keys, values, run.bits)
    return keys, values


def check(
    kernels: CudaCodec, codec: Int4Codec, name: str, dims: tuple[int, int], dtype: torch.dtype, device: str
) -> int:
    """Encodes and decodes a named kind of input on `device` and compares bits; the number of accepted blocks."""
    keys, values = blocks(name, dims, dtype)
    payload, accepted = reference(codec, keys, values)
    runs = codec._head_runs(shape_of(keys, values))
    on_device = keys.to(device), None if values is None else values.to(device)
    out = torch.full(payload.shape, 0xAB, dtype=torch.uint8, device=device)
    got = kernels.encode(*on_device, out, runs, codec.error_bound).cpu()
    assert got.tolist() == accepted.tolist(), (name, dims, dtype)
    assert torch.equal(out.cpu()[got], payload[got]), (name, dims, dtype)
    if not bool(got.any()):
        return 0
    expected = decoded(codec, payload[got], (keys[got], None if values is None else values[got]))
    found = [None if part is None else torch.empty_like(part, device=device) for part in expected]
    assert found[0] is not None
    kernels.decode(payload[got].to(device), found[0], found[1], runs)
    for part, wanted in zip(found, expected, strict=True):
        assert bits_equal(None if part is None else part.cpu(), wanted), (name, dims, dtype)
    return int(got.sum())
