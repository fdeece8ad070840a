"""The normative int4 arithmetic, in torch, on batches of records. docs/formats/int4.md says the same in words.

Every product, sum and division below is one IEEE fp32 operation rounded to nearest even; none may be fused or
reordered. Where an order or a fusing could not change the result (integers, products that are exact), the comment
says so. Functions are pure; any thread; callers pass cache-sized batches (see record_codec).

Names: P records, 16 tokens, Dk = key_dim, Dv = value_dim, M = P * 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from quant.codec import CodecError
from quant.error_bound import (
    DEFAULT_ERROR_BOUND,
    ERROR_STEPS,
    e4m3_values,
    in_range,
    part_bound,
    scale_weights,
    within_bound,
)
from quant.record_layout import RUN_TOKENS, RecordLayout, record_layout
from quant.rotation import butterflies, signed_hadamard, signs, unit

BASE_FACTOR = 1.06 / 448.0
BASE_FLOOR = 2.0**-100
BASE_CEILING = 2.0**106
SCALE_FLOOR = 2.0**-9
_NEGATED_127TH = -1.0 / 127.0
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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


# ------------------------------------------------------------------ scales


def _scale_base(scales: torch.Tensor) -> torch.Tensor:
    """S, as float32 [P, 1] holding bf16 values, from the true scales float32 [P, n]."""
    base = (scales.amax(1, keepdim=True) * BASE_FACTOR).clamp_min(BASE_FLOOR)
    return base.to(torch.bfloat16).to(torch.float32)


def _scale_codes(scales: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """e4m3 bytes, uint8 [P, n], of scales / base (a true division), at least 2^-9."""
    return torch.div(scales, base).clamp_min(SCALE_FLOOR).to(torch.float8_e4m3fn).view(torch.uint8)


def _decoded_scale(codes: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """float32 [P, n]: e4m3 value times S; exact, since 4 + 8 significant bits fit."""
    return e4m3_values(codes.device)[codes.to(torch.int64)] * base


def _reciprocal(scales: torch.Tensor) -> torch.Tensor:
    return torch.div(torch.ones((), dtype=torch.float32, device=scales.device), scales)


def _store_base(records: torch.Tensor, offset: int, base: torch.Tensor) -> None:
    records[:, offset : offset + 2] = base.to(torch.bfloat16).view(torch.uint8)


# ------------------------------------------------------------------ encode


def _code(scaled: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From x/s + z (overwritten): codes float32 and 64ths of a step of error, rint(64 (x/s + z - q)), float32."""
    codes = torch.round(scaled).clamp_(0, top)
    return codes, scaled.sub_(codes).mul_(ERROR_STEPS).round_()


def _encode_keys(keys: torch.Tensor, records: torch.Tensor, layout: RecordLayout, bound: float) -> torch.Tensor:
    """keys float32 [P, 16, Dk] into records uint8 [P, record_bytes]; bool [P]."""
    count, _, dim = keys.shape
    top = (1 << layout.key_bits) - 1
    low, high = torch.aminmax(keys, dim=1)
    scales = torch.maximum((high - low) * (1.0 / top), torch.maximum(low * _NEGATED_127TH, low * (1.0 / 128.0)))
    base = _scale_base(scales)
    scale_codes = _scale_codes(scales, base)
    down = -low
    zeros = torch.round(down * _reciprocal(_decoded_scale(scale_codes, base)))
    scale_codes = scale_codes + ((zeros < -128.0) | (zeros > 127.0)).to(torch.uint8)
    inverse = _reciprocal(_decoded_scale(scale_codes, base))
    zeros = torch.round(down * inverse)
    codes, errors = _code((keys * inverse[:, None]).add_(zeros[:, None]), top)

    packed = codes.to(torch.uint8)
    offsets = codes.sub_(zeros[:, None])
    weights = scale_weights(e4m3_values(keys.device)[scale_codes.to(torch.int64)])
    # Integers below 2^24 in fp32: the order of these two sums does not matter.
    squared_errors = errors.square_().sum(1).to(torch.float64)
    squared_codes = offsets.square_().sum(1).to(torch.float64)
    accepted = within_bound(weights, squared_errors, squared_codes, part_bound(bound, layout.key_bits))

    if layout.key_bits == 5:
        _pack_plane(packed, records[:, layout.key_plane : layout.key_plane + 2 * dim])
        packed = packed & 15
    half = dim // 2
    nibbles = packed[..., :half] | (packed[..., half:] << 4)  # [P, 16, Dk/2]
    quads = nibbles.view(torch.int32).transpose(1, 2).contiguous()  # [P, Dk/8, 16] of 4 channels
    records[:, : 8 * dim] = quads.view(torch.uint8).view(count, 8 * dim)
    records[:, layout.key_scales : layout.key_scales + dim] = scale_codes
    records[:, layout.key_zeros : layout.key_zeros + dim] = zeros.clamp(-128.0, 127.0).to(torch.int8).view(torch.uint8)
    _store_base(records, layout.key_base, base)
    return accepted & in_range(torch.stack((low, high), 1))


def _pack_plane(codes: torch.Tensor, plane: torch.Tensor) -> None:
    """Bit 4 of codes uint8 [P, 16, Dk] into plane uint8 [P, 2 Dk]: byte 8 (c/4) + t/2, bit 4 (t%2) + c%4."""
    count, _, dim = codes.shape
    bits = (codes >> 4).view(count, 8, 2, dim // 4, 4) << _bit_positions(codes.device).view(2, 1, 4)
    plane.copy_(bits.sum((2, 4), dtype=torch.uint8).transpose(1, 2).reshape(count, 2 * dim))


@lru_cache(maxsize=8)
def _bit_positions(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def encode_values_checked(
    values: torch.Tensor, records: torch.Tensor, layout: RecordLayout, bound: float
) -> torch.Tensor:
    """values float32 [P, 16, Dv] into records; bool [P]. Works on [Dv, M] so that butterflies run along rows."""
    count, _, dim = values.shape
    top = (1 << layout.value_bits) - 1
    rows = torch.empty((dim, count * RUN_TOKENS), dtype=torch.float32, device=values.device)
    rows.copy_(values.reshape(-1, dim).t())
    finite = in_range(values)
    rotated = butterflies(rows.mul_(signs(dim, values.device)[:, None]))
    norm = unit(dim)
    low = rotated.amin(0).clamp_max_(0.0).mul_(norm).view(count, RUN_TOKENS)
    high = rotated.amax(0).clamp_min_(0.0).mul_(norm).view(count, RUN_TOKENS)
    scales = (high - low) * (1.0 / top)
    base = _scale_base(scales)
    scale_codes = _scale_codes(scales, base)
    inverse = _reciprocal(_decoded_scale(scale_codes, base))
    zeros = torch.round(-low * inverse).clamp_(0.0, float(top))
    factor = (inverse * norm).view(1, -1)
    codes, errors = _code(rotated.mul_(factor).add_(zeros.view(1, -1)), top)

    packed = codes.to(torch.uint8)
    offsets = codes.sub_(zeros.view(1, -1))
    weights = scale_weights(e4m3_values(values.device)[scale_codes.to(torch.int64)])
    squared_errors = errors.square_().sum(0).view(count, RUN_TOKENS).to(torch.float64)
    squared_codes = offsets.square_().sum(0).view(count, RUN_TOKENS).to(torch.float64)
    accepted = within_bound(weights, squared_errors, squared_codes, part_bound(bound, layout.value_bits))

    _pack_values(packed.view(dim, count, RUN_TOKENS), records, layout)
    zero_bytes = zeros.to(torch.uint8)
    records[:, layout.value_scales : layout.value_scales + 16] = scale_codes
    records[:, layout.value_zeros : layout.value_zeros + 8] = zero_bytes[:, :8] | (zero_bytes[:, 8:] << 4)
    _store_base(records, layout.value_base, base)
    return accepted & finite


def _pack_values(codes: torch.Tensor, records: torch.Tensor, layout: RecordLayout) -> None:
    """Codes uint8 [Dv, P, 16] into the record's value codes (and value plane)."""
    dim, count, _ = codes.shape
    if layout.value_bits == 4:
        lines = codes[..., :8] | (codes[..., 8:] << 4)  # [Dv, P, 8]
    else:
        low = (codes & 3).view(dim, count, 4, 4)
        lines = low[:, :, 0] | (low[:, :, 1] << 2) | (low[:, :, 2] << 4) | (low[:, :, 3] << 6)  # [Dv, P, 4]
        # plane byte (t/4)(Dv/2) + d/2, bit 4 (d%2) + t%4
        bits = (codes >> 2).view(dim // 2, 2, count, 4, 4) << _bit_positions(codes.device).view(2, 1, 1, 4)
        plane = bits.sum((1, 4), dtype=torch.uint8).permute(1, 2, 0)  # [P, 4, Dv/2]
        records[:, layout.value_plane : layout.value_plane + 2 * dim] = plane.reshape(count, 2 * dim)
    words = lines.contiguous().view(torch.int32).permute(1, 2, 0).contiguous()  # [P, 2 or 1, Dv] of 4 tokens
    end = layout.value_codes + words.shape[1] * 4 * dim
    records[:, layout.value_codes : end] = words.view(torch.uint8).view(count, -1)


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
    _check_records_input(keys, values)
    layout = record_layout(keys.shape[-1], 0 if values is None else values.shape[-1], key_bits, value_bits)
    records = torch.zeros((keys.shape[0], layout.record_bytes), dtype=torch.uint8, device=keys.device)
    if not keys.shape[0]:
        return records, torch.ones(0, dtype=torch.bool, device=keys.device)
    accepted = _encode_keys(keys.to(torch.float32), records, layout, error_bound)
    if values is not None:
        accepted &= encode_values_checked(values.to(torch.float32), records, layout, error_bound)
    return records, accepted


def encode_records(
    keys: torch.Tensor, values: torch.Tensor | None, *, key_bits: int = 4, value_bits: int = 4
) -> torch.Tensor:
    """As encode_records_checked, records only; for callers that know their values to be fit (tests, measurements)."""
    return encode_records_checked(keys, values, key_bits=key_bits, value_bits=value_bits)[0]


def _check_records_input(keys: torch.Tensor, values: torch.Tensor | None) -> None:
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


# ------------------------------------------------------------------ decode


def _layout_of(records: torch.Tensor, key_dim: int, value_dim: int, key_bits: int, value_bits: int) -> RecordLayout:
    layout = record_layout(key_dim, value_dim, key_bits, value_bits)
    if records.ndim != 2 or records.dtype != torch.uint8 or records.shape[1] < layout.used_bytes:
        raise CodecError(
            f"records must be uint8 [records, {layout.record_bytes}] for dims {key_dim}/{value_dim} at "
            f"{key_bits}/{value_bits} bits, got {list(records.shape)} {records.dtype}"
        )
    return layout


def _words(records: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes [start, stop) of each record as int32 [P, n]; copies only where alignment asks for it."""
    part = records[:, start:stop]
    if part.storage_offset() % 4 or part.stride(0) % 4 or part.stride(1) != 1:
        part = part.contiguous()
    return part.view(torch.int32)


def _base(records: torch.Tensor, offset: int) -> torch.Tensor:
    return records[:, offset : offset + 2].contiguous().view(torch.bfloat16).to(torch.float32)


def _key_codes(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """uint8 [P, 16, Dk]."""
    count, dim = records.shape[0], layout.key_dim
    half = dim // 2
    quads = _words(records, 0, 8 * dim).view(count, dim // 8, RUN_TOKENS)
    nibbles = quads.transpose(1, 2).contiguous().view(torch.uint8)  # [P, 16, Dk/2]
    codes = torch.empty((count, RUN_TOKENS, dim), dtype=torch.uint8, device=records.device)
    torch.bitwise_and(nibbles, 15, out=codes[..., :half])
    torch.bitwise_right_shift(nibbles, 4, out=codes[..., half:])
    if layout.key_bits == 5:
        plane = records[:, layout.key_plane : layout.key_plane + 2 * dim].reshape(count, dim // 4, 8, 1, 1)
        bits = (plane >> _bit_positions(records.device).view(2, 4)) & 1  # [P, Dk/4, 8, 2, 4]
        codes |= bits.permute(0, 2, 3, 1, 4).reshape(count, RUN_TOKENS, dim) << 4
    return codes


def _key_scales(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded scales, zeros), float32 [P, Dk] each."""
    dim = layout.key_dim
    codes = records[:, layout.key_scales : layout.key_scales + dim]
    zeros = records[:, layout.key_zeros : layout.key_zeros + dim].view(torch.int8).to(torch.float32)
    return _decoded_scale(codes, _base(records, layout.key_base)), zeros


def _value_codes(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """uint8 [P, 16, Dv]."""
    count, dim = records.shape[0], layout.value_dim
    lines = 2 if layout.value_bits == 4 else 1
    words = _words(records, layout.value_codes, layout.value_codes + lines * 4 * dim).view(count, lines, dim)
    shifts = (8 * _bit_positions(records.device)[:4]).to(torch.int32).view(1, 1, 4, 1)
    octets = (words[:, :, None] >> shifts).to(torch.uint8).view(count, 4 * lines, dim)  # [P, 8 or 4, Dv]
    if layout.value_bits == 4:
        return torch.cat((octets & 15, octets >> 4), 1)
    low = torch.cat([(octets >> (2 * quad)) & 3 for quad in range(4)], 1)
    plane = records[:, layout.value_plane : layout.value_plane + 2 * dim].reshape(count, 4, 1, dim // 2, 1)
    bits = (plane >> _bit_positions(records.device).view(2, 4).t().reshape(4, 1, 2)) & 1  # [P, 4, 4, Dv/2, 2]
    return low | (bits.reshape(count, RUN_TOKENS, dim) << 2)


def _value_scales(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded scales, zeros), float32 [P, 16] each."""
    codes = records[:, layout.value_scales : layout.value_scales + 16]
    packed = records[:, layout.value_zeros : layout.value_zeros + 8]
    zeros = torch.cat((packed & 15, packed >> 4), 1).to(torch.float32)
    return _decoded_scale(codes, _base(records, layout.value_base)), zeros


def _affine(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """(codes - zeros) * scales in fp32. q*s, z*s and their difference have at most 21 significant bits: all exact."""
    return torch.addcmul(-(zeros * scales), codes.to(torch.float32), scales)


def _put(target: torch.Tensor, decoded: torch.Tensor) -> None:
    """Round to the target's dtype, to nearest even; float16 saturates at its largest finite value."""
    if target.dtype == torch.float16:
        decoded.clamp_(-65504.0, 65504.0)
    target.copy_(decoded.view(target.shape))


def decode_records_into(
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    layout: RecordLayout,
    *,
    rotated: bool = False,
) -> None:
    """records uint8 [P, >= used_bytes] into keys and values of any shape with P*16*dim elements, any strides.

    `rotated`: values stay in rotated space.
    """
    scales, zeros = _key_scales(records, layout)
    _put(keys, _affine(_key_codes(records, layout), zeros[:, None], scales[:, None]))
    if values is not None:
        decode_values_into(records, values, layout, rotated=rotated)


def decode_values_into(
    records: torch.Tensor, values: torch.Tensor, layout: RecordLayout, *, rotated: bool = False
) -> None:
    """The value part of decode_records_into; also that of int8k records."""
    codes = _value_codes(records, layout)
    scales, zeros = _value_scales(records, layout)
    if rotated:
        _put(values, _affine(codes, zeros[..., None], scales[..., None]))
        return
    offsets = codes.to(torch.float32).sub_(zeros[..., None]).view(-1, layout.value_dim)
    # Small integers: exact in fp32 whatever the order of the products. 0 + u t makes a zero positive, rounds once.
    whole = torch.matmul(offsets, signed_hadamard(layout.value_dim, records.device))
    factor = (scales * unit(layout.value_dim)).view(-1, 1)
    _put(values, torch.addcmul(torch.zeros((), device=whole.device), whole, factor))


def _decode(
    records: torch.Tensor, dims: tuple[int, int], dtype: torch.dtype, bits: tuple[int, int], rotated: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    layout = _layout_of(records, *dims, *bits)
    if dtype not in _DTYPES:
        raise CodecError(f"int4 decodes to bfloat16, float16 or float32, not {dtype}")
    count = records.shape[0]
    keys = torch.empty((count, RUN_TOKENS, dims[0]), dtype=dtype, device=records.device)
    values = torch.empty((count, RUN_TOKENS, dims[1]), dtype=dtype, device=records.device) if dims[1] else None
    step = max(1, (1 << 17) // (RUN_TOKENS * max(dims)))
    for start in range(0, count, step):
        part = slice(start, start + step)
        decode_records_into(
            records[part], keys[part], None if values is None else values[part], layout, rotated=rotated
        )
    return keys, values


def decode_records(
    records: torch.Tensor,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    key_bits: int = 4,
    value_bits: int = 4,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """records uint8 [P, record_bytes] -> (keys [P, 16, Dk], values [P, 16, Dv] or None) in `dtype`.

    Raises CodecError for shapes and dtypes; any bytes decode (see validate_records).
    """
    return _decode(records, (key_dim, value_dim), dtype, (key_bits, value_bits), rotated=False)


def decode_records_rotated(
    records: torch.Tensor,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
    *,
    key_bits: int = 4,
    value_bits: int = 4,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As decode_records, but values stay rotated: sum softmax weights times them, then `rotate_back` once per head."""
    return _decode(records, (key_dim, value_dim), dtype, (key_bits, value_bits), rotated=True)


def unpack_records(
    records: torch.Tensor, key_dim: int, value_dim: int, *, key_bits: int = 4, value_bits: int = 4
) -> RecordParts:
    """Codes, scales and zero points, for attention that folds K's scales into the query."""
    layout = _layout_of(records, key_dim, value_dim, key_bits, value_bits)
    scales, zeros = _key_scales(records, layout)
    codes = _key_codes(records, layout)
    if not value_dim:
        return RecordParts(codes, scales, zeros, None, None, None)
    return RecordParts(codes, scales, zeros, _value_codes(records, layout), *_value_scales(records, layout))


def validate_records(
    records: torch.Tensor, key_dim: int, value_dim: int, *, key_bits: int = 4, value_bits: int = 4
) -> torch.Tensor:
    """bool [P]: scale codes in 0x01..0x7e, bases within [2^-100, 2^106], 3-bit zero points below 8, padding zero.

    True means that every decoded number is finite. Code bytes themselves have no invalid value.
    """
    layout = _layout_of(records, key_dim, value_dim, key_bits, value_bits)
    scales = records[:, layout.key_scales : layout.key_scales + key_dim]
    good = _good_scales(scales, _base(records, layout.key_base)) & records[:, layout.used_bytes :].eq(0).all(1)
    return good & validate_value_scales(records, layout) if value_dim else good


def validate_value_scales(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """The value part of validate_records; also that of int8k records. bool [P]."""
    scales = records[:, layout.value_scales : layout.value_scales + 16]
    good = _good_scales(scales, _base(records, layout.value_base))
    if layout.value_bits == 3:
        good &= (records[:, layout.value_zeros : layout.value_zeros + 8] & 0x88).eq(0).all(1)
    return good


def _good_scales(codes: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    good = ((codes >= 1) & (codes <= 0x7E)).all(1)
    return good & ((base >= BASE_FLOOR) & (base <= BASE_CEILING)).all(1)
