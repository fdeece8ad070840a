"""These tests need vLLM, which has an environment of its own: `make test-vllm`. Elsewhere they are skipped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.peer import Peer

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # before vLLM is imported
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("models")
    return {family: kit.make_model(family, folder / family) for family in kit.FAMILIES}


@pytest.fixture(scope="session")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    made = Peer(tmp_path_factory.mktemp("peer") / "log")
    yield made
    made.close()


@pytest.fixture(scope="module", params=kit.FAMILIES)
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[kit.Engine]:
    with kit.engine(models[request.param], {"host_bytes": "64 MiB"}) as made:
        made.family = request.param  # type: ignore[attr-defined]
        yield made
