"""The normative int4 encoder, in torch, on batches of records. docs/formats/int4.md says the same in words.

Every product, sum and division is one IEEE fp32 operation rounded to nearest even; none may be fused or reordered.
Where an order or a fusing could not change the result (integers below 2^24, exact products), the comment says so.
Any thread; work buffers are the thread's own. Callers pass cache-sized batches (see record_codec).

Names: P records of 16 tokens, Dk = key_dim, Dv = value_dim, M = 16 P.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from quant.error_bound import ERROR_STEPS, MAGNITUDE_LIMIT, part_bound, scale_weights, within_bound
from quant.int4_scales import decoded_scale, e4m3, reciprocal, scale_base, scale_codes, store_base
from quant.record_layout import RUN_TOKENS, RecordLayout
from quant.rotation import butterflies, signs, unit
from quant.scratch import scratch

_NEGATED_127TH = -1.0 / 127.0
_INTEGER_BITS = 8388608.0  # 2^23: x + 2^23 holds the integer x in its low bits


@lru_cache(maxsize=8)
def bit_positions(device: torch.device) -> torch.Tensor:
    """uint8 [8]: 0, 1, ... 7."""
    return torch.arange(8, dtype=torch.uint8, device=device)


def _as_bytes(integers: torch.Tensor, name: str) -> torch.Tensor:
    """uint8 copy of float32 integers 0..255 (overwritten), contiguous."""
    words = integers.add_(_INTEGER_BITS).view(torch.int32)
    return scratch(name, tuple(words.shape), torch.uint8, words.device).copy_(words)


def _quantize(
    scaled: torch.Tensor, codes: torch.Tensor, zeros: torch.Tensor, top: int, over: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """From x/s + z in `scaled` (overwritten): q into `codes`; sums of rint(64 e)^2 and of (q - z)^2 over dim `over`.

    The sums are of integers and below 2^24, so fp32 carries them exactly in any order.
    """
    torch.round(scaled, out=codes).clamp_(0.0, float(top))
    errors = scaled.sub_(codes).mul_(ERROR_STEPS).round_().square_().sum(over)
    offsets = torch.sub(codes, zeros, out=scaled).square_().sum(over)
    return errors.to(torch.float64), offsets.to(torch.float64)


def encode_keys(keys: torch.Tensor, records: torch.Tensor, layout: RecordLayout, bound: float) -> torch.Tensor:
    """keys [P, 16, Dk], any strides, into records uint8 [P, record_bytes]; bool [P] accepted."""
    count, _, dim = keys.shape
    device = keys.device
    top = (1 << layout.key_bits) - 1
    x = scratch("x", (count, RUN_TOKENS, dim), torch.float32, device).copy_(keys)
    low, high = x.amin(1), x.amax(1)
    scales = torch.maximum((high - low) * (1.0 / top), torch.maximum(low * _NEGATED_127TH, low * (1.0 / 128.0)))
    base = scale_base(scales)
    codes_of_scales = scale_codes(scales, base)
    down = -low
    zeros = torch.round(down * reciprocal(decoded_scale(codes_of_scales, base)))
    codes_of_scales += ((zeros < -128.0) | (zeros > 127.0)).to(torch.uint8)
    inverse = reciprocal(decoded_scale(codes_of_scales, base))
    zeros = torch.round(down * inverse)

    scaled = scratch("scaled", (count, RUN_TOKENS, dim), torch.float32, device)
    torch.mul(x, inverse[:, None], out=scaled).add_(zeros[:, None])
    squares = _quantize(scaled, x, zeros[:, None], top, over=1)
    accepted = within_bound(scale_weights(e4m3(codes_of_scales)), *squares, part_bound(bound, layout.key_bits))

    quads = _pack_keys(x, scaled, records, layout).view(torch.int32).transpose(1, 2)  # [P, Dk/8, 16] of 4 channels
    records[:, : 8 * dim].view(torch.int32).view(count, dim // 8, RUN_TOKENS).copy_(quads)
    records[:, layout.key_scales : layout.key_scales + dim] = codes_of_scales
    records[:, layout.key_zeros : layout.key_zeros + dim] = zeros.clamp_(-128.0, 127.0).to(torch.int8).view(torch.uint8)
    store_base(records, layout.key_base, base)
    in_range = (high < MAGNITUDE_LIMIT) & (low > -MAGNITUDE_LIMIT)  # False for NaN
    return accepted & in_range.all(1)


def _pack_keys(codes: torch.Tensor, spare: torch.Tensor, records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Codes float32 [P, 16, Dk] (overwritten) -> bytes uint8 [P, 16, Dk/2]; bit 4 goes to the key plane."""
    count, _, dim = codes.shape
    half = dim // 2
    if layout.key_bits == 4:
        pairs = spare.view(-1)[: count * RUN_TOKENS * half].view(count, RUN_TOKENS, half)
        return _as_bytes(torch.add(codes[..., :half], codes[..., half:], alpha=16, out=pairs), "bytes")
    whole = _as_bytes(codes, "bytes")
    # plane byte 8 (c/4) + t/2, bit 4 (t%2) + c%4
    bits = (whole >> 4).view(count, 8, 2, dim // 4, 4) << bit_positions(codes.device).view(2, 1, 4)
    plane = bits.sum((2, 4), dtype=torch.uint8).transpose(1, 2)
    records[:, layout.key_plane : layout.key_plane + 2 * dim] = plane.reshape(count, 2 * dim)
    whole &= 15
    return whole[..., :half] | (whole[..., half:] << 4)


def _token_order(rows: torch.Tensor) -> torch.Tensor:
    """[P, 16] -> [M] in the column order of encode_values: tokens 0-7 of all records, then tokens 8-15."""
    return rows.view(-1, 2, 8).transpose(0, 1).reshape(-1)


def _record_order(columns: torch.Tensor) -> torch.Tensor:
    """Inverse of _token_order: [M] -> [P, 16]."""
    return columns.view(2, -1, 8).transpose(0, 1).reshape(-1, RUN_TOKENS)


def encode_values(values: torch.Tensor, records: torch.Tensor, layout: RecordLayout, bound: float) -> torch.Tensor:
    """values [P, 16, Dv], any strides, into records; bool [P] accepted.

    Works on [Dv, M], one column a token, so that butterflies and reductions run along contiguous rows.
    """
    count, _, dim = values.shape
    device = values.device
    top = (1 << layout.value_bits) - 1
    x = scratch("x", (2, count, 8, dim), torch.float32, device)
    x.copy_(values.view(count, 2, 8, dim).transpose(0, 1))
    rows = scratch("scaled", (dim, count * RUN_TOKENS), torch.float32, device).copy_(x.view(-1, dim).t())
    in_range = (rows.amax(0) < MAGNITUDE_LIMIT) & (rows.amin(0) > -MAGNITUDE_LIMIT)  # False for NaN
    rotated, codes = butterflies(rows.mul_(signs(dim, device)[:, None]), x.view(dim, -1))
    norm = unit(dim)
    low = _record_order(rotated.amin(0).clamp_max_(0.0).mul_(norm))
    high = _record_order(rotated.amax(0).clamp_min_(0.0).mul_(norm))
    scales = (high - low) * (1.0 / top)
    base = scale_base(scales)
    codes_of_scales = scale_codes(scales, base)
    inverse = reciprocal(decoded_scale(codes_of_scales, base))
    zeros = torch.round(-low * inverse).clamp_(0.0, float(top))

    columns = _token_order(zeros)
    rotated.mul_(_token_order(inverse * norm)).add_(columns)
    squares = _quantize(rotated, codes, columns, top, over=0)
    weights = scale_weights(e4m3(codes_of_scales))
    errors, offsets = _record_order(squares[0]), _record_order(squares[1])
    accepted = within_bound(weights, errors, offsets, part_bound(bound, layout.value_bits))

    _pack_values(codes, rotated, records, layout)
    zero_bytes = zeros.to(torch.uint8)
    records[:, layout.value_scales : layout.value_scales + 16] = codes_of_scales
    records[:, layout.value_zeros : layout.value_zeros + 8] = zero_bytes[:, :8] | (zero_bytes[:, 8:] << 4)
    store_base(records, layout.value_base, base)
    return accepted & _record_order(in_range).all(1)


def _pack_values(codes: torch.Tensor, spare: torch.Tensor, records: torch.Tensor, layout: RecordLayout) -> None:
    """Codes float32 [Dv, M] (overwritten) into the value codes, and bit 2 into the value plane."""
    dim = codes.shape[0]
    count = codes.shape[1] // RUN_TOKENS
    half = count * 8
    if layout.value_bits == 4:
        pairs = spare.view(-1)[: dim * half].view(dim, half)
        lines = _as_bytes(torch.add(codes[:, :half], codes[:, half:], alpha=16, out=pairs), "bytes")
    else:
        whole = _as_bytes(codes, "bytes").view(dim, 2, count, 2, 4)
        low = whole & 3
        lines = low[:, 0, :, 0] | (low[:, 0, :, 1] << 2) | (low[:, 1, :, 0] << 4) | (low[:, 1, :, 1] << 6)
        # plane byte (t/4)(Dv/2) + d/2, bit 4 (d%2) + t%4
        bits = (whole >> 2).view(dim // 2, 2, 2, count, 2, 4) << bit_positions(codes.device).view(2, 1, 1, 1, 4)
        plane = bits.sum((1, 5), dtype=torch.uint8).permute(2, 1, 3, 0)  # [P, 2, 2, Dv/2]
        records[:, layout.value_plane : layout.value_plane + 2 * dim] = plane.reshape(count, 2 * dim)
    words = lines.view(torch.int32).view(dim, count, -1).permute(1, 2, 0)  # [P, 2 or 1, Dv] of 4 tokens
    end = layout.value_codes + words.shape[1] * 4 * dim
    records[:, layout.value_codes : end].view(torch.int32).view(words.shape).copy_(words)
