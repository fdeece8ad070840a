"""Paged KV of several sequences on a device: full blocks, their INT4 records, and attention over either."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from allocator import ExtentLayout, KVGeometry, Slab
from engine_adapter.attention import AttentionBackend, AttentionSettings
from engine_adapter.batch import Int64Array, SequenceSlice, StepBatch
from engine_adapter.paged_cache import PagedCache
from quant import BlockShape, get_codec

BLOCK_TOKENS = 16
_PIECE_TOKENS = 8_192


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer of a model: Llama-8B's by default."""

    query_heads: int = 32
    kv_heads: int = 8
    dim: int = 128


class Scene:
    """`batch` sequences of `context` tokens, every block in a slot of its own, scattered; full and as INT4."""

    def __init__(self, shape: Shape, batch: int, context: int, device: torch.device, seed: int = 0) -> None:
        self.shape, self.batch, self.context, self.device = shape, batch, context, device
        self.geometry = KVGeometry.uniform(
            layers=1, kv_heads=shape.kv_heads, head_dim=shape.dim, dtype="bfloat16", block_tokens=BLOCK_TOKENS
        )
        self.codec = get_codec("int4")
        block_shape = BlockShape(1, shape.kv_heads, BLOCK_TOKENS, shape.dim, shape.dim)
        self.record_bytes = self.codec.encoded_bytes(block_shape, "bfloat16")
        self.per_sequence = context // BLOCK_TOKENS
        blocks = batch * self.per_sequence
        self.slab = self._slab(blocks)
        draw = random.Random(seed)
        extents = self.slab.layout.extent_count // 2
        full = draw.sample(range(extents * self.slab.layout.per_extent[0]), blocks)
        first = extents * self.slab.layout.per_extent[1]
        cold = draw.sample(range(first, first + extents * self.slab.layout.per_extent[1]), blocks)
        self.full_slots, self.cold_slots = np.array(full, np.int64), np.array(cold, np.int64)
        self.cache = PagedCache(self.slab, self.geometry, self.codec)
        generator = torch.Generator(device=device).manual_seed(seed)
        size = (batch, context, shape.kv_heads, shape.dim)
        self.keys = torch.randn(size, generator=generator, device=device, dtype=torch.float32).bfloat16()
        self.values = torch.randn(size, generator=generator, device=device, dtype=torch.float32).bfloat16()
        self.query = torch.randn(batch, shape.query_heads, shape.dim, generator=generator, device=device).bfloat16()
        self.settings = AttentionSettings(shape.dim**-0.5)
        self._fill()

    @property
    def full_bytes(self) -> int:
        """K and V of the whole context in bf16."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def cold_bytes(self) -> int:
        """The same as INT4 records."""
        return self.batch * self.per_sequence * self.record_bytes

    def _slab(self, blocks: int) -> Slab:
        full = self.geometry.full_slot_bytes(0)
        extent_bytes = 8 * math.lcm(full, 64)
        extents = -(-blocks * full // extent_bytes)
        layout = ExtentLayout(2 * extents * extent_bytes, (full,), (self.record_bytes,), extent_bytes)
        return Slab(layout, self.geometry, self.device)

    def _fill(self) -> None:
        """Write K and V to their slots and encode them to INT4, in pieces."""
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        places = (self.full_slots[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
        for first in range(0, len(places), _PIECE_TOKENS):
            span = slice(first, first + _PIECE_TOKENS)
            self.cache.write(0, places[span], keys[span], values[span])
            blocks = slice(first // BLOCK_TOKENS, (first + _PIECE_TOKENS) // BLOCK_TOKENS)
            self._encode(self.full_slots[blocks], self.cold_slots[blocks])

    def _encode(self, full_slots: Int64Array, cold_slots: Int64Array) -> None:
        index = torch.from_numpy(full_slots).to(self.device)
        keys, values = self.slab.keys_view(0)[index], self.slab.values_view(0)[index]
        out = torch.empty((len(full_slots), self.record_bytes), dtype=torch.uint8, device=self.device)
        if not bool(self.codec.encode_batch(keys, values, out).all()):
            raise RuntimeError("a random block was refused by the codec")
        extents, places = self.slab.cold_index(0, cold_slots)
        cold = self.slab.cold_view(0)
        cold[torch.from_numpy(extents).to(self.device), torch.from_numpy(places).to(self.device)] = out

    def attend(self, backend: AttentionBackend, cold: bool) -> Callable[[], torch.Tensor]:
        """Attention of each sequence's last token; with `cold` all blocks but first and newest are read as INT4.

        The plan is made once, as a step makes it for all its layers.
        """
        parts = []
        for number in range(self.batch):
            span = slice(number * self.per_sequence, (number + 1) * self.per_sequence)
            table = self.full_slots[span] << 1
            if cold:
                hot = slice(1, self.per_sequence - 128 // BLOCK_TOKENS)
                table[hot] = self.cold_slots[span][hot] << 1 | 1
            place = np.array([(table[-1] >> 1) * BLOCK_TOKENS + BLOCK_TOKENS - 1], np.int64)
            parts.append(SequenceSlice(str(number), (1,), self.context - 1, 0, (table,), (place,)))
        plan = backend.plan(self.cache, 0, StepBatch(tuple(parts)))
        keys, values = self.keys[:, -1], self.values[:, -1]
        return lambda: backend.attend(plan, 0, self.query, keys, values, self.settings)

    def contiguous(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as Tensor[batch, kv_heads, context, dim], contiguous: what SDPA wants."""
        return self.keys.transpose(1, 2).contiguous(), self.values.transpose(1, 2).contiguous()

    def pages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V as Tensor[blocks, block_tokens, kv_heads, dim], page b of sequence s at s * per_sequence + b."""
        shape = (-1, BLOCK_TOKENS, self.shape.kv_heads, self.shape.dim)
        return self.keys.reshape(shape), self.values.reshape(shape)
