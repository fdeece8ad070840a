"""An engine whose own cache is FP8: copies are its bytes, the scales are part of who they are, codecs are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from engine_adapter.vllm_connector.layout import GroupPages
from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, Engine, prompt, refused, setting

_COMPUTES_FP8 = torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()  # as vLLM asks
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not _COMPUTES_FP8, reason="vLLM reads FP8 caches on CPUs with AVX-512 or AMX only"),
]
VALUES = 3 * 2 * 2 * BLOCK * 32  # of a block: layers, heads, K and V, tokens, dim


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[Engine]:
    with kit.engine(models["full"], {"host_bytes": "64 MiB"}, kv_cache_dtype="fp8") as made:
        yield made


def test_an_fp8_cache_is_stored_and_loaded_as_it_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(100, 500)
    engine.forget(store_too=True)
    expected, _ = engine.answer(asked)
    engine.forget()
    loaded: list[bytes] = []
    real = GroupPages.scatter

    def noting(self: GroupPages, source: Any, places: Any) -> None:
        real(self, source, places)
        loaded.append(source.tobytes())
        back = np.empty_like(source)
        self.gather(places, back)
        assert np.array_equal(back, source)

    monkeypatch.setattr(GroupPages, "scatter", noting)
    assert engine.answer(asked) == (expected, 499 // BLOCK * BLOCK)
    assert sum(map(len, loaded)) == 499 // BLOCK * VALUES, "a byte a value"
    assert len(set(b"".join(loaded))) > 100, "and not one pattern"


def test_planted_keys_and_values_swapped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(101, 500)
    engine.forget(store_too=True)
    expected, _ = engine.answer(asked)
    engine.forget()
    real = GroupPages.scatter

    def mistaken(self: GroupPages, source: Any, places: Any) -> None:
        real(self, source.reshape(-1, 2, BLOCK * 32)[:, ::-1].copy().reshape(-1), places)

    monkeypatch.setattr(GroupPages, "scatter", mistaken)
    answer, cached = engine.answer(asked)
    assert cached
    assert answer != expected


def test_other_scales_are_another_cache(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from engine_adapter.vllm_connector import KVStoreConnector
    from engine_adapter.vllm_connector.pages import scales_name

    config = engine.llm.llm_engine.vllm_config
    core = engine.llm.llm_engine.engine_core.engine_core
    layers = {
        name: layer
        for name, layer in config.compilation_config.static_forward_context.items()
        if hasattr(layer, "_k_scale_float")
    }

    def root() -> Any:
        """Of a scheduler that starts now and asks the worker."""
        made = KVStoreConnector(config, KVConnectorRole.SCHEDULER, core.scheduler.kv_cache_config)
        made.shutdown()
        return made._book._identity.root()

    worker, before = get_kv_transfer_group(), root()
    assert worker._scale_name == scales_name(layers)
    assert root() == before
    monkeypatch.setattr(next(iter(layers.values())), "_v_scale_float", 0.5)
    monkeypatch.setattr(worker, "_scale_name", scales_name(layers))
    assert root() != before


@pytest.mark.parametrize("codec", ["int4", "int8k"])
def test_copies_of_fewer_bits_are_refused(engine: Engine, codec: str) -> None:
    assert (
        refused(engine, setting(codec=codec), "WORKER")
        == f"codec: got {codec!r} for a float8_e4m3fn cache; expected raw"
    )
