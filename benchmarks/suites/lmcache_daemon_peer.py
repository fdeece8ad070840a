"""LMCache's own daemon and its worker's client, through shared memory; the peer of the `daemon` suite.

Runs as a process under the interpreter that has LMCache and starts its server as a process of its own. KV lies in paged
CPU tensors as vLLM has them; LMCache's worker copies chunks between them and the server's shared memory.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from typing import Any

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context.worker_transfer import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

from benchmarks.peers import serve
from benchmarks.rows import Stopwatch

_LAYERS, _HEADS, _DIM = 32, 8, 128
_BLOCK_TOKENS, _CHUNK_TOKENS = 16, 256
_MODEL = "toy"
_WAIT_SECONDS = 60.0


class LmcacheDaemonSide:
    """One prompt of KV in paged tensors, stored and retrieved."""

    def __init__(self, tokens: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        name = f"lmcache_bench_{os.getpid()}"
        options = ["--chunk-size", str(_CHUNK_TOKENS), "--l1-size-gb", "1", "--l1-init-size-gb", "1"]
        options += ["--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven", "--shm-name", name]
        command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--port", str(port), *options]
        self._server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        blocks = tokens // _BLOCK_TOKENS
        shape = (2, blocks, _BLOCK_TOKENS, _HEADS, _DIM)
        torch.manual_seed(0)
        self._caches = {f"layer{n}": torch.randn(shape).to(torch.bfloat16) for n in range(_LAYERS)}
        self._expected = {name: cache.clone() for name, cache in self._caches.items()}
        self._block_ids = [list(range(blocks))]
        self._tokens, self._round = tokens, 0
        self._client = self._connected(port)
        self._context = create_transfer_context(
            self._caches, instance_id=os.getpid(), req_client=self._client, mode="engine_driven"
        )
        self._context.register(self._caches, _MODEL, 1, _CHUNK_TOKENS // _BLOCK_TOKENS, _WAIT_SECONDS)

    def _connected(self, port: int) -> Any:
        import zmq

        until = time.monotonic() + _WAIT_SECONDS
        while True:
            if self._server.poll() is not None:
                raise RuntimeError(f"LMCache's server ended with code {self._server.returncode}")
            try:
                socket.create_connection(("127.0.0.1", port), 0.2).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        return RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=zmq.Context.instance())

    def _key(self, *, reader: bool) -> Any:
        tokens = tuple(range(self._round, self._round + self._tokens))
        names = {"model_name": _MODEL, "world_size": 1, "worker_id": None if reader else 0, "token_ids": tokens}
        return IPCCacheServerKey(**names, start=0, end=self._tokens, request_id=f"r{self._round}", num_kv_readers=1)

    def mode(self) -> float:
        """1 when its payload goes through shared memory."""
        return float("Shm" in type(self._context.engine_driven_context).__name__)

    def store(self) -> float:
        """Store the prompt under new tokens; seconds."""
        self._round += self._tokens
        watch = Stopwatch()
        with watch:
            future = self._context.submit_store("s", self._key(reader=False), self._caches, self._block_ids, None, 16)
            good = future.result(timeout=_WAIT_SECONDS)
        if not good:
            raise RuntimeError("LMCache did not store")
        return watch.seconds

    def retrieve(self) -> float:
        """Retrieve the prompt stored last; its lookup is not counted; seconds."""
        key = self._key(reader=True)
        self._client.lookup(key, 1).result(timeout=_WAIT_SECONDS)
        chunks = self._client.wait_prefetch_status(key.request_id, 10.0).result(timeout=_WAIT_SECONDS)
        if chunks is None or chunks * _CHUNK_TOKENS != self._tokens:
            raise RuntimeError(f"LMCache found {chunks} chunks")
        watch = Stopwatch()
        with watch:
            future = self._context.submit_retrieve(
                "r", self._key(reader=False), self._caches, self._block_ids, None, 16
            )
            good = future.result(timeout=_WAIT_SECONDS)
        if not good:
            raise RuntimeError("LMCache did not retrieve")
        return watch.seconds

    def check(self) -> float:
        """Forget, retrieve, compare; 1 when every byte is right."""
        for cache in self._caches.values():
            cache.zero_()
        self.retrieve()
        return float(all(torch.equal(cache, self._expected[name]) for name, cache in self._caches.items()))

    def stop(self) -> float:
        self._server.terminate()
        self._server.wait(20)
        return 0.0


if __name__ == "__main__":
    serve(LmcacheDaemonSide(int(sys.argv[1])), f"lmcache {metadata.version('lmcache')}")
    os._exit(0)  # its threads never end
