"""The store as SGLang's HiCache storage: pages of its host pool kept on disk, in Redis or in the daemon.

SGLang loads `KVStoreHiCache` by `--hicache-storage-backend dynamic` (docs/how-to/sglang.md). Device and host memory are
SGLang's own; this package names its pages, writes them down and brings them back, bytes as they are. Only `backend`
imports SGLang, when its class is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_adapter.sglang_storage.backend import KVStoreHiCache

__all__ = ["KVStoreHiCache"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreHiCache":
        from engine_adapter.sglang_storage.backend import KVStoreHiCache

        return KVStoreHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
