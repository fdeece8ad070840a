"""A runner must read and write the very slab whose blocks the store names: any other is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from allocator import ConfigError, UsageError
from engine_adapter import DecodeLoop, HFRunner, Request
from engine_adapter.testing import ToyRunner
from kvstore import KVStore
from tests.engine_adapter.loop_kit import KitMaker, geometry, make_store, prompt
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model

PROMPT = [token % 90 + 1 for token in prompt(1, 60)]


@pytest.fixture
def runner() -> Iterator[HFRunner]:
    made = HFRunner(tiny_model("llama"))
    yield made
    made.release()


def opened(runner: HFRunner, codec: str = "raw") -> KVStore:
    return make_store(runner.geometry, blocks=20, codec=codec)


def test_a_runner_over_another_stores_slab_is_refused(runner: HFRunner) -> None:
    with opened(runner) as old, opened(runner) as new:
        with pytest.raises(ConfigError, match=r"attached to None .*expected the store's .*Slab object"):
            DecodeLoop(runner, new)
        runner.attach(old.slab, old.cold_codec)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"{id(old.slab):x}.*expected the store's .*{id(new.slab):x}"):
            DecodeLoop(runner, new)
        with pytest.raises(ConfigError, match=r"call runner\.attach"):
            DecodeLoop(ToyRunner.over(old), new)


def test_a_runner_without_the_stores_codec_is_refused(runner: HFRunner) -> None:
    with opened(runner, "int4") as store:
        runner.attach(store.slab)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"with None; expected the store's .*Int4Codec"):
            DecodeLoop(runner, store)


def test_a_runner_that_moves_elsewhere_computes_nothing_and_may_come_back(runner: HFRunner) -> None:
    with opened(runner) as store, opened(runner) as other:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        loop = DecodeLoop(runner, store)
        loop.submit(Request("a", PROMPT, 12))
        for _ in range(5):
            loop.step()
        before = store.committed_tokens("a")
        runner.attach(other.slab, other.cold_codec)  # type: ignore[arg-type]
        for _ in range(3):
            with pytest.raises(ConfigError, match="expected the store's"):
                loop.step()
            store.check_invariants()
        assert store.committed_tokens("a") == store.written_tokens("a") == before
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        found = loop.run()["a"].token_ids
    runner.release()
    assert list(found) == reference_tokens(runner.model, PROMPT, 12)


@pytest.mark.parametrize("given", [None, "cpu", 5])
def test_what_is_no_slab_is_refused_and_the_old_one_stays(runner: HFRunner, given: Any) -> None:
    with opened(runner) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=rf"slab: got {type(given).__name__}; expected a store's"):
            runner.attach(given)
        assert runner.slab is store.slab


def test_a_slab_of_another_shape_is_refused_and_the_old_one_stays(runner: HFRunner) -> None:
    with opened(runner) as store, make_store(geometry("full")) as other:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="the geometry expects"):
            runner.attach(other.slab)  # type: ignore[arg-type]
        assert runner.slab is store.slab


def test_the_toy_runner_says_what_it_is_attached_to(make_kit: KitMaker) -> None:
    kit = make_kit()
    assert kit.runner.slab is kit.store.slab
