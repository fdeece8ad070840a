"""Cold forms of K and V that are measured side by side: ours through `quant`, rivals from their published formats.

A form gets whole blocks of one layer in float32 that bf16 holds exactly, and returns what attention would read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from quant import BlockShape, get_codec, record_layout

BLOCK_TOKENS = 16
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Tally:
    """Bits and values seen so far, over all layers and windows."""

    payload_bits: float = 0.0
    padded_bits: float = 0.0
    values: int = 0
    raw_blocks: int = 0
    blocks: int = 0

    def bits_a_value(self) -> float:
        """Scales and zero points counted, padding not."""
        return self.payload_bits / max(1, self.values)

    def padded_bits_a_value(self) -> float:
        """As stored, 64-byte padding counted."""
        return self.padded_bits / max(1, self.values)


class ColdForm(Protocol):
    """One way to keep blocks that are no longer hot."""

    name: str
    protects_first_block: bool

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        """`keys` Tensor[heads, tokens, key_dim] float32, `values` likewise; returns both as attention reads them.

        `layer`: the model's layer, counted from 0. `tokens` is a multiple of 16.
        """


class Int4Form:
    """Our codec, block by block through its batch interface; a block that it refuses stays as it is.

    `read_dtype`: what a reader works in. In place, with the scales folded into the query, nothing is rounded again:
    float32. A reader that decodes to bfloat16 first rounds every value a second time; the suite prints what that costs.
    """

    protects_first_block = True

    def __init__(self, name: str = "int4", read_dtype: torch.dtype = torch.float32) -> None:
        self.name = name
        self._read_dtype = read_dtype
        self._codec = get_codec("int4")

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        k, v = self.read(as_blocks(keys), as_blocks(values), tally)
        assert v is not None
        return as_rows(k), as_rows(v)

    def read(
        self, keys: torch.Tensor, values: torch.Tensor | None, tally: Tally
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encoded and decoded: Tensor[blocks, 1, heads, 16, dim] float32; `values` None for a latent."""
        count, layers, heads, tokens, key_dim = keys.shape
        value_dim = 0 if values is None else values.shape[-1]
        shape = BlockShape(layers=layers, kv_heads=heads, block_tokens=tokens, key_dim=key_dim, value_dim=value_dim)
        payload = torch.empty(count, self._codec.encoded_bytes(shape, keys.dtype), dtype=torch.uint8)
        held = self._codec.encode_batch(keys, values, payload)
        keys_read = keys[held].to(self._read_dtype)
        values_read = None if values is None else values[held].to(self._read_dtype)
        self._codec.decode_into(payload[held], keys_read, values_read)
        used_bytes = record_layout(key_dim, value_dim).used_bytes
        encoded, refused = int(held.sum()), int((~held).sum())
        tally.values += count * shape.element_count
        tally.blocks += count
        tally.raw_blocks += refused
        tally.payload_bits += 8 * encoded * layers * heads * used_bytes + 16 * refused * shape.element_count
        tally.padded_bits += 8 * encoded * payload.shape[1] + 16 * refused * shape.element_count
        return _placed(keys, held, keys_read), None if values is None else _placed(values, held, values_read)


def _placed(blocks: torch.Tensor, held: torch.Tensor, read: torch.Tensor | None) -> torch.Tensor:
    assert read is not None
    placed = blocks.clone()
    placed[held] = read.to(placed.dtype)
    return placed


class Fp8Form:
    """FP8 e4m3 without calibration, as engines store it: a scale of 1, saturated."""

    name = "fp8 e4m3"
    protects_first_block = False

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        count_bits(tally, keys, values, bits=8.0)
        return fp8_read(keys), fp8_read(values)


class RotatedQ40Form:
    """llama.cpp's q4_0 (32 values, signed maximum on -8, an fp16 scale) after a Hadamard rotation of 64 channels."""

    name = "rotated q4_0"
    protects_first_block = False

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        count_bits(tally, keys, values, bits=4.5)
        return self._read(keys), self._read(values)

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        rotation = _hadamard(64)
        turned = rows.unflatten(-1, (-1, 64)) @ rotation
        groups = turned.unflatten(-1, (2, 32))
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = (extreme / -8).half().float()
        scale = torch.where(scale == 0, torch.full_like(scale, 1e-8), scale)
        codes = (groups / scale + 8.5).floor().clamp(0, 15)
        back: torch.Tensor = ((codes - 8) * scale).flatten(-2) @ rotation.T
        return back.flatten(-2)


def as_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Tensor[heads, tokens, dim] -> Tensor[blocks, 1, heads, 16, dim], contiguous."""
    heads, tokens, dim = rows.shape
    return rows.reshape(heads, tokens // BLOCK_TOKENS, 1, BLOCK_TOKENS, dim).permute(1, 2, 0, 3, 4).contiguous()


def as_rows(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_blocks`."""
    count, _, heads, _, dim = blocks.shape
    return blocks.permute(2, 0, 1, 3, 4).reshape(heads, count * BLOCK_TOKENS, dim)


def count_bits(tally: Tally, keys: torch.Tensor, values: torch.Tensor, bits: float) -> None:
    """Note that all of `keys` and `values` took `bits` a value."""
    count = keys.numel() + values.numel()
    tally.values += count
    tally.payload_bits += bits * count
    tally.padded_bits += bits * count


def fp8_read(rows: torch.Tensor) -> torch.Tensor:
    """What a reader of e4m3 with a scale of 1 sees of `rows`."""
    return rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(size)
