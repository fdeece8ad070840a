"""LMCache's own Redis connectors, called as its remote backend calls them; the peer of the `tiers` suite.

Runs as a process under the interpreter that has LMCache. Values are full precision chunks of a model's KV in the shape
that LMCache gives them, read into its own host memory and written from there; it stores nothing else of them.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from importlib import metadata
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector, RESPConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from benchmarks.peers import serve
from benchmarks.rows import Stopwatch

_LAYERS, _HEADS, _DIM = 4, 8, 128
_TOKEN_BYTES = _LAYERS * 2 * _HEADS * _DIM * 2
_ATTEMPT_SECONDS = 120


class LmcacheSide:
    """Connectors `cpp` (its C++ client) and `py` (redis-py, asyncio) on one server."""

    def __init__(self, host: str, port: int, chunk_bytes: int, chunk_count: int) -> None:
        tokens = chunk_bytes // _TOKEN_BYTES
        config = LMCacheEngineConfig.from_defaults(chunk_size=tokens, local_cpu=True, max_local_cpu_size=1.0)
        shape = (_LAYERS, 2, tokens, _HEADS, _DIM)
        meta = LMCacheMetadata("toy", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=tokens)
        self._host = LocalCPUBackend(config, meta, dst_device="cpu")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connectors: dict[str, Any] = {
            "cpp": self._made(lambda: RESPConnector(host, port, self._loop, self._host)),
            "py": self._made(lambda: RedisConnector(f"redis://{host}:{port}", self._loop, self._host)),
        }
        self._names = {
            kind: [CacheEngineKey(f"toy-{kind}", 1, 0, number, torch.bfloat16) for number in range(chunk_count)]
            for kind in self._connectors
        }

    def put(self, kind: str) -> float:
        """Store all chunks; seconds."""
        connector = self._connectors[kind]
        chunks = [
            self._host.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt)
            for _ in self._names[kind]
        ]
        for number, chunk in enumerate(chunks):
            chunk.tensor.fill_(number)
        watch = Stopwatch()
        with watch:
            self._wait(connector.batched_put(self._names[kind], chunks))
        for chunk in chunks:
            chunk.ref_count_down()
        return watch.seconds

    def get(self, kind: str) -> float:
        """Read all chunks into its host memory, as they were stored; seconds."""
        connector = self._connectors[kind]
        watch = Stopwatch()
        with watch:
            if connector.support_batched_get():
                chunks = self._wait(connector.batched_get(self._names[kind]))
            else:
                chunks = self._wait(self._each(connector, self._names[kind]))
        for number, chunk in enumerate(chunks):
            if chunk is None or float(chunk.tensor.flatten()[-1]) != float(torch.tensor(number).bfloat16()):
                raise RuntimeError(f"chunk {number} came back wrong")
            chunk.ref_count_down()
        return watch.seconds

    async def _each(self, connector: Any, names: list[Any]) -> list[Any]:
        return await asyncio.gather(*(connector.get(name) for name in names))

    def _made(self, make: Any) -> Any:
        async def on_loop() -> Any:
            return make()

        return self._wait(on_loop())

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ATTEMPT_SECONDS)


if __name__ == "__main__":
    serve(LmcacheSide(sys.argv[1], *map(int, sys.argv[2:])), f"lmcache {metadata.version('lmcache')}")
    os._exit(0)  # its workers never end; each would complain
