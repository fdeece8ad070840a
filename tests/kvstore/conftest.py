"""Small stores with real bytes: one or two groups, blocks of 16 tokens, a handful of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from allocator import CacheGroup, GroupKind, KVGeometry
from kvstore import Identity, KVStore, KVStoreConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MakeStore = "Callable[..., KVStore]"


def full_geometry(dtype: str = "float32") -> KVGeometry:
    return KVGeometry.uniform(layers=2, kv_heads=2, head_dim=64, dtype=dtype)


def hybrid_geometry(window_tokens: int = 40) -> KVGeometry:
    """Two sliding layers and one full one."""
    return KVGeometry(
        groups=(
            CacheGroup(kind=GroupKind.FULL, layers=(2,), kv_heads=2, key_dim=64, value_dim=64),
            CacheGroup(
                kind=GroupKind.SLIDING, layers=(0, 1), kv_heads=2, key_dim=64, value_dim=64, window_tokens=window_tokens
            ),
        ),
        dtype="float32",
    )


@pytest.fixture
def make_store() -> Iterator[Callable[..., KVStore]]:
    """make_store(blocks=..., host_blocks=..., geometry=..., **config) -> KVStore, closed and checked at the end."""
    stores: list[KVStore] = []

    def make(blocks: int = 32, host_blocks: int = 0, geometry: KVGeometry | None = None, **settings: Any) -> KVStore:
        geometry = geometry or full_geometry()
        slot_bytes = sum(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
        options = {
            name: settings.pop(name)
            for name in ("tiers", "clock", "device", "identity", "placeholder_ids")
            if name in settings
        }
        identity = options.pop("identity", None) or Identity(model="toy", weights="w0", geometry=geometry)
        settings.setdefault("codec", "raw")
        settings.setdefault("io_threads", "inline")
        settings.setdefault("fetch_deadline_seconds", 20.0)  # where none is meant: a busy machine is slow
        if "tiers" in options or settings.keys() & {"disk_path", "redis_url"}:
            settings.setdefault("share", True)  # stores of one test stand for processes
        config = KVStoreConfig(device_bytes=blocks * slot_bytes, host_bytes=host_blocks * slot_bytes, **settings)
        store = KVStore(geometry, identity, config, **options)
        stores.append(store)
        return store

    yield make
    for store in stores:
        if not store.closed:
            store.check_invariants()
            store.close()
