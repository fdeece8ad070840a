"""Where vLLM's CPU backend keeps keys and values, and how store blocks are gathered from there and scattered to there.

A layer's memory is `[blocks, heads, 2 * engine_block_tokens * dim]`: of one block and head first all K, channel by
channel (`[dim, engine_block_tokens]`), then all V, token by token (`[engine_block_tokens, dim]`). Of MLA it is
`[blocks, 1, engine_block_tokens, dim]`, one latent a token. A store block is `[layers, heads, (K, V), block_tokens,
dim]`, a latent one `[layers, 1, block_tokens, dim]`. heads: those of this rank. numpy only; the caller sees to it that
nobody else writes the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator import ConfigError
from engine_adapter.vllm_connector.orders import NULL_BLOCK, Tables
from kvstore.tier import ByteRow

Values: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]
_WORDS: dict[int, npt.DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's memory as flat bytes, and the vLLM cache group whose table leads to it."""

    memory: ByteRow
    table: int


@dataclass(frozen=True, slots=True)
class PagesShape:
    """A cache group of the store in vLLM's memory; K and V have the same dim, or there is no V (is_latent)."""

    layers: tuple[Any, ...]
    kv_heads: int
    dim: int
    block_tokens: int
    blocks_per_page: int
    item_bytes: int
    is_latent: bool = False

    @property
    def block_bytes(self) -> int:
        """Of one store block over all layers."""
        return len(self.layers) * self.kv_heads * self._parts * self.block_tokens * self.dim * self.item_bytes

    @property
    def _parts(self) -> int:
        return 1 if self.is_latent else 2

    def is_there(self, tables: Tables, position: int) -> bool:
        """Whether the engine has a page for the store block at `position` in every layer's table."""
        page = position // self.blocks_per_page
        return all(
            page < len(tables[one]) and tables[one][page] != NULL_BLOCK for one in {one.table for one in self.layers}
        )


@dataclass(frozen=True, slots=True)
class GroupPages(PagesShape):
    """In host memory, as the CPU backend lays it out. layers: LayerPages."""

    def gather(self, places: Sequence[tuple[Tables, int]], target: ByteRow) -> None:
        """Store blocks, each by its request's tables and position, one behind the other into `target`."""
        blocks = self._blocks(target, len(places))
        for index, layer in enumerate(self.layers):
            page, inside = self._where(layer, places)
            if self.is_latent:
                blocks[:, index, :, 0] = self._latents(layer)[page, :, inside]
                continue
            keys, values = self._pages(layer)
            blocks[:, index, :, 0] = keys[page, :, :, inside].swapaxes(2, 3)
            blocks[:, index, :, 1] = values[page, :, inside]

    def scatter(self, source: ByteRow, places: Sequence[tuple[Tables, int]]) -> None:
        """The reverse: blocks that lie one behind the other in `source` to their pages."""
        blocks = self._blocks(source, len(places))
        for index, layer in enumerate(self.layers):
            page, inside = self._where(layer, places)
            if self.is_latent:
                self._latents(layer)[page, :, inside] = blocks[:, index, :, 0]
                continue
            keys, values = self._pages(layer)
            keys[page, :, :, inside] = blocks[:, index, :, 0].swapaxes(2, 3)
            values[page, :, inside] = blocks[:, index, :, 1]

    def _blocks(self, row: ByteRow, count: int) -> Values:
        """[count, layers, heads, (K, V), block_tokens, dim]; of latents with K alone."""
        words = row[: count * self.block_bytes].view(_WORDS[self.item_bytes])
        return words.reshape(count, len(self.layers), self.kv_heads, self._parts, self.block_tokens, self.dim)

    def _latents(self, layer: LayerPages) -> Values:
        """[pages, 1, blocks_per_page, block_tokens, dim]"""
        words = layer.memory.view(_WORDS[self.item_bytes])
        return words.reshape(-1, 1, self.blocks_per_page, self.block_tokens, self.dim)

    def _pages(self, layer: LayerPages) -> tuple[Values, Values]:
        """K [pages, heads, dim, blocks_per_page, block_tokens], V [pages, heads, blocks_per_page, block_tokens, dim]"""
        ratio, tokens, heads = self.blocks_per_page, self.block_tokens, self.kv_heads
        halves = layer.memory.view(_WORDS[self.item_bytes]).reshape(-1, heads, 2, ratio * tokens * self.dim)
        shape = (len(halves), heads)
        keys = _split(halves[:, :, 0], (*shape, self.dim, ratio, tokens))
        return keys, _split(halves[:, :, 1], (*shape, ratio, tokens, self.dim))

    def _where(
        self, layer: LayerPages, places: Sequence[tuple[Tables, int]]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        ratio = self.blocks_per_page
        page = np.array([tables[layer.table][position // ratio] for tables, position in places], np.int64)
        return page, np.array([position % ratio for _, position in places], np.int64)


def _split(half: Values, shape: tuple[int, ...]) -> Values:
    """`half` [pages, heads, n] with its last axis cut up, without a copy."""
    item = half.itemsize
    inner = [item * int(np.prod(shape[axis + 1 :])) for axis in range(2, 5)]
    return np.lib.stride_tricks.as_strided(half, shape, (*half.strides[:2], *inner))


def blocks_per_page(engine_block_tokens: int, block_tokens: int) -> int:
    """Store blocks in one engine block. ConfigError where they do not divide."""
    if engine_block_tokens % block_tokens:
        raise ConfigError(
            f"vLLM's block_size is {engine_block_tokens}, the store's blocks have {block_tokens} tokens; expected a "
            f"multiple: start vLLM with --block-size {-(-engine_block_tokens // block_tokens) * block_tokens}"
        )
    return engine_block_tokens // block_tokens
