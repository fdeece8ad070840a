"""Names of the eviction policies that can be simulated: the pool's own classes."""

from __future__ import annotations

from collections.abc import Callable

from allocator.eviction import LRU, EvictionPolicy
from allocator.eviction_learned import Learned
from allocator.eviction_rivals import ARC, LRU2, S3FIFO, WTinyLFU

POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LRU,
    "lru-2": LRU2,
    "s3-fifo": S3FIFO,
    "arc": ARC,
    "w-tinylfu": WTinyLFU,
    "default": Learned,
}
BOUND = "belady"
