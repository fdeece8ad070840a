"""Random mixed tables, and attention over them written out in float64: what every backend is measured against."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from allocator import CacheGroup, GroupKind, KVGeometry, Slab
from engine_adapter.attention import AttentionBackend, AttentionSettings
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.paged_cache import PagedCache
from quant import Int4Codec
from tests.engine_adapter.paged_kit import make_slab

LAYERS = 3
PLAIN = AttentionSettings(0.25)
HEADS = 6


@dataclass
class Sequence:
    """One sequence: KV of all its tokens, float64[layers, kv_heads, tokens, dim], as attention should read it."""

    keys: torch.Tensor
    values: torch.Tensor
    part: SequenceSlice


class Scene:
    """A slab with sequences of given (context, new tokens), a share of their older blocks INT4."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        kv_heads: int = 2,
        key_dim: int = 16,
        value_dim: int = 16,
        window: int | None = None,
        cold_share: float = 0.0,
        dtype: str = "float32",
        codec: Any = None,
        block_tokens: int = 16,
        heads: int = HEADS,
        slab: tuple[Slab, list[list[int]]] | None = None,
        seed: int = 0,
    ) -> None:
        kind = GroupKind.LATENT if value_dim == 0 else GroupKind.FULL if window is None else GroupKind.SLIDING
        group = CacheGroup(
            kind=kind,
            layers=tuple(range(LAYERS)),
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            window_tokens=window,
        )
        self.geometry = KVGeometry(groups=(group,), block_tokens=block_tokens, dtype=dtype)
        self.codec = codec or Int4Codec()
        self.window = window
        total = sum(-(-(context + new) // block_tokens) for context, new in lengths)
        self.slab, (full, cold) = slab or make_slab(self.geometry, total + 4, cold=cold_share > 0, codec=self.codec)
        draw = random.Random(seed)
        draw.shuffle(full)
        draw.shuffle(cold)
        self.free_full, self.free_cold = full, cold
        self.cache = PagedCache(self.slab, self.geometry, self.codec if cold_share else None)
        torch.manual_seed(seed)
        self.draw, self.cold_share = draw, cold_share
        self.sequences = [self._make(f"s{at}", *pair) for at, pair in enumerate(lengths)]
        self.new_count = sum(new for _, new in lengths)
        self.query = torch.randn(self.new_count, heads, key_dim).to(self.cache.dtype)

    def _make(self, name: str, context: int, new: int) -> Sequence:
        group, size = self.geometry.groups[0], self.geometry.block_tokens
        total = context + new
        keys = torch.randn(LAYERS, group.kv_heads, total, group.key_dim) * torch.rand(group.key_dim) * 2
        values = torch.randn(LAYERS, group.kv_heads, total, group.value_dim)
        keys, values = keys.to(self.cache.dtype), values.to(self.cache.dtype)
        table = np.array([self.free_full.pop() << 1 for _ in range(-(-total // size))], np.int64)
        positions = np.arange(total)
        mapping = (table[positions // size] >> 1) * size + positions % size
        for layer in range(LAYERS):
            self.cache.write(
                layer,
                mapping,
                keys[layer].transpose(0, 1),
                values[layer].transpose(0, 1) if group.value_dim else None,
            )
        for block in range(context // size):
            if self.draw.random() < self.cold_share:
                self._cool(table, block, keys, values)
        if self.window is not None:
            table[: max(0, context - self.window + 1) // size] = -1
        part = SequenceSlice(name, (1,) * new, context, 0, (table,), (mapping[context:],))
        return Sequence(keys.double(), values.double(), part)

    def _cool(self, table: np.ndarray, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encode a block into an INT4 slot; from now on its KV is what that decodes to. Its full slot is poisoned."""
        size = self.geometry.block_tokens
        span = slice(block * size, block * size + size)
        slot = self.free_cold.pop()
        payload = torch.frombuffer(
            bytearray(self.codec.encode(keys[:, :, span], values[:, :, span] if values.shape[-1] else None)),
            dtype=torch.uint8,
        )
        self.slab.slot_bytes_view(1, slot)[: len(payload)] = payload
        decoded_values = torch.empty_like(values[:, :, span])
        decoded_keys = torch.empty_like(keys[:, :, span])
        self.codec.decode_into(payload, decoded_keys, decoded_values if values.shape[-1] else None)
        keys[:, :, span] = decoded_keys
        values[:, :, span] = decoded_values
        self.slab.poison(0, [int(table[block]) >> 1])
        table[block] = slot << 1 | 1

    def batch(self) -> StepBatch:
        return StepBatch(tuple(one.part for one in self.sequences))

    def run(self, backend: AttentionBackend, layer: int, settings: AttentionSettings) -> torch.Tensor:
        plan = backend.plan(self.cache, 0, self.batch())
        keys = torch.cat([one.keys[layer, :, one.part.start :].transpose(0, 1) for one in self.sequences])
        values = torch.cat([one.values[layer, :, one.part.start :].transpose(0, 1) for one in self.sequences])
        dtype = self.cache.dtype
        given = values.to(dtype) if values.shape[-1] else None
        return backend.attend(plan, layer, self.query, keys.to(dtype), given, settings)

    def expected(self, layer: int, settings: AttentionSettings) -> torch.Tensor:
        """Attention in float64, one query at a time."""
        found, row = [], 0
        for one in self.sequences:
            for position in range(one.part.start, one.part.end):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                keys = one.keys[layer, :, first : position + 1]
                values = one.values[layer, :, first : position + 1]
                if settings.latent_value_dim is not None:
                    values = keys[..., : settings.latent_value_dim]
                query = self.query[row].double().view(keys.shape[0], -1, keys.shape[-1])
                scores = torch.einsum("hgd,htd->hgt", query, keys) * settings.scaling
                if settings.softcap is not None:
                    scores = torch.tanh(scores / settings.softcap) * settings.softcap
                if settings.sinks is not None:
                    sinks = settings.sinks.double().view(keys.shape[0], -1, 1)
                    weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
                else:
                    weights = torch.softmax(scores, -1)
                found.append(torch.einsum("hgt,htd->hgd", weights, values).flatten(0, 1))
                row += 1
        return torch.stack(found)

    def relative_error(self, backend: AttentionBackend, layer: int, settings: AttentionSettings = PLAIN) -> float:
        """Of the whole output, against float64."""
        found, expected = self.run(backend, layer, settings).double(), self.expected(layer, settings)
        return float((found - expected).norm() / expected.norm())

    def check(self, backend: AttentionBackend, settings: AttentionSettings = PLAIN) -> None:
        """Every layer near float64: to 32-bit rounding, and where integer products fold INT4 scales, to 1e-3."""
        folded = backend.name == "native" and self.cold_share > 0
        relative, atol = (1e-3, 5e-4) if folded else (1e-5, 1e-5)
        for layer in range(LAYERS):
            found = self.run(backend, layer, settings).double()
            expected = self.expected(layer, settings)
            assert found.isfinite().all()
            assert (found - expected).norm() <= relative * expected.norm()
            torch.testing.assert_close(found, expected, rtol=0, atol=atol)


MIXED_LENGTHS = [
    (0, 1),
    (0, 16),
    (0, 40),
    (5, 1),
    (15, 1),
    (16, 1),
    (31, 17),
    (64, 5),
    (100, 1),
    (103, 1),
    (130, 30),
    (140, 3),
]
SINKS = torch.linspace(-2, 3, HEADS)
