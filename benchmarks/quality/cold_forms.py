"""Cold forms of K and V that are measured side by side: ours through `quant`, rivals from their published formats.

A form gets whole blocks of one layer in float32 that bf16 holds exactly, and returns what attention would read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from quant import BlockShape, get_codec

BLOCK_TOKENS = 16


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

    def cooled(self, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
        """`keys` Tensor[heads, tokens, key_dim] float32, `values` likewise; returns both as attention reads them."""


class QuantForm:
    """A codec of this project, block by block through its batch interface; a refused block stays as it is."""

    protects_first_block = True

    def __init__(self, codec_name: str = "int4", **parameters: object) -> None:
        self.name = codec_name
        self._codec = get_codec(codec_name, **parameters)

    def cooled(self, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
        heads, tokens, key_dim = keys.shape
        value_dim = values.shape[-1]
        shape = BlockShape(layers=1, kv_heads=heads, block_tokens=BLOCK_TOKENS, key_dim=key_dim, value_dim=value_dim)
        k, v = as_blocks(keys).to(torch.bfloat16), as_blocks(values).to(torch.bfloat16)
        payload = torch.empty(len(k), self._codec.encoded_bytes(shape, torch.bfloat16), dtype=torch.uint8)
        held = self._codec.encode_batch(k, v, payload)
        k_read, v_read = torch.empty_like(k), torch.empty_like(v)
        self._codec.decode_into(payload[held], k_part := torch.empty_like(k[held]), v_part := torch.empty_like(v[held]))
        k_read[held], v_read[held] = k_part, v_part
        k_read[~held], v_read[~held] = k[~held], v[~held]
        encoded, refused = int(held.sum()), int((~held).sum())
        raw_bits = 16.0 * (keys.numel() + values.numel()) / max(1, len(k))
        tally.values += keys.numel() + values.numel()
        tally.blocks += len(k)
        tally.raw_blocks += refused
        tally.payload_bits += encoded * heads * int4_payload_bits(key_dim, value_dim) + refused * raw_bits
        tally.padded_bits += encoded * 8 * payload.shape[1] + refused * raw_bits
        return as_rows(k_read).float(), as_rows(v_read).float()


def int4_payload_bits(key_dim: int, value_dim: int, key_bits: int = 4, value_bits: int = 4) -> int:
    """Bits of one record (16 tokens of one head) as docs/formats/int4.md counts them, padding left out.

    K: codes, and per channel an e4m3 scale and an int8 zero point, one bf16 base. V: codes, and per token an e4m3 scale
    and a zero point of 4 bits, one bf16 base.
    """
    key_part = BLOCK_TOKENS * key_dim * key_bits + 16 * key_dim + 16
    value_part = BLOCK_TOKENS * value_dim * value_bits + 12 * BLOCK_TOKENS + 16
    return key_part + (value_part if value_dim else 0)


class Fp8Form:
    """FP8 e4m3 without calibration, as engines store it: a scale of 1, saturated."""

    name = "fp8 e4m3"
    protects_first_block = False

    def cooled(self, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
        _count(tally, keys, values, bits=8.0)
        return _fp8(keys), _fp8(values)


class RotatedQ40Form:
    """llama.cpp's q4_0 (32 values, signed maximum on -8, an fp16 scale) after a Hadamard rotation of 64 channels."""

    name = "rotated q4_0"
    protects_first_block = False

    def cooled(self, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> tuple[torch.Tensor, torch.Tensor]:
        _count(tally, keys, values, bits=4.5)
        return self._read(keys), self._read(values)

    def _read(self, rows: torch.Tensor) -> torch.Tensor:
        rotation = _hadamard(64)
        turned = rows.unflatten(-1, (-1, 64)) @ rotation
        groups = turned.unflatten(-1, (2, 32))
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
        scale = (extreme / -8).half().float()
        scale = torch.where(scale == 0, torch.full_like(scale, 1e-8), scale)
        codes = (groups / scale + 8.5).floor().clamp(0, 15)
        back = ((codes - 8) * scale).flatten(-2) @ rotation.T
        return back.flatten(-2).bfloat16().float()


def as_blocks(rows: torch.Tensor) -> torch.Tensor:
    """Tensor[heads, tokens, dim] -> Tensor[blocks, 1, heads, 16, dim], contiguous."""
    heads, tokens, dim = rows.shape
    return rows.reshape(heads, tokens // BLOCK_TOKENS, 1, BLOCK_TOKENS, dim).permute(1, 2, 0, 3, 4).contiguous()


def as_rows(blocks: torch.Tensor) -> torch.Tensor:
    """The inverse of `as_blocks`."""
    count, _, heads, _, dim = blocks.shape
    return blocks.permute(2, 0, 1, 3, 4).reshape(heads, count * BLOCK_TOKENS, dim)


def _count(tally: Tally, keys: torch.Tensor, values: torch.Tensor, bits: float) -> None:
    count = keys.numel() + values.numel()
    tally.values += count
    tally.payload_bits += bits * count
    tally.padded_bits += bits * count


def _fp8(rows: torch.Tensor) -> torch.Tensor:
    return rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()


def _hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return matrix / math.sqrt(size)
