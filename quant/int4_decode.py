"""The normative int4 decoder, in torch, on batches of records, and what a valid record is.

Decoding is exact until the one rounding to the caller's dtype (but for the orthonormal factor of values, one more),
so fusing or reordering cannot change it. Any thread; work buffers are the thread's own.

Names: P records of 16 tokens, Dk = key_dim, Dv = value_dim, M = 16 P.
"""

from __future__ import annotations

import torch

from quant.int4_encode import bit_positions
from quant.int4_scales import decoded_scale, good_scales, load_base
from quant.record_layout import RUN_TOKENS, RecordLayout
from quant.rotation import butterflies, integer_signs, unit
from quant.scratch import scratch

_FP16_MAX = 65504.0


def _words(records: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Bytes [start, stop) of each record as int32 [P, n]; copies only where alignment asks for it."""
    part = records[:, start:stop]
    if part.storage_offset() % 4 or part.stride(0) % 4 or part.stride(1) != 1:
        part = part.contiguous()
        part = part if part.storage_offset() % 4 == 0 else part.clone()
    return part.view(torch.int32)


def put(target: torch.Tensor, decoded: torch.Tensor) -> None:
    """Round float32 `decoded` (overwritten) to the target's dtype; float16 saturates at its largest finite value."""
    if target.dtype == torch.float16:
        decoded.clamp_(-_FP16_MAX, _FP16_MAX)
    target.copy_(decoded.view(target.shape))


def unpack_keys(records: torch.Tensor, codes: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Fill codes [P, 16, Dk], uint8 or float32, and return it."""
    count, dim = records.shape[0], layout.key_dim
    half = dim // 2
    quads = _words(records, 0, 8 * dim).view(count, dim // 8, RUN_TOKENS).transpose(1, 2)
    words = scratch("nibbles", (count, RUN_TOKENS, dim // 8), torch.int32, records.device).copy_(quads)
    octets = words.view(torch.uint8)  # [P, 16, Dk/2]
    part = scratch("octets", tuple(octets.shape), torch.uint8, records.device)
    codes[..., :half].copy_(torch.bitwise_and(octets, 15, out=part))
    codes[..., half:].copy_(torch.bitwise_right_shift(octets, 4, out=part))
    if layout.key_bits == 5:
        plane = records[:, layout.key_plane : layout.key_plane + 2 * dim].reshape(count, dim // 4, 8, 1, 1)
        bits = (plane >> bit_positions(records.device).view(2, 4)) & 1  # [P, Dk/4, 8, 2, 4]
        codes += bits.permute(0, 2, 3, 1, 4).reshape(count, RUN_TOKENS, dim) << 4
    return codes


def key_scales(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded scales, zeros), float32 [P, Dk] each."""
    dim = layout.key_dim
    codes = records[:, layout.key_scales : layout.key_scales + dim]
    zeros = records[:, layout.key_zeros : layout.key_zeros + dim].view(torch.int8).to(torch.float32)
    return decoded_scale(codes, load_base(records, layout.key_base)), zeros


def decode_keys(records: torch.Tensor, keys: torch.Tensor, layout: RecordLayout) -> None:
    """Into keys of any shape with P*16*Dk elements in that order, any strides.

    (q - z) s = q s - z s: both products and their difference have at most 21 significant bits, so all are exact.
    """
    scales, zeros = key_scales(records, layout)
    codes = scratch("x", (records.shape[0], RUN_TOKENS, layout.key_dim), torch.float32, records.device)
    decoded = unpack_keys(records, codes, layout)
    put(keys, torch.addcmul(zeros.mul_(scales).neg_()[:, None], decoded, scales[:, None], out=decoded))


def unpack_values(records: torch.Tensor, codes: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """Fill codes [P, 16, Dv], uint8 or float32, and return it."""
    count, dim = records.shape[0], layout.value_dim
    lines = 2 if layout.value_bits == 4 else 1
    words = _words(records, layout.value_codes, layout.value_codes + lines * 4 * dim).view(count, lines, 1, dim)
    shifts = (8 * bit_positions(records.device)[:4]).to(torch.int32).view(1, 1, 4, 1)
    shifted = scratch("shifted", (count, lines, 4, dim), torch.int32, records.device)
    torch.bitwise_right_shift(words, shifts, out=shifted)
    octets = scratch("octets", (count, 4 * lines, dim), torch.uint8, records.device).copy_(shifted.view(count, -1, dim))
    part = scratch("nibbles", tuple(octets.shape), torch.uint8, records.device)
    if layout.value_bits == 4:
        codes[:, :8].copy_(torch.bitwise_and(octets, 15, out=part))
        codes[:, 8:].copy_(torch.bitwise_right_shift(octets, 4, out=part))
        return codes
    for quad in range(4):
        codes[:, 4 * quad : 4 * quad + 4].copy_((octets >> (2 * quad)) & 3)
    plane = records[:, layout.value_plane : layout.value_plane + 2 * dim].reshape(count, 4, 1, dim // 2, 1)
    bits = (plane >> bit_positions(records.device).view(2, 4).t().reshape(4, 1, 2)) & 1  # [P, 4, 4, Dv/2, 2]
    codes += bits.reshape(count, RUN_TOKENS, dim) << 2
    return codes


def _value_code_rows(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """int16 [Dv, M] in a work buffer; columns in the order tokens 0-7 of all records, then 8-15."""
    count, dim = records.shape[0], layout.value_dim
    rows = scratch("rows", (dim, 2, count * 8), torch.int16, records.device)
    if layout.value_bits == 4:
        words = _words(records, layout.value_codes, layout.value_codes + 8 * dim).view(count, 2, dim).permute(2, 0, 1)
        octets = scratch("nibbles", (dim, count, 2), torch.int32, records.device).copy_(words)
        octets = octets.view(torch.uint8).view(dim, count * 8)
        half = scratch("octets", (dim, count * 8), torch.uint8, records.device)
        rows[:, 0].copy_(torch.bitwise_and(octets, 15, out=half))
        rows[:, 1].copy_(torch.bitwise_right_shift(octets, 4, out=half))
    else:
        codes = scratch("codes", (count, RUN_TOKENS, dim), torch.uint8, records.device)
        ordered = unpack_values(records, codes, layout).view(count, 2, 8, dim).permute(3, 1, 0, 2)
        rows.view(dim, 2, count, 8).copy_(ordered)
    return rows.view(dim, count * RUN_TOKENS)


def value_scales(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """(decoded scales, zeros), float32 [P, 16] each."""
    codes = records[:, layout.value_scales : layout.value_scales + 16]
    packed = records[:, layout.value_zeros : layout.value_zeros + 8]
    zeros = torch.cat((packed & 15, packed >> 4), 1).to(torch.float32)
    return decoded_scale(codes, load_base(records, layout.value_base)), zeros


def decode_values_rotated(records: torch.Tensor, values: torch.Tensor, layout: RecordLayout) -> None:
    """(q - z) s, without the rotation back; exact as in decode_keys."""
    scales, zeros = value_scales(records, layout)
    codes = scratch("x", (records.shape[0], RUN_TOKENS, layout.value_dim), torch.float32, records.device)
    put(values, unpack_values(records, codes, layout).sub_(zeros[..., None]).mul_(scales[..., None]))


def decode_values(records: torch.Tensor, values: torch.Tensor, layout: RecordLayout) -> None:
    """Into values [..., tokens, Dv] with P*16*Dv elements in that order, any strides.

    Butterflies on the integers q - z (at most 15 * 1024, so int16 is exact), signs, then one fp32 product with the
    token's factor fl(s / sqrt(size)).
    """
    count, dim = records.shape[0], layout.value_dim
    scales, zeros = value_scales(records, layout)
    rows = _value_code_rows(records, layout)
    rows.sub_(zeros.view(count, 2, 8).transpose(0, 1).reshape(-1).to(torch.int16))
    spare = scratch("shifted", tuple(rows.shape), torch.int16, rows.device)
    whole, spare = butterflies(rows, spare)
    whole.mul_(integer_signs(dim, rows.device)[:, None])
    tokens = spare.view(-1, dim).copy_(whole.t())  # [M, Dv]
    decoded = scratch("x", (2, count, 8, dim), torch.float32, rows.device).copy_(tokens.view(2, count, 8, dim))
    factors = (scales * unit(dim)).view(count, 2, 8, 1).transpose(0, 1).contiguous()
    decoded.mul_(factors)
    if values.dtype == torch.float16:
        decoded.clamp_(-_FP16_MAX, _FP16_MAX)
    lead = values.shape[:-2]
    runs = values.shape[-2] // RUN_TOKENS
    ordered = decoded.view(2, *lead, runs, 8, dim).movedim(0, len(lead) + 1)
    values.view(*lead, runs, 2, 8, dim).copy_(ordered)


def validate_values(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """The value part of validate_records; also that of int8k records. bool [P]."""
    codes = records[:, layout.value_scales : layout.value_scales + 16]
    good = good_scales(codes, load_base(records, layout.value_base))
    if layout.value_bits == 3:
        good &= (records[:, layout.value_zeros : layout.value_zeros + 8] & 0x88).eq(0).all(1)
    return good


def validate_keys(records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
    """The key part of validate_records, padding included. bool [P]."""
    codes = records[:, layout.key_scales : layout.key_scales + layout.key_dim]
    good = good_scales(codes, load_base(records, layout.key_base))
    return good & records[:, layout.used_bytes :].eq(0).all(1)
