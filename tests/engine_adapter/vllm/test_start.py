"""What an engine is refused for at start, with what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from allocator import ConfigError
from engine_adapter.vllm_connector.device_tier import DeviceTier
from engine_adapter.vllm_connector.lookup import Answer, LookupServer
from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import Engine, attribute, refused, setting

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
LARGE = 64  # a block of so many tokens lies in a slot file, not in the index


@pytest.fixture(scope="module")
def engine(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    tiers = {"disk_path": str(tmp_path_factory.mktemp("disk")), "disk_bytes": "64 MiB", "block_tokens": LARGE}
    with kit.engine(models["full"], tiers) as made:
        yield made


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (setting(block_tokens=48), "start vLLM with --block-size"),
        (setting(disk_path="", redis_url=""), "redis_url, daemon or device_int4_bytes"),
        (setting(daemon="tcp://there"), "expected the path of its socket"),
        (setting(codec="int4", block_tokens=8), "block_tokens a multiple of 16"),
        (setting(device_int4_bytes="1 GiB"), "expected codec 'int4' beside it"),
        (attribute("kv_transfer_config", "kv_load_failure_policy", "fail"), "expected recompute"),
        (attribute("model_config", "model", "some/model"), "set weights in kv_connector_extra_config"),
        (attribute("cache_config", "cache_dtype", "int4_per_token_head"), "kv_cache_dtype: got 'int4_per_token_head'"),
        (attribute("parallel_config", "pipeline_parallel_size", 2), "expected 1"),
        (attribute("parallel_config", "tensor_parallel_size", 3), "expected a divisor or a multiple"),
    ],
)
def test_an_engine_that_cannot_work_is_refused_at_start(engine: Engine, change: Any, expected: str) -> None:
    assert expected in refused(engine, change)


def test_a_device_tier_without_room_for_a_block_is_refused_at_start(engine: Engine) -> None:
    given = setting(disk_path="", codec="int4", device_int4_bytes=1000)
    assert "device_int4_bytes: got 1000; expected at least" in refused(engine, given, role="WORKER")


@pytest.mark.parametrize("what", ["another tier", "the socket"])
def test_a_start_that_fails_gives_its_device_tier_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    closed: list[int] = []
    real = DeviceTier.close

    def close(tier: DeviceTier) -> None:
        closed.append(tier.capacity_bytes)
        real(tier)

    monkeypatch.setattr(DeviceTier, "close", close)
    given = {"disk_path": "", "codec": "int4", "block_tokens": 16, "device_int4_bytes": "8 MiB"}
    if what == "another tier":
        assert "ftp" in refused(engine, setting(**given, redis_url="ftp://there"), role="WORKER")
    else:
        taken = LookupServer("another", lambda question, hashes: Answer(0, False, 0))
        with pytest.raises(OSError, match="in use"):
            refused(engine, setting(**given), role="WORKER")
        taken.close()
    assert closed == [8 << 20]


def test_a_card_that_cannot_copy_is_refused_at_start(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("says what happens without a card")
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    message = refused(engine, attribute("device_config", "device_type", "cuda"), role="WORKER")
    assert "whose pages cannot be copied (no " in message


def test_an_unknown_kind_of_server_is_refused_at_start(engine: Engine) -> None:
    assert "ftp" in refused(engine, setting(disk_path="", redis_url="ftp://there"), role="WORKER")


def test_an_untested_vllm_is_refused_at_start(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.47.0")
    message = refused(engine, lambda config: None)
    assert "vLLM 0.47.0" in message
    assert "expected one of vllm>=0.32,<0.33" in message


def test_an_engine_with_a_bad_setting_does_not_start(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="unknown key 'hosts_bytes'"):
        kit.Engine(models["full"], {"hosts_bytes": 1})
