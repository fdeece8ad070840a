"""Identity, residency, tiers, movement and policy of KV blocks.

The public names of the package. Each is loaded when it is first asked for (PEP 562), so that `import kvstore` costs
nothing and never imports torch: only KVStore, which owns a slab of tensors, does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from kvstore.config import KVStoreConfig
    from kvstore.copy_key import CopyKey
    from kvstore.events import AllCleared, BlockRemoved, BlockStored, EventStream
    from kvstore.host_tier.tier import HostTier
    from kvstore.identity import Adapter, HashChain, Identity, Media
    from kvstore.retention import Retention
    from kvstore.sequence import Lease
    from kvstore.store import KVStore
    from kvstore.tier import Completion, GetItem, PutItem, ResultCode, Tier, Transfer

_HOMES = {
    "allocator.errors": (
        "CannotRollback",
        "CapacityError",
        "ConfigError",
        "DuplicateSequence",
        "GeometryError",
        "IntegrityError",
        "KVError",
        "LeaseError",
        "TierError",
        "UnknownSequence",
        "UsageError",
    ),
    "kvstore.config": ("KVStoreConfig",),
    "kvstore.copy_key": ("CopyKey",),
    "kvstore.events": ("AllCleared", "BlockRemoved", "BlockStored", "EventStream"),
    "kvstore.host_tier.tier": ("HostTier",),
    "kvstore.identity": ("Adapter", "HashChain", "Identity", "Media"),
    "kvstore.retention": ("Retention",),
    "kvstore.sequence": ("Lease",),
    "kvstore.store": ("KVStore",),
    "kvstore.tier": ("Completion", "GetItem", "PutItem", "ResultCode", "Tier", "Transfer"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter",
    "AllCleared",
    "BlockRemoved",
    "BlockStored",
    "CannotRollback",
    "CapacityError",
    "Completion",
    "ConfigError",
    "CopyKey",
    "DuplicateSequence",
    "EventStream",
    "GeometryError",
    "GetItem",
    "HashChain",
    "HostTier",
    "Identity",
    "IntegrityError",
    "KVError",
    "KVStore",
    "KVStoreConfig",
    "Lease",
    "LeaseError",
    "Media",
    "PutItem",
    "ResultCode",
    "Retention",
    "Tier",
    "TierError",
    "Transfer",
    "UnknownSequence",
    "UsageError",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
