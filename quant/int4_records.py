"""int4 on batches of records: what attention, kernels' tests and measurements call. Blocks go through Int4Codec.

A record is 16 tokens of one KV head of one layer; P records make a batch. Pure functions; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from quant.codec import CodecError
from quant.error_bound import DEFAULT_ERROR_BOUND
from quant.int4_decode import (
    decode_keys,
    decode_values,
    decode_values_rotated,
    key_scales,
    unpack_keys,
    unpack_values,
    validate_keys,
    validate_values,
    value_scales,
)
from quant.int4_encode import encode_keys, encode_values
from quant.native import codec as native
from quant.record_layout import RUN_TOKENS, RecordLayout, record_layout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PIECE_ELEMENTS = 1 << 18  # of K or V
Decoded: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"


@dataclass(frozen=True, slots=True)
class RecordParts:
    """A record batch taken apart. keys = (key_codes - key_zeros) * key_scales, the same for rotated values.

    key_codes uint8 [P, 16, Dk]; key_scales, key_zeros float32 [P, Dk]; value_codes uint8 [P, 16, Dv];
    value_scales, value_zeros float32 [P, 16]. The value parts are None for latents.
    """

    key_codes: torch.Tensor
    key_scales: torch.Tensor
    key_zeros: torch.Tensor
    value_codes: torch.Tensor | None
    value_scales: torch.Tensor | None
    value_zeros: torch.Tensor | None


def _check_input(keys: torch.Tensor, values: torch.Tensor | None) -> None:
    for name, tensor in (("keys", keys), ("values", values)):
        if tensor is None:
            continue
        if tensor.ndim != 3 or tensor.shape[1] != RUN_TOKENS or tensor.dtype not in _DTYPES:
            raise CodecError(
                f"{name} must be [records, {RUN_TOKENS}, dim] in bfloat16, float16 or float32, "
                f"got {list(tensor.shape)} {tensor.dtype}"
            )
    if values is not None and values.shape[0] != keys.shape[0]:
        raise CodecError(f"keys hold {keys.shape[0]} records, values {values.shape[0]}")


def _layout_of(records: torch.Tensor, dims: tuple[int, int], bits: tuple[int, int]) -> RecordLayout:
    layout = record_layout(*dims, *bits)
    if records.ndim != 2 or records.dtype != torch.uint8 or records.shape[1] != layout.record_bytes:
        raise CodecError(
            f"records must be uint8 [records, {layout.record_bytes}] for dims {dims} at bits {bits}, "
            f"got {list(records.shape)} {records.dtype}"
        )
    return layout


def _pieces(count: int, dims: tuple[int, int]) -> list[slice]:
    step = max(1, PIECE_ELEMENTS // (RUN_TOKENS * max(dims)))
    return [slice(start, min(count, start + step)) for start in range(0, count, step)]


def _as_blocks(keys: torch.Tensor, values: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[P, 16, dim] as P blocks of one layer and head."""
    return keys[:, None, None], None if values is None else values[:, None, None]


def _consecutive(records: torch.Tensor) -> torch.Tensor:
    return records if records.stride(-1) == 1 else records.contiguous()


def encode_records_into(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    records: torch.Tensor,
    layout: RecordLayout,
    error_bound: float = DEFAULT_ERROR_BOUND,
) -> torch.Tensor:
    """One cache-sized batch, unchecked: [P, 16, dim] into records uint8 [P, record_bytes]; bool [P] accepted."""
    accepted = encode_keys(keys, records, layout, error_bound)
    if values is not None:
        accepted &= encode_values(values, records, layout, error_bound)
    records[:, layout.used_bytes :] = 0
    return accepted


def encode_records_checked(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    *,
    key_bits: int = 4,
    value_bits: int = 4,
    error_bound: float = DEFAULT_ERROR_BOUND,
) -> tuple[torch.Tensor, torch.Tensor]:
    """keys [P, 16, Dk], values [P, 16, Dv] or None, bf16/fp16/fp32 -> (uint8 [P, record_bytes], bool [P] accepted).

    Raises CodecError for shapes and dtypes. The bytes of a record that is not accepted are unspecified.
    """
    _check_input(keys, values)
    dims = keys.shape[-1], 0 if values is None else values.shape[-1]
    layout = record_layout(*dims, key_bits, value_bits)
    records = torch.empty((keys.shape[0], layout.record_bytes), dtype=torch.uint8, device=keys.device)
    if native.usable(keys, values):
        return records, native.encode_blocks(*_as_blocks(keys, values), records, layout, error_bound)
    accepted = torch.ones(keys.shape[0], dtype=torch.bool, device=keys.device)
    for part in _pieces(keys.shape[0], dims):
        some = None if values is None else values[part]
        accepted[part] = encode_records_into(keys[part], some, records[part], layout, error_bound)
    return records, accepted


def encode_records(
    keys: torch.Tensor, values: torch.Tensor | None, *, key_bits: int = 4, value_bits: int = 4
) -> torch.Tensor:
    """As encode_records_checked, records only; for callers that know their values to be fit (tests, measurements)."""
    return encode_records_checked(keys, values, key_bits=key_bits, value_bits=value_bits)[0]


def decode_records_into(
    records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, layout: RecordLayout
) -> None:
    """One cache-sized batch, unchecked: records into keys and values of any shape with P*16*dim elements."""
    decode_keys(records, keys, layout)
    if values is not None:
        decode_values(records, values, layout)


def _decode(
    records: torch.Tensor, dims: tuple[int, int], dtype: torch.dtype, bits: tuple[int, int], out: Decoded | None
) -> tuple[RecordLayout, torch.Tensor, torch.Tensor | None]:
    """Checked arguments: the layout, and where keys and values go."""
    layout = _layout_of(records, dims, bits)
    if dtype not in _DTYPES:
        raise CodecError(f"int4 decodes to bfloat16, float16 or float32, not {dtype}")
    shapes = [(records.shape[0], RUN_TOKENS, dim) for dim in dims]
    if out is None:
        made = [torch.empty(shape, dtype=dtype, device=records.device) for shape in shapes]
        return layout, made[0], made[1] if dims[1] else None
    for tensor, shape in zip(out, shapes if dims[1] else shapes[:1], strict=False):
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != records.device:
            given = None if tensor is None else f"{list(tensor.shape)} {tensor.dtype} {tensor.device}"
            raise CodecError(f"out must hold {list(shape)} {dtype} on {records.device}, got {given}")
    return layout, out[0], out[1] if dims[1] else None


def decode_records(
    records: torch.Tensor,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    key_bits: int = 4,
    value_bits: int = 4,
    out: Decoded | None = None,
) -> Decoded:
    """records uint8 [P, record_bytes] -> (keys [P, 16, Dk], values [P, 16, Dv] or None) in `dtype`.

    `out`: tensors to fill and return instead of fresh ones (which cost more than the decoding, in page faults).
    Raises CodecError for shapes and dtypes; any bytes decode (see validate_records).
    """
    dims = (key_dim, value_dim)
    layout, keys, values = _decode(records, dims, dtype, (key_bits, value_bits), out)
    if native.usable(records):
        native.decode_blocks(_consecutive(records), *_as_blocks(keys, values), layout)
        return keys, values
    for part in _pieces(records.shape[0], dims):
        decode_records_into(records[part], keys[part], None if values is None else values[part], layout)
    return keys, values


def decode_records_rotated(
    records: torch.Tensor,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    key_bits: int = 4,
    value_bits: int = 4,
    out: Decoded | None = None,
) -> Decoded:
    """As decode_records, but values stay rotated: sum softmax weights times them, then `rotate_back` once per head."""
    dims = (key_dim, value_dim)
    layout, keys, values = _decode(records, dims, dtype, (key_bits, value_bits), out)
    if native.usable(records):
        native.decode_blocks(_consecutive(records), *_as_blocks(keys, values), layout, rotated=True)
        return keys, values
    for part in _pieces(records.shape[0], dims):
        decode_keys(records[part], keys[part], layout)
        if values is not None:
            decode_values_rotated(records[part], values[part], layout)
    return keys, values


def unpack_records(
    records: torch.Tensor, key_dim: int, value_dim: int, *, key_bits: int = 4, value_bits: int = 4
) -> RecordParts:
    """Codes, scales and zero points, for attention that folds K's scales into the query."""
    layout = _layout_of(records, (key_dim, value_dim), (key_bits, value_bits))
    count, device = records.shape[0], records.device
    keys = torch.empty((count, RUN_TOKENS, key_dim), dtype=torch.uint8, device=device)
    values = torch.empty((count, RUN_TOKENS, value_dim), dtype=torch.uint8, device=device)
    for part in _pieces(count, (key_dim, value_dim)):
        unpack_keys(records[part], keys[part], layout)
        if value_dim:
            unpack_values(records[part], values[part], layout)
    if not value_dim:
        return RecordParts(keys, *key_scales(records, layout), None, None, None)
    return RecordParts(keys, *key_scales(records, layout), values, *value_scales(records, layout))


def validate_records(
    records: torch.Tensor, key_dim: int, value_dim: int, *, key_bits: int = 4, value_bits: int = 4
) -> torch.Tensor:
    """bool [P]: scale codes in 0x01..0x7e, bases within [2^-100, 2^106], 3-bit zero points below 8, padding zero.

    True means that every decoded number is finite. Code bytes themselves have no invalid value.
    """
    layout = _layout_of(records, (key_dim, value_dim), (key_bits, value_bits))
    if native.usable(records):
        return native.validate_blocks(_consecutive(records), layout, (1, 1, 1))
    good = validate_keys(records, layout)
    return good & validate_values(records, layout) if value_dim else good
