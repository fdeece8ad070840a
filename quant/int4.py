"""Codec "int4": K per channel over 16 tokens, V rotated per token. See docs/formats/int4.md and int4_records.

Stateless after construction; any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from quant.cuda import cuda_codec_for
from quant.error_bound import DEFAULT_ERROR_BOUND, check_error_bound, part_bound
from quant.int4_records import decode_records_into, encode_records_into, validate_records
from quant.record_codec import RecordCodec
from quant.record_layout import BitsTable, RecordLayout, record_bytes, record_layout

if TYPE_CHECKING:
    from quant.cuda.codec import CudaCodec


class Int4Codec(RecordCodec):
    """INT4 cold copies: about 4.6 bits a value, 5.0 for latents, padding aside.

    key_bits 4 or 5, value_bits 3 or 4: one int for all, or [layers][kv_heads] nested sequences.
    error_bound: largest relative RMS error of a head's 16-token run, per K and V, for 4-bit codes.
    Raises CodecError for bits, tables or bounds outside these.
    """

    def __init__(
        self,
        key_bits: int | Sequence[Sequence[int]] = 4,
        value_bits: int | Sequence[Sequence[int]] = 4,
        error_bound: float = DEFAULT_ERROR_BOUND,
    ) -> None:
        super().__init__(BitsTable.build(key_bits, value_bits), check_error_bound(error_bound))

    @property
    def name(self) -> str:
        """Registry name."""
        return "int4"

    @property
    def bits(self) -> BitsTable:
        """The table of bits."""
        return self._bits

    @property
    def error_bound(self) -> float:
        """The bound given at construction. It decides acceptance only, so it is not part of parameters()."""
        return self._error_bound

    def parameters(self) -> bytes:
        """The bits table, canonical (BitsTable.to_bytes)."""
        return self._bits.to_bytes()

    @classmethod
    def from_parameters(cls, parameters: bytes, error_bound: float = DEFAULT_ERROR_BOUND) -> Int4Codec:
        """The codec of a stored copy. Raises CodecError if malformed."""
        codec = cls(error_bound=error_bound)
        codec._bits = BitsTable.from_bytes(parameters)
        return codec

    def for_range(self, layers: slice, kv_heads: slice) -> Int4Codec:
        """The codec of a shard: the same bits for a layer and head range of the block."""
        codec = type(self)(error_bound=self._error_bound)
        codec._bits = self._bits.part(layers, kv_heads)
        return codec

    def record_bytes(self, key_dim: int, value_dim: int, bits: tuple[int, int]) -> int:
        """Bytes of one record."""
        return record_bytes(key_dim, value_dim, *bits)

    def _native_layout(self, dims: tuple[int, int], bits: tuple[int, int]) -> RecordLayout | None:
        return record_layout(*dims, *bits)

    def _cuda(self, operation: str, tensor: torch.Tensor) -> CudaCodec | None:
        return cuda_codec_for(tensor, operation)

    def _encode_piece(
        self, keys: torch.Tensor, values: torch.Tensor | None, records: torch.Tensor, bits: tuple[int, int]
    ) -> torch.Tensor:
        layout = record_layout(keys.shape[-1], 0 if values is None else values.shape[-1], *bits)
        return encode_records_into(keys, values, records, layout, self._error_bound)

    def _decode_piece(
        self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, bits: tuple[int, int]
    ) -> None:
        value_dim = 0 if values is None else values.shape[-1]
        decode_records_into(records, keys, values, record_layout(keys.shape[-1], value_dim, *bits))

    def _validate_piece(self, records: torch.Tensor, dims: tuple[int, int], bits: tuple[int, int]) -> torch.Tensor:
        return validate_records(records, *dims, key_bits=bits[0], value_bits=bits[1])

    def _bounds(self, bits: tuple[int, int]) -> tuple[float, float]:
        return part_bound(self._error_bound, bits[0]), part_bound(self._error_bound, bits[1])
