"""A real store and decode loop around a Hugging Face model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import Request, RequestResult
from engine_adapter.runner import HFRunner
from kvstore import Identity, KVStore, KVStoreConfig


class ModelKit:
    """One model, one store of `blocks` blocks per group (about), one loop."""

    def __init__(
        self,
        model: Any,
        *,
        blocks: int,
        host_blocks: int = 0,
        disk: Path | None = None,
        codec: str = "raw",
        io_threads: str = "thread",
        device: str = "cpu",
        backend: str | None = None,
        **options: Any,
    ) -> None:
        self.runner = HFRunner(model, backend=backend)
        kv = self.runner.geometry
        block_bytes = sum(kv.full_slot_bytes(group) for group in range(len(kv.groups)))
        config = KVStoreConfig(
            device_bytes=blocks * block_bytes,
            host_bytes=host_blocks * (block_bytes + 4096),
            host_prefault=False,
            disk_path="" if disk is None else str(disk),
            codec=codec,
            io_threads=io_threads,
            load_always=True,
        )
        identity = Identity(model=type(model).__name__, weights="0" * 64, geometry=kv)
        self.store = KVStore(kv, identity, config, device=device)
        assert self.store.slab is not None
        self.runner.attach(self.store.slab, self.store.cold_codec)
        self.loop = DecodeLoop(self.runner, self.store, **options)

    def run(self, *requests: Request) -> dict[str, RequestResult]:
        for request in requests:
            self.loop.submit(request)
        while self.loop.busy:
            if self.loop.step().idle:
                self.store.wait(0.05)
            self.store.check_invariants()
        return self.loop.collect()

    def cooled_blocks(self) -> int:
        return sum(int(value) for name, value in self.store.metrics.snapshot().items() if "cooled_blocks" in name)

    def close(self) -> None:
        assert self.store.sequence_ids() == []
        self.runner.release()
        self.store.close()


def differences(results: dict[str, RequestResult], truth: dict[str, list[int]]) -> list[str]:
    """Names of the requests whose tokens (of every branch) are not the expected ones, or that failed."""
    wrong = []
    for name, expected in truth.items():
        result = results[name]
        if result.error or any(list(completion.token_ids) != expected for completion in result.completions):
            wrong.append(f"{name}: {result.error or [list(c.token_ids) for c in result.completions]} != {expected}")
    return wrong
