"""Codec "raw": the cache's own bytes in the design's order, for any cache dtype, FP8 included. Exact.

Payload: [layers, kv_heads, (K, V), block_tokens, dim], little-endian, no padding. Stateless; any thread.
"""

from __future__ import annotations

import torch

from quant.codec import BlockShape, CodecError, DtypeName, Payload
from quant.tensor_checks import as_payload, check_block_shape, check_out, resolve_dtype, shape_of


def _bytes_of(tensor: torch.Tensor, shape: BlockShape) -> torch.Tensor:
    """[..., L, H, T, D] -> uint8 [..., L, H, T*D*itemsize], a view where strides allow."""
    flat = tensor.flatten(-2) if tensor.is_contiguous() else tensor.reshape(*tensor.shape[:-2], -1)
    return flat.view(torch.uint8)


class RawCodec:
    """Bit-exact copies; NaN payloads and negative zeros included."""

    name = "raw"
    exact = True

    def parameters(self) -> bytes:
        """None: the dtype stands in the frame header and in the identity."""
        return b""

    def encoded_bytes(self, shape: BlockShape, dtype: DtypeName) -> int:
        """Payload bytes of one block. Raises CodecError."""
        check_block_shape(shape)
        return shape.element_count * resolve_dtype(dtype).itemsize

    def _parts(self, payload: torch.Tensor, shape: BlockShape, itemsize: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views uint8 [..., L, H, bytes] of K and V in payload [..., encoded_bytes]."""
        key_bytes = shape.block_tokens * shape.key_dim * itemsize
        value_bytes = shape.block_tokens * shape.value_dim * itemsize
        heads = payload.view(*payload.shape[:-1], shape.layers, shape.kv_heads, key_bytes + value_bytes)
        return heads[..., :key_bytes], heads[..., key_bytes:]

    def encode_into(self, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor) -> None:
        """Copy [..., L, H, T, dim] into out [..., encoded_bytes]. Raises CodecError."""
        shape = shape_of(keys, values, batch_dims=max(0, keys.ndim - 4))
        check_out(out, (*keys.shape[:-4], self.encoded_bytes(shape, keys.dtype)), keys.device)
        key_part, value_part = self._parts(out, shape, keys.dtype.itemsize)
        key_part.copy_(_bytes_of(keys, shape))
        if values is not None and shape.value_dim:
            value_part.copy_(_bytes_of(values, shape))

    def encode_batch(self, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """As encode_into for [N, L, H, T, dim]; all True."""
        shape_of(keys, values, batch_dims=1)
        self.encode_into(keys, values, out)
        return torch.ones(keys.shape[0], dtype=torch.bool, device=keys.device)

    def encode(self, keys: torch.Tensor, values: torch.Tensor | None) -> bytes:
        """Payload of one block. Raises CodecError."""
        shape = shape_of(keys, values, batch_dims=0)
        out = torch.empty(self.encoded_bytes(shape, keys.dtype), dtype=torch.uint8, device=keys.device)
        self.encode_into(keys, values, out)
        return out.cpu().numpy().tobytes()

    def decode_into(self, payload: Payload, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Copy payload [..., encoded_bytes] into keys and values, whose dtype must be the stored one."""
        shape = shape_of(keys, values, batch_dims=max(0, keys.ndim - 4))
        resolve_dtype(keys.dtype)
        source = as_payload(payload, (*keys.shape[:-4], self.encoded_bytes(shape, keys.dtype)), keys.device)
        if source.storage_offset() % keys.dtype.itemsize:
            source = source.clone()
        parts = self._parts(source, shape, keys.dtype.itemsize)
        for part, target in zip(parts, (keys, values), strict=True):
            if target is not None and target.shape[-1]:
                target.copy_(part.contiguous().view(target.dtype).view(target.shape))

    def decode(self, payload: Payload, shape: BlockShape, dtype: DtypeName) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Keys and values of one block, bit for bit. Raises CodecError for a wrong length."""
        kind = resolve_dtype(dtype)
        device = payload.device if isinstance(payload, torch.Tensor) else torch.device("cpu")
        source = as_payload(payload, (self.encoded_bytes(shape, kind),), device)
        keys = torch.empty(shape.keys_shape, dtype=kind, device=device)
        values = torch.empty(shape.values_shape, dtype=kind, device=device) if shape.value_dim else None
        self.decode_into(source, keys, values)
        return keys, values

    def validate(self, payload: Payload, shape: BlockShape, dtype: DtypeName) -> torch.Tensor:
        """bool [...]: the length fits. Any bytes are a raw block."""
        source = as_payload(payload, None, None)
        fits = source.ndim > 0 and source.shape[-1] == self.encoded_bytes(shape, dtype)
        return torch.full(source.shape[:-1], fits, dtype=torch.bool, device=source.device)


__all__ = ["CodecError", "RawCodec"]
