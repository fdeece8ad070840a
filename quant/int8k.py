"""Codec "int8k": the careful setting. K in 8 bits per token and head, V as in int4. See docs/formats/int4.md.

Record: K codes 16 Dk | V codes 8 Dv | K scales fp16[16] | K minima fp16[16] | V scales 16 | V zeros 8 | V base 2 |
zeros to 64. K code of channel c, token t: byte 64 (c/4) + 4 t + c%4. Stateless after construction; any thread.
"""

from __future__ import annotations

import torch

from quant.codec import CodecError
from quant.error_bound import DEFAULT_ERROR_BOUND, MAGNITUDE_LIMIT, check_error_bound
from quant.int4_decode import decode_values, put, validate_values
from quant.int4_encode import encode_values
from quant.record_codec import RecordCodec
from quant.record_layout import RUN_TOKENS, BitsTable, RecordLayout, int8k_layout

SCALE_FLOOR = 2.0**-24  # the smallest fp16
_FP16_MAX = 65504.0


def _toward(exact: torch.Tensor, up: bool) -> torch.Tensor:
    """float32 -> float16 rounded toward +inf or -inf."""
    half = exact.to(torch.float16)
    near = half.to(torch.float32)
    limit = torch.full_like(half, torch.inf if up else -torch.inf)
    return torch.where(near < exact if up else near > exact, torch.nextafter(half, limit), half)


class Int8KCodec(RecordCodec):
    """K: q = rint((x - m) / s) with s and m in fp16 per token and head; x' = q s + m. V: as int4 at 4 bits."""

    def __init__(self, error_bound: float = DEFAULT_ERROR_BOUND) -> None:
        super().__init__(BitsTable((8, 4)), check_error_bound(error_bound))

    @property
    def name(self) -> str:
        """Registry name."""
        return "int8k"

    def parameters(self) -> bytes:
        """None: the layout follows from the dims."""
        return b""

    def record_bytes(self, key_dim: int, value_dim: int, bits: tuple[int, int]) -> int:
        """Bytes of one record."""
        return int8k_layout(key_dim, value_dim).record_bytes

    def _encode_piece(
        self, keys: torch.Tensor, values: torch.Tensor | None, records: torch.Tensor, bits: tuple[int, int]
    ) -> torch.Tensor:
        layout = int8k_layout(keys.shape[-1], 0 if values is None else values.shape[-1])
        accepted = self._encode_keys(keys.to(torch.float32), records, layout)
        if values is not None:
            accepted &= encode_values(values, records, layout, self._error_bound)
        records[:, layout.used_bytes :] = 0
        return accepted

    def _encode_keys(self, keys: torch.Tensor, records: torch.Tensor, layout: RecordLayout) -> torch.Tensor:
        count, _, dim = keys.shape
        low, high = torch.aminmax(keys, dim=2)  # [P, 16]
        minima = _toward(low, up=False)
        lowest = minima.to(torch.float32)
        scales = _toward(((high - lowest) * (1.0 / 255.0)).clamp_min(SCALE_FLOOR), up=True)
        steps = scales.to(torch.float32)
        inverse = torch.div(torch.ones((), dtype=torch.float32, device=keys.device), steps)
        codes = torch.round((keys - lowest[..., None]) * inverse[..., None]).clamp_(0.0, 255.0)
        packed = codes.to(torch.uint8).view(count, RUN_TOKENS, dim // 4, 4).transpose(1, 2)
        records[:, : 16 * dim] = packed.reshape(count, 16 * dim)
        records[:, layout.key_scales : layout.key_scales + 32] = scales.view(torch.uint8)
        records[:, layout.key_zeros : layout.key_zeros + 32] = minima.view(torch.uint8)
        decoded = (codes * steps[..., None] + lowest[..., None]).to(torch.float64)
        errors = (decoded - keys).square().sum((1, 2))
        signal = keys.to(torch.float64).square().sum((1, 2))
        tiny = steps.amax(1) <= SCALE_FLOOR  # everything within 255 * 2^-24: held to the absolute step only
        close = (errors <= signal * (self._error_bound * self._error_bound)) | tiny
        carried = (lowest.abs().amax(1) <= _FP16_MAX) & (steps.amax(1) <= _FP16_MAX) & (high.amax(1) <= 2 * _FP16_MAX)
        return (high.amax(1) < MAGNITUDE_LIMIT) & carried & close

    def _decode_piece(
        self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, bits: tuple[int, int]
    ) -> None:
        dim, count = keys.shape[-1], records.shape[0]
        layout = int8k_layout(dim, 0 if values is None else values.shape[-1])
        codes = records[:, : 16 * dim].reshape(count, dim // 4, RUN_TOKENS, 4).transpose(1, 2)
        steps, minima = self._key_scales(records, layout)
        # q s has at most 19 significant bits, so the product is exact and the sum rounds once, fused or not.
        decoded = codes.reshape(count, RUN_TOKENS, dim).to(torch.float32).mul_(steps[..., None]).add_(minima[..., None])
        put(keys, decoded)
        if values is not None:
            decode_values(records, values, layout)

    @staticmethod
    def _key_scales(records: torch.Tensor, layout: RecordLayout) -> tuple[torch.Tensor, torch.Tensor]:
        parts = records[:, layout.key_scales : layout.key_scales + 64].contiguous().view(torch.float16)
        return parts[:, :16].to(torch.float32), parts[:, 16:].to(torch.float32)

    def _validate_piece(self, records: torch.Tensor, dims: tuple[int, int], bits: tuple[int, int]) -> torch.Tensor:
        layout = int8k_layout(*dims)
        steps, minima = self._key_scales(records, layout)
        good = ((steps >= SCALE_FLOOR) & (steps <= _FP16_MAX) & (minima.abs() <= _FP16_MAX)).all(1)
        good &= records[:, layout.used_bytes :].eq(0).all(1)
        return good & validate_values(records, layout) if dims[1] else good


__all__ = ["CodecError", "Int8KCodec", "int8k_layout"]
