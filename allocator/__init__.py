"""Device blocks and tables: geometry, block pool, block tables, prefix index, eviction, slab.

Control plane in Python and numpy; importing it loads no torch (`Slab` does, on first use). No lock inside: the owner
of a
pool guards it with its one lock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.block_pool import BlockPool
from allocator.block_state import BlockState
from allocator.block_table import BlockTable, CopyOnWrite
from allocator.compaction import Move
from allocator.errors import (
    CannotRollback,
    CapacityError,
    ConfigError,
    DuplicateSequence,
    GeometryError,
    IntegrityError,
    KVError,
    LeaseError,
    TierError,
    UnknownSequence,
    UsageError,
)
from allocator.eviction import LRU, EvictionPolicy
from allocator.extents import COLD, FULL, ExtentLayout, class_index
from allocator.geometry import DTYPE_BYTES, CacheGroup, GroupKind, KVGeometry
from allocator.pool_usage import ClassUsage, PoolUsage
from allocator.prefix_index import PrefixIndex, window_first_block

if TYPE_CHECKING:
    from allocator.slab import Slab

__all__ = [
    "COLD",
    "DTYPE_BYTES",
    "FULL",
    "LRU",
    "BlockPool",
    "BlockState",
    "BlockTable",
    "CacheGroup",
    "CannotRollback",
    "CapacityError",
    "ClassUsage",
    "ConfigError",
    "CopyOnWrite",
    "DuplicateSequence",
    "EvictionPolicy",
    "ExtentLayout",
    "GeometryError",
    "GroupKind",
    "IntegrityError",
    "KVError",
    "KVGeometry",
    "LeaseError",
    "Move",
    "PoolUsage",
    "PrefixIndex",
    "Slab",
    "TierError",
    "UnknownSequence",
    "UsageError",
    "class_index",
    "window_first_block",
]


def __getattr__(name: str) -> object:
    if name == "Slab":
        from allocator.slab import Slab

        return Slab
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
