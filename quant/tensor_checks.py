"""Checks of what callers hand to a codec: dtypes by name, block shapes of tensors, payload buffers. Any thread."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quant.codec import BlockShape, CodecError, DtypeName, Payload

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def resolve_dtype(dtype: DtypeName) -> torch.dtype:
    """torch dtype of a name such as "bfloat16" or of itself. Raises CodecError for one that no cache uses."""
    found = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise CodecError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    assert isinstance(found, torch.dtype)
    return found


def check_block_shape(shape: object) -> None:
    """Raises CodecError for what is no BlockShape, such as the shape of a tensor."""
    if not isinstance(shape, BlockShape):
        raise CodecError(f"shape must be a BlockShape, got {shape!r}")


def shape_of(keys: torch.Tensor, values: torch.Tensor | None, batch_dims: int) -> BlockShape:
    """BlockShape of keys [..., L, H, T, Dk] and values [..., L, H, T, Dv] or None. CodecError if they disagree."""
    if keys.ndim != 4 + batch_dims:
        raise CodecError(f"keys must have {4 + batch_dims} dims [..., layers, kv_heads, tokens, dim], got {keys.ndim}")
    layers, kv_heads, tokens, key_dim = keys.shape[-4:]
    if values is None:
        return BlockShape(layers, kv_heads, tokens, key_dim, 0)
    if values.dtype != keys.dtype or values.device != keys.device or values.shape[:-1] != keys.shape[:-1]:
        raise CodecError(
            f"values must match keys but for the last dim: keys {list(keys.shape)} {keys.dtype} {keys.device}, "
            f"values {list(values.shape)} {values.dtype} {values.device}"
        )
    return BlockShape(layers, kv_heads, tokens, key_dim, values.shape[-1])


def check_out(out: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
    """Raises CodecError unless `out` is uint8 of that shape on that device with a contiguous last dimension."""
    if out.dtype != torch.uint8 or tuple(out.shape) != tuple(shape) or out.device != device:
        raise CodecError(
            f"out must be uint8 {list(shape)} on {device}, got {out.dtype} {list(out.shape)} on {out.device}"
        )
    if out.shape[-1] > 1 and out.stride(-1) != 1:
        raise CodecError(f"the last dimension of out must be contiguous, got strides {out.stride()}")
    if any(size > 1 and stride < out.shape[-1] for size, stride in zip(out.shape[:-1], out.stride(), strict=False)):
        raise CodecError(f"payloads of {out.shape[-1]} bytes must not overlap in out, got strides {out.stride()}")


def check_places(places_bytes: torch.Tensor, memory: torch.Tensor, count: int, payload_bytes: int) -> None:
    """Raises CodecError unless `count` payloads at byte offsets int64 [count] lie inside memory uint8 [bytes]."""
    if memory.dtype != torch.uint8 or memory.stride() != (1,):
        raise CodecError(f"memory must be a contiguous uint8 [bytes], got {memory.dtype} {list(memory.shape)}")
    if places_bytes.shape != (count,) or places_bytes.dtype != torch.int64:
        raise CodecError(f"expected int64 [{count}] offsets, got {places_bytes.dtype} {list(places_bytes.shape)}")
    if count and not (places_bytes.min() >= 0 and places_bytes.max() <= memory.numel() - payload_bytes):
        raise CodecError(
            f"payloads of {payload_bytes} bytes at offsets {places_bytes.tolist()}: expected all of them inside "
            f"{memory.numel()} bytes"
        )


def as_payload(payload: Payload, shape: Sequence[int] | None, device: torch.device | None) -> torch.Tensor:
    """uint8 tensor over the payload (bytes-like objects are copied). Raises CodecError if the shape is another."""
    if isinstance(payload, torch.Tensor):
        tensor = payload
        if tensor.dtype != torch.uint8:
            raise CodecError(f"payload must be uint8, got {tensor.dtype}")
        if tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
    else:
        try:
            copied = bytearray(memoryview(payload))
        except TypeError:
            kind = type(payload).__name__
            raise CodecError(f"payload must be bytes or a uint8 tensor, got {payload!r:.80} ({kind})") from None
        tensor = torch.frombuffer(copied, dtype=torch.uint8) if copied else torch.zeros(0, dtype=torch.uint8)
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise CodecError(f"payload must be {list(shape)} bytes, got {list(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise CodecError(f"payload is on {tensor.device}, the tensors are on {device}")
    return tensor
