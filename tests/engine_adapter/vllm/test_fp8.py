"""An engine whose own cache is FP8: copies are its bytes, their scales part of who they are, and codecs refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def engine(models: dict[str, Path]) -> Iterator[Engine]:
    with kit.engine(models["full"], {"host_bytes": "64 MiB"}, kv_cache_dtype="fp8") as made:
        yield made


def test_an_fp8_cache_is_stored_and_loaded_as_it_is(engine: Engine) -> None:
    asked = prompt(100, 500)
    expected, _ = engine.answer(asked)
    engine.forget()
    assert engine.answer(asked) == (expected, 499 // BLOCK * BLOCK)
    used = engine.shelf.below.tiers[0].used_bytes
    print(used)
