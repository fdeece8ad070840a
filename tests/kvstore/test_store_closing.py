"""A store that closes writes down what is named and worth it, within its time; the next process reuses it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvstore import UsageError
from kvstore.tier import Tier
from tests.kvstore.driving import run_prompt
from tests.kvstore.writing_kit import B, DistantTier, distant, prompt, serve
from tests.servers import Server, shared_server
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import KVStore

PROGRAM = """
import json, sys
import torch
from kvstore import Identity, KVStore, KVStoreConfig
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import check_bytes, run_prompt
torch.set_num_threads(1)
geometry = full_geometry()
identity = Identity(model="toy", weights="w0", geometry=geometry)
settings = json.loads(sys.argv[1])
settings |= {"codec": "raw", "share": True, "spill_policy": "everything", "load_always": True}
config = KVStoreConfig(device_bytes="8 MiB", **settings)
prompt = list(range(20 * 16 + 1))
with KVStore(geometry, identity, config) as store:
    store.lookup(prompt)
    import time; time.sleep(0.05)  # a remote tier looks it up
    reused = run_prompt(store, "a", prompt)
    check_bytes(store, "a", prompt)
    slots = store.tables("a")[0] >> 1
    digest = store.slab.keys_view(0)[torch.from_numpy(slots)][:20].double().sum().item()
print(json.dumps([reused, digest]))
"""


def run_process(**settings: object) -> tuple[int, float]:
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    reused, digest = json.loads(done.stdout)
    return reused, digest


@pytest.mark.parametrize("host", [0, 4 << 20], ids=["device", "host"])
def test_the_next_process_reuses_a_directory(tmp_path: Path, host: int) -> None:
    settings = {"disk_path": str(tmp_path), "disk_bytes": 16 << 20, "host_bytes": host}
    first, wrote = run_process(**settings)
    second, read = run_process(**settings)
    assert (first, second) == (0, 20 * B)
    assert wrote == read


def test_the_next_process_reuses_a_server() -> None:
    settings = {"redis_url": shared_server().unix_url + "?namespace=closing"}
    first, wrote = run_process(**settings)
    second, read = run_process(**settings)
    assert (first, second) == (0, 20 * B)
    assert wrote == read


def test_closing_writes_what_the_policy_wants_and_nothing_else(make_store: Callable[..., KVStore]) -> None:
    disk = DistantTier(1 << 24, name="disk")
    store = make_store(blocks=200, tiers=[disk], spill_queue_blocks=5)
    serve(store, "shared", prompt(1, 12))
    serve(store, "shared", prompt(1, 12))
    serve(store, "once", prompt(2, 12))
    run_prompt(store, "live", prompt(1, 12))
    store.close()
    assert disk.copy_count == 12, "all that two requests shared, however short the queue"


def test_a_tier_that_does_nothing_holds_a_close_no_longer_than_its_time(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=200, tiers=[disk], spill_policy="everything", spill_queue_blocks=70)
    run_prompt(store, "a", prompt(1, 90))
    started = time.monotonic()
    with Stopwatch() as watch:
        store.close(drain_seconds=0.3)
    assert time.monotonic() - started > 0.25
    assert watch.seconds < 1.0
    assert store.metrics.get("dropped_blocks", tier="disk", cause="close") == 90 - 64
    assert store.metrics.get("dropped_blocks", tier="disk", cause="cancelled") == 64
    assert store._parts.upkeep.writes.staged_bytes == 0
    assert store._parts.upkeep.writes.fenced_blocks == 0
    assert work.tasks == []


def test_a_close_that_may_take_no_time_writes_nothing_more(make_store: Callable[..., KVStore]) -> None:
    disk = DistantTier(1 << 24, name="disk")
    store = make_store(blocks=200, tiers=[disk])
    serve(store, "a", prompt(1, 12))
    serve(store, "a", prompt(1, 12))
    before = disk.copy_count
    store.close(drain_seconds=0)
    assert disk.copy_count == before
    store.close(drain_seconds=0)
    for wrong in (-1, float("nan"), float("inf"), "2", True):
        with pytest.raises(UsageError, match="drain_seconds"):
            store.close(drain_seconds=wrong)  # type: ignore[arg-type]


def test_a_hung_server_holds_a_close_no_longer_than_its_time(make_store: Callable[..., KVStore]) -> None:
    with Server() as server:
        store = make_store(blocks=200, redis_url=server.url, io_threads="thread", spill_policy="everything")
        serve(store, "warm", prompt(9, 4))
        with server.hung():
            run_prompt(store, "a", prompt(1, 90))
            with Stopwatch() as watch:
                store.close(drain_seconds=0.5)
        assert watch.seconds < 0.5 + 1.5, "the rest is the server's own timeout"
        left = sum(
            store.metrics.get("dropped_blocks", tier="remote", cause=cause)
            for cause in ("close", "failed", "cancelled")
        )
        assert left >= 90


def test_a_tier_that_never_closes_is_left_to_itself(
    make_store: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.closing._GRACE_SECONDS", 0.2)
    disk = DistantTier(1 << 24, name="disk")
    hang = time.sleep
    monkeypatch.setattr(disk, "close", lambda: hang(1.5))
    store = make_store(blocks=8, tiers=[disk])
    with Stopwatch() as watch:
        store.close()
    assert watch.seconds < 1.0
    assert store.metrics.get("failed_tasks", cause="close_unfinished") == 1


def test_what_a_tier_raises_at_close_is_raised(make_store: Callable[..., KVStore]) -> None:
    class Failing(DistantTier):
        def close(self) -> None:
            super().close()
            raise OSError("no more")

    tier: Tier = Failing(1 << 24, name="disk")
    store = make_store(blocks=8, tiers=[tier])
    with pytest.raises(OSError, match="no more"):
        store.close()


def test_sequences_that_were_live_at_close_hold_nothing_after_it(make_store: Callable[..., KVStore]) -> None:
    """Found by hand: their tables were forgotten, not given back, and check_invariants named the blocks they held."""
    store = make_store(blocks=24, share=True)
    run_prompt(store, "ended", prompt(1, 3))
    store.finish("ended")
    run_prompt(store, "live", prompt(2, 4), exact=True)
    store.fork("live", "copy")
    store.close()
    store.check_invariants()
    assert store.pool.usage().live_bytes == 0
