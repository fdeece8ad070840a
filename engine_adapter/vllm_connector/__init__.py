"""The store inside vLLM: a KV connector that keeps prompts' blocks on host, disk, Redis or in the daemon.

vLLM loads `KVStoreConnector` by `kv_connector_module_path: "engine_adapter.vllm_connector"` (docs/how-to/vllm.md). The
device tier is vLLM's own; this package names its blocks, copies them down when they are full, and loads them back.
vLLM is imported when the class is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_adapter.vllm_connector.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVStoreConnector":
        from engine_adapter.vllm_connector.connector import KVStoreConnector

        return KVStoreConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
