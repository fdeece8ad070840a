"""Our tiers below vLLM's own host tier: its real tiering manager, with what a worker would write put there by hand."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from allocator import ConfigError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
BLOCK_BYTES = 4096


def config(number: int, **tier: Any) -> Any:
    from vllm.v1.kv_offload import config as parts

    return parts.OffloadingConfig(
        groups=(parts.OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=BLOCK_BYTES,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": 1 << 20,
            "secondary_tiers": [
                {
                    "type": "KVStoreTier",
                    "module_path": "engine_adapter.vllm_connector.secondary_tier",
                    "weights": "w",
                    **tier,
                }
            ],
        },
        engine_id=f"test-{number}-{time.monotonic_ns()}",
        model=parts.OffloadingModelConfig("model", "float32"),
        cache=parts.OffloadingCacheConfig(16, 1),
        parallel=parts.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


class Engine:
    """vLLM's scheduler side of its tiering; the worker is `write` and `read`."""

    def __init__(self, number: int, **tier: Any) -> None:
        from vllm.v1.kv_offload.base import ReqContext
        from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

        self.manager: Any = TieringOffloadingSpec(config(number, **tier)).get_manager()
        self.request = ReqContext("r")
        self.manager.on_new_request(self.request)
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)

    def step(self) -> None:
        from vllm.v1.kv_offload.base import ScheduleEndContext

        self.manager.on_schedule_end(ScheduleEndContext(["r"], []))

    def settle(self) -> None:
        until = time.monotonic() + 30
        while self.manager.has_pending_work() and time.monotonic() < until:
            self.step()
            time.sleep(0.001)
        assert not self.manager.has_pending_work()

    def write(self, keys: list[Any]) -> None:
        plan = self.manager.prepare_store(keys, self.request)
        for key, chunk in zip(plan.keys_to_store, plan.store_spec.block_ids, strict=True):
            self.memory[chunk] = content(key)
        self.manager.complete_store(keys, self.request)
        self.settle()

    def lookup(self, key: Any) -> str:
        """As vLLM's scheduler asks: until it is no longer "ask again"."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found = self.manager.lookup(key, self.request)
            if found.name in ("HIT", "MISS"):
                return str(found.name)
            self.step()
            time.sleep(0.001)
        raise AssertionError("no answer")

    def read(self, key: Any) -> np.ndarray[Any, Any]:
        (chunk,) = self.manager.prepare_load([key], self.request).block_ids
        self.manager.complete_load([key], self.request)
        return self.memory[chunk].copy()


@contextmanager
def engine(number: int, **tier: Any) -> Iterator[Engine]:
    made = Engine(number, **tier)
    try:
        yield made
    finally:
        made.manager.shutdown()


def content(key: bytes) -> np.ndarray[Any, Any]:
    return np.random.default_rng(list(key)).integers(0, 256, BLOCK_BYTES, np.uint8)


def names(count: int) -> list[Any]:
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(hashlib.sha256(b"%d" % one).digest(), 0) for one in range(count)]


def test_what_one_engine_wrote_another_finds_below_its_host_tier(tmp_path: Path) -> None:
    keys = names(20)
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "8 MiB"}
    with engine(1, **disk) as first:
        first.write(keys)
    with engine(2, **disk) as second:
        for key in keys:
            assert second.lookup(key) == "HIT"
            assert np.array_equal(second.read(key), content(key))
        assert second.lookup(names(21)[-1]) == "MISS"
    with engine(3, **{**disk, "weights": "others"}) as other:
        assert other.lookup(keys[0]) == "MISS"


def test_what_is_read_is_told_in_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found here: a chunk counted as one token, since that is a block of the geometry that chunks have below."""
    from kvstore.disk_tier.tier import DiskTier

    keys, told = names(5), []
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "8 MiB"}
    with engine(1, **disk) as first:
        first.write(keys)
    monkeypatch.setattr(DiskTier, "note_reuse", lambda _self, _key, blocks: told.append(blocks))
    with engine(2, **disk) as second:
        for key in keys:
            assert second.lookup(key) == "HIT"
            second.read(key)
    assert sum(told) == 5 * 16
    assert 0 not in told


def test_bytes_that_went_bad_are_not_loaded(tmp_path: Path) -> None:
    keys = names(8)
    disk = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "8 MiB"}
    with engine(1, **disk) as first:
        first.write(keys)
    wanted = content(keys[3]).tobytes()
    for file in (tmp_path / "disk").iterdir():
        raw = bytearray(file.read_bytes())
        at = raw.find(wanted[:64])
        if at >= 0:
            raw[at + 9] ^= 1
            file.write_bytes(raw)
    with engine(2, **disk) as second:
        assert [second.lookup(key) for key in keys] == ["HIT"] * 3 + ["MISS"] + ["HIT"] * 4
        assert np.array_equal(second.read(keys[2]), content(keys[2]))


def test_hashes_that_resist_nobody_are_not_stored(tmp_path: Path) -> None:
    from vllm.v1.kv_offload.base import make_offload_key

    key = make_offload_key(b"sixteen bytes of", 0)
    with engine(1, host_bytes=1 << 20) as one:
        one.write([key])
        tier = one.manager.secondary_tiers[0]
        assert tier._below.tiers[0].used_bytes == 0
        assert tier._below.counters()["hash_of_another_kind"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"host_bytes": 1, "weights": ""}, "weights"), ({"host_bytes": 1, "codec": "int4"}, "codec"), ({}, "no tier")],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        Engine(1, **given)
