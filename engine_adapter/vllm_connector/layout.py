"""Where vLLM keeps a token's keys and values, and how store blocks are gathered from there and scattered to there.

A layer's memory is `[blocks, heads, (K, V), engine_block_tokens, dim]` (a latent: one head, no V): inside one block and
head, first all K, then all V. A store block is `[layers, heads, (K, V), block_tokens, dim]`, so a piece is one run of
`block_tokens * dim` values. numpy only; the caller sees to it that nobody else writes the pages meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from allocator import ConfigError
from engine_adapter.vllm_connector.orders import NULL_BLOCK, Tables
from kvstore.tier import ByteRow
from quant.native import pages

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's memory as flat bytes, and the vLLM cache group whose table leads to it."""

    memory: ByteRow
    table: int


@dataclass(frozen=True, slots=True)
class GroupPages:
    """A cache group of the store in vLLM's memory. piece_bytes: of one (head, K or V) of one store block."""

    layers: tuple[LayerPages, ...]
    pieces: int
    piece_bytes: int
    blocks_per_page: int

    @property
    def block_bytes(self) -> int:
        """Of one store block over all layers."""
        return len(self.layers) * self.pieces * self.piece_bytes

    @property
    def page_bytes(self) -> int:
        """Of one engine block of one layer."""
        return self.pieces * self.piece_bytes * self.blocks_per_page

    def is_there(self, tables: Tables, position: int) -> bool:
        """Whether the engine has a page for the store block at `position` in every layer's table."""
        page = position // self.blocks_per_page
        return all(
            page < len(tables[one]) and tables[one][page] != NULL_BLOCK for one in {one.table for one in self.layers}
        )

    def gather(self, places: Sequence[tuple[Tables, int]], target: ByteRow) -> None:
        """Store blocks, each by its request's tables and position, one behind the other into `target`."""
        for layer, at, inside in self._offsets(places):
            pages.copy_pieces(layer.memory, at, target, inside, self.piece_bytes)

    def scatter(self, source: ByteRow, places: Sequence[tuple[Tables, int]]) -> None:
        """The reverse: blocks that lie one behind the other in `source` to their pages."""
        for layer, at, inside in self._offsets(places):
            pages.copy_pieces(source, inside, layer.memory, at, self.piece_bytes)

    def _offsets(self, places: Sequence[tuple[Tables, int]]) -> list[tuple[LayerPages, Int64Array, Int64Array]]:
        """Per layer, where the pieces are in the layer's memory and in the blocks."""
        ratio, piece, count = self.blocks_per_page, self.piece_bytes, self.pieces
        step = np.arange(count, dtype=np.int64)
        starts: dict[int, Int64Array] = {}
        for table in {layer.table for layer in self.layers}:
            rows = [tables[table][position // ratio] * self.page_bytes for tables, position in places]
            inner = [position % ratio * piece for _, position in places]
            first = np.array(rows, np.int64) + np.array(inner, np.int64)
            starts[table] = (first[:, None] + step * (ratio * piece)).reshape(-1)
        found = []
        blocks = np.arange(len(places), dtype=np.int64)[:, None] * self.block_bytes
        for index, layer in enumerate(self.layers):
            inside = (blocks + index * count * piece + step * piece).reshape(-1)
            found.append((layer, starts[layer.table], inside))
        return found


def blocks_per_page(engine_block_tokens: int, block_tokens: int) -> int:
    """Store blocks in one engine block. ConfigError where they do not divide."""
    if engine_block_tokens % block_tokens:
        raise ConfigError(
            f"vLLM's block_size is {engine_block_tokens}, the store's blocks have {block_tokens} tokens; expected a "
            f"multiple: start vLLM with --block-size {-(-engine_block_tokens // block_tokens) * block_tokens}"
        )
    return engine_block_tokens // block_tokens
