"""Where things lie in an int4 or int8k record, and the per-(layer, head) table of bits. Pure arithmetic, no torch.

A record holds 16 tokens of one KV head of one layer. Offsets are those of docs/formats/int4.md.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quant.codec import BlockShape, CodecError

RUN_TOKENS = 16
ALIGN_BYTES = 64
MAX_DIM = 1024
KEY_BITS = (4, 5)
VALUE_BITS = (3, 4)
PARAMETERS_VERSION = 1
_UNIFORM, _TABLE = 0, 1


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """Byte offsets inside one record. An offset of a part that is absent equals the offset of what follows it."""

    key_dim: int
    value_dim: int
    key_bits: int
    value_bits: int
    value_codes: int  # after the key codes, which start at 0
    key_plane: int  # bit 4 of the key codes, 5 bits only
    value_plane: int  # bit 2 of the value codes, 3 bits only
    key_scales: int
    key_zeros: int
    value_scales: int
    value_zeros: int
    key_base: int
    value_base: int
    used_bytes: int
    record_bytes: int


def check_dims(key_dim: int, value_dim: int) -> None:
    """Raises CodecError unless both dims are multiples of 8 up to 1,024 (value_dim may be 0)."""
    if key_dim < 8 or key_dim % 8 or key_dim > MAX_DIM:
        raise CodecError(f"key_dim must be a multiple of 8 from 8 to {MAX_DIM}, got {key_dim}")
    if value_dim < 0 or value_dim % 8 or value_dim > MAX_DIM:
        raise CodecError(f"value_dim must be 0 or a multiple of 8 up to {MAX_DIM}, got {value_dim}")


@lru_cache(maxsize=256)
def record_layout(key_dim: int, value_dim: int, key_bits: int = 4, value_bits: int = 4) -> RecordLayout:
    """Layout of a record. Raises CodecError for dims or bits that the format does not have."""
    check_dims(key_dim, value_dim)
    if key_bits not in KEY_BITS or value_bits not in VALUE_BITS:
        raise CodecError(f"key bits must be in {KEY_BITS} and value bits in {VALUE_BITS}, got {key_bits}, {value_bits}")
    value_codes = 8 * key_dim
    key_plane = value_codes + (8 if value_bits == 4 else 4) * value_dim
    value_plane = key_plane + (2 * key_dim if key_bits == 5 else 0)
    key_scales = value_plane + (2 * value_dim if value_bits == 3 else 0)
    key_zeros = key_scales + key_dim
    value_scales = key_zeros + key_dim
    value_zeros = value_scales + (16 if value_dim else 0)
    key_base = value_zeros + (8 if value_dim else 0)
    value_base = key_base + 2
    used_bytes = value_base + (2 if value_dim else 0)
    total_bytes = -(-used_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return RecordLayout(
        key_dim, value_dim, key_bits, value_bits, value_codes, key_plane, value_plane, key_scales, key_zeros,
        value_scales, value_zeros, key_base, value_base, used_bytes, total_bytes,
    )  # fmt: skip


def record_bytes(key_dim: int, value_dim: int, key_bits: int = 4, value_bits: int = 4) -> int:
    """Bytes of one record, padding to 64 included."""
    return record_layout(key_dim, value_dim, key_bits, value_bits).record_bytes


@lru_cache(maxsize=64)
def int8k_layout(key_dim: int, value_dim: int) -> RecordLayout:
    """Offsets of an int8k record; key_zeros is where the fp16 minima lie. Raises CodecError for dims."""
    check_dims(key_dim, value_dim)
    value_codes = 16 * key_dim
    key_scales = value_codes + 8 * value_dim
    key_minima = key_scales + 32
    value_scales = key_minima + 32
    value_zeros = value_scales + (16 if value_dim else 0)
    value_base = value_zeros + (8 if value_dim else 0)
    used = value_base + (2 if value_dim else 0)
    return RecordLayout(
        key_dim, value_dim, 8, 4, value_codes, key_scales, key_scales, key_scales, key_minima,
        value_scales, value_zeros, value_base, value_base, used, -(-used // ALIGN_BYTES) * ALIGN_BYTES,
    )  # fmt: skip


def check_run_tokens(shape: BlockShape) -> None:
    """Raises CodecError unless the block is a whole number of 16-token runs."""
    if shape.block_tokens % RUN_TOKENS:
        raise CodecError(f"block_tokens must be a multiple of {RUN_TOKENS} for this codec, got {shape.block_tokens}")


@dataclass(frozen=True, slots=True)
class BitsTable:
    """Bits of keys and values: one pair for all, or one pair per (layer, KV head).

    `rows` is () for a uniform table, else a tuple of layers, each a tuple of (key_bits, value_bits) per head.
    A table whose pairs are all the same is kept as a uniform one, so that equal layouts have equal bytes.
    """

    uniform: tuple[int, int]
    rows: tuple[tuple[tuple[int, int], ...], ...] = ()

    @classmethod
    def build(cls, key_bits: int | Sequence[Sequence[int]], value_bits: int | Sequence[Sequence[int]]) -> BitsTable:
        """From ints or [layers][kv_heads] nested sequences (an int fills the other's shape). Raises CodecError."""
        if isinstance(key_bits, int) and isinstance(value_bits, int):
            return cls._checked((key_bits, value_bits), ())
        given: tuple[tuple[str, object], ...] = (("key_bits", key_bits), ("value_bits", value_bits))
        for name, bits in given:
            if isinstance(bits, str | bytes) or not isinstance(bits, int | Sequence):
                raise CodecError(f"{name} must be an int or [layers][kv_heads] of ints, got {bits!r}")
        shaped = key_bits if not isinstance(key_bits, int) else value_bits
        assert not isinstance(shaped, int)
        counts = [len(row) for row in shaped]
        if not counts or not counts[0] or len(set(counts)) != 1:
            raise CodecError(f"a bits table must be [layers][kv_heads] and rectangular, got row lengths {counts}")
        keys = [[key_bits] * counts[0]] * len(counts) if isinstance(key_bits, int) else key_bits
        values = [[value_bits] * counts[0]] * len(counts) if isinstance(value_bits, int) else value_bits
        if [len(row) for row in keys] != [len(row) for row in values]:
            raise CodecError("key bits and value bits must have the same [layers][kv_heads] shape")
        rows = tuple(
            tuple((int(k), int(v)) for k, v in zip(krow, vrow, strict=True))
            for krow, vrow in zip(keys, values, strict=True)
        )
        return cls._checked(rows[0][0], rows)

    @classmethod
    def _checked(cls, first: tuple[int, int], rows: tuple[tuple[tuple[int, int], ...], ...]) -> BitsTable:
        pairs = {pair for row in rows for pair in row} or {first}
        for key_bits, value_bits in pairs:
            if key_bits not in KEY_BITS or value_bits not in VALUE_BITS:
                raise CodecError(
                    f"key bits must be in {KEY_BITS} and value bits in {VALUE_BITS}, got {key_bits}, {value_bits}"
                )
        return cls(first) if len(pairs) == 1 else cls(first, rows)

    def check(self, shape: BlockShape) -> None:
        """Raises CodecError when the table is for other layers or heads than the block has."""
        if self.rows and (len(self.rows), len(self.rows[0])) != (shape.layers, shape.kv_heads):
            raise CodecError(
                f"bits table is for {len(self.rows)} layers x {len(self.rows[0])} KV heads, "
                f"the block has {shape.layers} x {shape.kv_heads}"
            )

    def pair(self, layer: int, kv_head: int) -> tuple[int, int]:
        """(key_bits, value_bits) of one head."""
        return self.rows[layer][kv_head] if self.rows else self.uniform

    def part(self, layers: slice, kv_heads: slice) -> BitsTable:
        """The table of a layer and head range."""
        if not self.rows:
            return self
        rows = tuple(row[kv_heads] for row in self.rows[layers])
        if not rows or not rows[0]:
            raise CodecError(f"empty layer or head range: {layers}, {kv_heads}")
        return self._checked(rows[0][0], rows)

    def to_bytes(self) -> bytes:
        """version u8, kind u8, then the pair (kind 0) or layers u16, kv_heads u16, pairs (kind 1); a pair is K<<4|V."""
        if not self.rows:
            return bytes((PARAMETERS_VERSION, _UNIFORM, self.uniform[0] << 4 | self.uniform[1]))
        head = struct.pack("<BBHH", PARAMETERS_VERSION, _TABLE, len(self.rows), len(self.rows[0]))
        return head + bytes(k << 4 | v for row in self.rows for k, v in row)

    @classmethod
    def from_bytes(cls, parameters: bytes) -> BitsTable:
        """Inverse of to_bytes. Raises CodecError for anything that to_bytes would not have written."""
        table: BitsTable | None = None
        if len(parameters) == 3 and parameters[1] == _UNIFORM:
            table = cls._checked((parameters[2] >> 4, parameters[2] & 15), ())
        elif len(parameters) > 6 and parameters[1] == _TABLE:
            layers, heads = struct.unpack_from("<HH", parameters, 2)
            if layers and heads and len(parameters) == 6 + layers * heads:
                cells = [(byte >> 4, byte & 15) for byte in parameters[6:]]
                rows = tuple(tuple(cells[i * heads : (i + 1) * heads]) for i in range(layers))
                table = cls._checked(rows[0][0], rows)
        if table is None or table.to_bytes() != parameters:
            raise CodecError(f"not the parameters of an int4 codec: {parameters[:16].hex()} ({len(parameters)} bytes)")
        return table
