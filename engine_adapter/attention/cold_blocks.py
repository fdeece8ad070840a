"""The INT4 blocks of one layer, as decode attention reads them: scores against K, weights times V.

Two ways. *Folded*, for int4 with V: the codes stay small integers, K's scales go into the query and V's into the
weights, and V is summed in the codec's rotated space, to be rotated back once per head. *Decoded*, for every other
codec and for latents: blocks become ordinary K and V first. Each block is read once, however many sequences share it.

Made by the torch backend once per layer and step; used by the thread that runs the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from engine_adapter.attention.products import scores_of
from engine_adapter.paged_cache import PagedCache
from quant import rotate_back


@dataclass(frozen=True, slots=True)
class ColdPick:
    """Which blocks each sequence of a bucket reads: indices into the blocks of the layer, padding included.

    rows: int64[sequences, blocks]. span: (first, end) when rows, flattened, count from first to end: no copy needed.
    """

    rows: torch.Tensor
    span: tuple[int, int] | None

    def take(self, blocks: torch.Tensor) -> torch.Tensor:
        """blocks Tensor[all blocks, ...] -> Tensor[sequences, picked, ...]."""
        shape = (*self.rows.shape, *blocks.shape[1:])
        if self.span is not None:
            return blocks[self.span[0] : self.span[1]].view(shape)
        return blocks.flatten(1).index_select(0, self.rows.reshape(-1)).view(shape)


class ColdBlocks(Protocol):
    """INT4 blocks of a layer. Token order inside a bucket is that of ColdPick, block by block."""

    def scores(self, query: torch.Tensor, pick: ColdPick, scaling: float) -> torch.Tensor:
        """query Tensor[sequences, kv_heads, queries, key_dim] -> float32[sequences, kv_heads, queries, tokens]."""

    def weigh(self, weights: torch.Tensor, pick: ColdPick, dtype: torch.dtype) -> torch.Tensor:
        """weights float32[sequences, kv_heads, queries, tokens] -> sum of V, [sequences, kv_heads, queries, dim]."""


def read_cold_blocks(
    cache: PagedCache, group: int, layer: int, slots: torch.Tensor, dtype: torch.dtype, latent_value_dim: int | None
) -> ColdBlocks:
    """Read INT4 slots int64[blocks] of a layer, for products in `dtype`."""
    if cache.has_records(group):
        return FoldedBlocks(cache, group, layer, slots, dtype)
    return DecodedBlocks(cache, layer, slots, dtype, latent_value_dim)


class FoldedBlocks:
    """Blocks of int4 records, codes as integers: keys = (key_codes - zeros) * scales, the same for rotated V."""

    def __init__(self, cache: PagedCache, group: int, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> None:
        parts = cache.read_records(layer, slots)
        blocks, kv_heads = len(slots), cache.geometry.groups[group].kv_heads
        assert parts.value_codes is not None
        assert parts.value_scales is not None
        assert parts.value_zeros is not None
        # Integers of magnitude at most 143: exact in every dtype, so the subtraction loses nothing.
        key_codes = parts.key_codes.to(dtype).sub_(parts.key_zeros.to(dtype)[:, None])
        self._key_codes = key_codes.view(blocks, kv_heads, -1, *key_codes.shape[1:])  # [.., runs, 16, key_dim]
        self._key_scales = parts.key_scales.view(blocks, kv_heads, -1, key_codes.shape[-1])
        self._value_codes = parts.value_codes.to(dtype).view(blocks, kv_heads, -1, parts.value_codes.shape[-1])
        self._value_scales = parts.value_scales.reshape(blocks, kv_heads, -1)  # [.., block_tokens]
        self._value_zeros = parts.value_zeros.reshape(blocks, kv_heads, -1)

    def scores(self, query: torch.Tensor, pick: ColdPick, scaling: float) -> torch.Tensor:
        """See ColdBlocks. One small product per record: the query takes on the record's scales."""
        codes, scales = pick.take(self._key_codes), pick.take(self._key_scales)
        sequences, picked, kv_heads, runs, run_tokens, dim = codes.shape
        queries = query.shape[2]
        folded = query[:, None, :, None].float() * (scales * scaling)[..., None, :]
        found = scores_of(folded.to(codes.dtype).view(-1, queries, dim), codes.view(-1, run_tokens, dim), 1.0).view(
            sequences, picked, kv_heads, runs, queries, run_tokens
        )
        return found.permute(0, 2, 4, 1, 3, 5).reshape(sequences, kv_heads, queries, -1)

    def weigh(self, weights: torch.Tensor, pick: ColdPick, dtype: torch.dtype) -> torch.Tensor:
        """See ColdBlocks. sum w s (q - z) = (w s) q - (w s) z, with the same rounded w s in both."""
        codes = pick.take(self._value_codes).transpose(1, 2)  # [sequences, kv_heads, picked, block_tokens, dim]
        scales = pick.take(self._value_scales).transpose(1, 2).flatten(2)
        zeros = pick.take(self._value_zeros).transpose(1, 2).flatten(2)
        folded = (weights * scales[:, :, None]).to(dtype)
        summed = torch.matmul(folded, codes.flatten(2, 3)).float()
        shift = torch.matmul(folded.float(), zeros[..., None])
        return rotate_back(summed.sub_(shift))


class DecodedBlocks:
    """Blocks decoded to ordinary K and V."""

    def __init__(
        self, cache: PagedCache, layer: int, slots: torch.Tensor, dtype: torch.dtype, latent_value_dim: int | None
    ) -> None:
        keys, values = cache.read_cold(layer, slots, dtype)
        self._keys = keys
        self._values = keys[..., :latent_value_dim] if values is None else values

    def scores(self, query: torch.Tensor, pick: ColdPick, scaling: float) -> torch.Tensor:
        """See ColdBlocks."""
        keys = pick.take(self._keys).transpose(1, 2).flatten(2, 3)
        found = scores_of(query.flatten(0, 1), keys.flatten(0, 1), scaling)
        return found.view(*query.shape[:3], -1)

    def weigh(self, weights: torch.Tensor, pick: ColdPick, dtype: torch.dtype) -> torch.Tensor:
        """See ColdBlocks."""
        values = pick.take(self._values).transpose(1, 2).flatten(2, 3)
        return torch.matmul(weights.to(dtype), values.to(dtype)).float()
