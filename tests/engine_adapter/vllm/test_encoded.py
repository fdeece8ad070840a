"""Encoded copies in a real vLLM engine: which blocks have them, and what is known as lossy afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


class Puts:
    """Notes what is stored from now on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keys: list[Any] = []
        real = engine.shelf._saver._put

        def noting(chunk: Any, items: Any) -> None:
            self.keys += [key for key, *_ in items]
            real(chunk, items)

        monkeypatch.setattr(engine.shelf._saver, "_put", noting)

    def take(self, engine: Engine) -> list[Any]:
        engine.settle()
        taken = self.keys[:]
        self.keys.clear()
        return taken


TIERS = [("full", "host"), ("hybrid", "host"), ("mla", "host"), ("hybrid", "device"), ("mla", "device")]


@pytest.fixture(scope="module", params=TIERS, ids="-".join)
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Engine]:
    family, tier = request.param
    size = {"host": "host_bytes", "device": "device_int4_bytes"}[tier]
    with kit.engine(models[family], {size: "64 MiB", "codec": "int4"}) as made:
        made.family = family  # type: ignore[attr-defined]
        yield made
        assert [one.name for one in made.shelf.below.tiers] == [tier]


def test_what_follows_encoded_copies_is_stored_as_lossy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, blocks = prompt(80, 600), 600 // BLOCK
    engine.forget(store_too=True)
    puts = Puts(engine, monkeypatch)
    engine.answer(shared)
    first = puts.take(engine)
    assert all(key.exact for key in first)
    groups = len(engine.shelf._groups)
    codecs = [sum(key.codec == name for key in first if key.group == 0) for name in ("raw", "int4")]
    # The answer fills a block more. The first one is never encoded; those of the last 128 tokens of the prompt, and of
    # the answer, are stored in both forms.
    assert codecs == [1 + 8 + 1, blocks]
    engine.forget()

    longer = shared[: 30 * BLOCK] + prompt(81, 100)
    _, cached = engine.answer(longer)
    assert cached == 30 * BLOCK
    second = puts.take(engine)
    assert {key.exact for key in second} == {False}
    assert len({key.hash for key in second}) == len(longer) // BLOCK - 30  # and nothing loaded is stored again
    assert {key.group for key in second} == set(range(groups))
    if engine.family == "mla":  # type: ignore[attr-defined]
        return  # no prefix cache of vLLM's own there

    again = shared[: 24 * BLOCK] + prompt(82, 100)
    _, cached = engine.answer(again)
    assert cached >= 23 * BLOCK  # most of it out of vLLM's own cache, where the encoded copies were put
    assert {key.exact for key in puts.take(engine)} == {False}
    fresh = prompt(83, 100)
    engine.answer(fresh)
    assert {key.exact for key in puts.take(engine)} == {True}


def test_lossy_copies_serve_the_next_turn(engine: Engine) -> None:
    shared = prompt(84, 400)
    engine.forget(store_too=True)
    engine.answer(shared)
    engine.forget()
    longer = [*shared, *prompt(85, 200)]
    engine.answer(longer)
    engine.forget()
    _, cached = engine.answer([*longer, *prompt(86, 50)])
    assert cached == 600 // BLOCK * BLOCK
    assert "loads_failed" not in engine.shelf.below.counters()
