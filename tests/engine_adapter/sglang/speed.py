"""Pages written and read: this storage, SGLang's own file storage and a memcpy, interleaved in one run.

    PYTHONPATH=. .venv-sglang/bin/python -m tests.engine_adapter.sglang.speed

64 pages of 1 MiB of SGLang's real host pool. Medians of the rounds, GiB/s; both storages leave the bytes to the page
cache. Ours verifies every byte that it reads.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.engine_adapter.sglang import stand_ins

stand_ins.import_sglang()

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName, PoolTransfer  # noqa: E402

from kvstore.daemon import Daemon  # noqa: E402
from tests.engine_adapter.sglang import kit  # noqa: E402
from tests.kvstore.daemon import kit as daemon_kit  # noqa: E402

PAGES, ROUNDS = 64, 9
PAGE_TOKENS, LAYERS, HEADS, DIM = 64, 32, 2, 64


def main() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvstore-speed-"))
    kit.PAGES = 2 * PAGES
    try:
        rows = measure(folder)
    finally:
        shutil.rmtree(folder)
    print(json.dumps(rows, indent=1))


def measure(folder: Path) -> dict[str, float]:
    pool = kit.fill(kit.mha_pool("page_first", HEADS, layers=LAYERS, dim=DIM, page=PAGE_TOKENS))
    size = PAGES * PAGE_TOKENS * pool.size_per_token
    source, target = (kit.indices(range(at, at + PAGES), PAGE_TOKENS) for at in (0, PAGES))
    file = HiCacheFile(kit.config({}), str(folder / "file"))
    file.register_mem_host_pool_v2(pool, PoolName.KV)
    daemon = Daemon(daemon_kit.settings(folder, host_bytes=1 << 30))
    daemon.start()
    time.sleep(3.0)  # it touches its memory in the background
    disk = {"disk_path": str(folder / "disk"), "disk_bytes": "4 GiB", "fetch_deadline_seconds": 30}
    flat = torch.empty(2, size, dtype=torch.uint8).fill_(1)
    found: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        found.setdefault(name, []).append(size / (1 << 30) / (time.perf_counter() - began))

    with (
        kit.storage(pool, disk) as ours,
        kit.storage(pool, {"daemon": str(folder / "d.sock"), "fetch_deadline_seconds": 30}) as shared,
    ):
        for number in range(ROUNDS):
            keys = kit.chain(PAGES, 1000 * number)
            timed("memcpy", lambda: flat[1].copy_(flat[0]))
            sides = [
                ("SGLang's file", lambda indices, keys=keys: [PoolTransfer(PoolName.KV, indices, keys=keys)], file),
                ("disk", lambda indices: indices, ours),
                ("daemon", lambda indices: indices, shared),
            ]
            for name, given, made in sides:
                if made is file:
                    timed(f"{name} set", lambda given=given: file.batch_set_v2(given(source)))
                    timed(f"{name} get", lambda given=given: file.batch_get_v2(given(target)))
                else:
                    timed(f"{name} set", lambda made=made, keys=keys: check(made.batch_set_v1(keys, source)))
                    timed(f"{name} get", lambda made=made, keys=keys: check(made.batch_get_v1(keys, target)))
    daemon.stop()
    return {name: round(statistics.median(rates), 2) for name, rates in found.items()}


def check(flags: list[bool]) -> None:
    assert all(flags), flags


if __name__ == "__main__":
    main()
