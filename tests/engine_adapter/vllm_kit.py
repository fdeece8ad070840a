"""vLLM's memory and the connector's worker side without vLLM, for tests: small pages of known values."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from allocator import CacheGroup, GroupKind, KVGeometry
from engine_adapter.vllm_connector.layout import GroupPages, LayerPages
from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder
from engine_adapter.vllm_connector.shelf import Shelf
from kvstore import HashChain, Identity
from kvstore.tier import Tier

BLOCK, PAGE, HEADS, DIM, PAGES = 4, 8, 2, 3, 16
RATIO = PAGE // BLOCK


def full(layers: Sequence[int]) -> CacheGroup:
    return CacheGroup(kind=GroupKind.FULL, layers=tuple(layers), kv_heads=HEADS, key_dim=DIM, value_dim=DIM)


def sliding(layers: Sequence[int], window: int) -> CacheGroup:
    return CacheGroup(
        kind=GroupKind.SLIDING,
        layers=tuple(layers),
        kv_heads=HEADS,
        key_dim=DIM,
        value_dim=DIM,
        window_tokens=window,
    )


def geometry(*groups: CacheGroup) -> KVGeometry:
    return KVGeometry(groups=groups or (full((0, 1)),), block_tokens=BLOCK, dtype="float32")


def identity(kv: KVGeometry | None = None, **given: Any) -> Identity:
    return Identity(**{"model": "m", "weights": "w", "geometry": kv or geometry(), **given})


class Memory:
    """vLLM's pages: per layer float32[pages, heads, 2 * page tokens * dim], each value naming its own place."""

    def __init__(self, group: CacheGroup, table: int = 0) -> None:
        shape = (PAGES, HEADS, 2 * PAGE * DIM)
        self.layers = [
            (np.arange(np.prod(shape), dtype=np.float32) + 10_000 * layer).reshape(shape) for layer in group.layers
        ]
        flat = tuple(LayerPages(one.reshape(-1).view(np.uint8), table) for one in self.layers)
        self.pages = GroupPages(flat, HEADS, DIM, BLOCK, RATIO, 4)

    def tokens(self) -> np.ndarray[Any, Any]:
        """float32[layers, pages, heads, (K, V), page tokens, dim]: K is kept channel by channel, V token by token."""
        whole = np.stack(self.layers)
        keys = whole[..., : PAGE * DIM].reshape(-1, PAGES, HEADS, DIM, PAGE).swapaxes(3, 4)
        values = whole[..., PAGE * DIM :].reshape(-1, PAGES, HEADS, PAGE, DIM)
        return np.stack([keys, values], axis=3)

    def block(self, page: int, inside: int) -> np.ndarray[Any, Any]:
        """float32[layers, heads, (K, V), block tokens, dim]"""
        return self.tokens()[:, page, :, :, inside * BLOCK : (inside + 1) * BLOCK]


class Worker:
    """A shelf over pages of two groups: full layers, and sliding ones."""

    def __init__(self, tiers: Sequence[Tier], kv: KVGeometry, **given: Any) -> None:
        self.geometry = kv
        self.memories = [Memory(group, table) for table, group in enumerate(kv.groups)]
        self.shelf = Shelf(kv, tiers, **{"deadline_seconds": 60.0, **given})
        self.shelf.attach([one.pages for one in self.memories])
        self.root = identity(kv).root()
        self.hashes = HashChain(self.root, BLOCK).extend(list(range(40)))  # 10 blocks, 5 pages

    def save(self, stop: int = 10, tables: Sequence[Sequence[int]] = ((1, 2, 3, 4, 5), (6, 7, 8, 9, 10))) -> None:
        self.shelf.save([SaveOrder(self.root, self.hashes[:stop], 0, None, tables)])
        until = time.monotonic() + 60
        while not self.shelf.is_idle and time.monotonic() < until:
            time.sleep(0.002)
        assert self.shelf.is_idle

    def load(self, start: int, stop: int, tables: Sequence[Sequence[int]]) -> list[int]:
        """Positions that failed."""
        self.shelf.load(LoadOrder("r", self.root, self.hashes[:stop], start, tables))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            for result in self.shelf.take_finished():
                return result.failed
            time.sleep(0.002)
        raise AssertionError("the load did not end")

    def found(self, local_blocks: int = 0) -> int:
        return self.shelf.find(0, self.root, self.hashes, local_blocks).blocks
