"""A real vLLM engine over the host tier: full, hybrid and sliding models. One engine a family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from engine_adapter.vllm_connector.book import Book
from engine_adapter.vllm_connector.layout import GroupPages
from tests.engine_adapter.vllm.kit import BLOCK, Engine, prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("default"),  # vLLM's own
]


def stored(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """What a run without anything stored answers; its blocks are stored afterwards, and vLLM's cache is empty."""
    engine.forget(store_too=True)
    first = engine.answers(prompts)
    engine.forget()
    return first


def test_second_run_after_a_reset_loads_and_says_the_same(engine: Engine) -> None:
    prompts = [prompt(seed, count) for seed, count in ((1, 300), (2, 513), (3, 900))]
    first = stored(engine, prompts)
    before, counted = engine.external_hits(), engine.shelf.below.counters().get("loaded_tokens", 0)
    for token_ids, answer in zip(prompts, first, strict=True):
        again, cached = engine.answer(token_ids)
        assert again == answer
        assert cached == (len(token_ids) - 1) // BLOCK * BLOCK
    loaded = engine.shelf.below.counters()["loaded_tokens"] - counted
    assert engine.external_hits() - before == loaded == sum((len(one) - 1) // BLOCK * BLOCK for one in prompts)


def test_a_longer_prompt_goes_on_where_the_stored_one_ends(engine: Engine) -> None:
    whole = prompt(4, 700)
    expected = stored(engine, [whole])
    engine.forget(store_too=True)
    engine.answers([whole[:400]])
    engine.forget()
    again, cached = engine.answer(whole)
    assert (again, cached) == (expected[0], 400)


def test_part_from_vllms_cache_and_part_from_the_store(engine: Engine) -> None:
    if engine.family == "mla":  # type: ignore[attr-defined]
        pytest.skip("vLLM has no prefix cache of its own for MLA on CPU")
    whole = prompt(5, 800)
    expected = stored(engine, [whole])
    engine.answer(whole[:400])
    again, cached = engine.answer(whole)
    assert (again, cached) == (expected[0], 799 // BLOCK * BLOCK)


def test_answers_are_stored_too(engine: Engine) -> None:
    asked = prompt(6, 250)
    engine.forget(store_too=True)
    answer, _ = engine.answer(asked, 40)
    engine.forget()
    turn = [*asked, *answer, *prompt(7, 30)]
    expected, cached = engine.answer(turn)
    assert cached == (len(asked) + len(answer) - 1) // BLOCK * BLOCK
    engine.forget(store_too=True)
    assert engine.answer(turn) == (expected, 0)


def test_many_at_once_with_little_memory_and_again(engine: Engine) -> None:
    from vllm import SamplingParams

    prompts = [prompt(20 + seed, 200 + 37 * seed) for seed in range(8)]
    first = stored(engine, prompts)
    sampling = SamplingParams(temperature=0, max_tokens=10, detokenize=False, ignore_eos=True)
    given = [{"prompt_token_ids": one} for one in prompts]
    together = engine.llm.generate(given, sampling, use_tqdm=False)
    assert all((out.num_cached_tokens or 0) >= len(one) - 1 - BLOCK for out, one in zip(together, prompts, strict=True))
    assert [tuple(out.outputs[0].token_ids) for out in together] == first


def spoil(engine: Engine) -> None:
    """Rubbish in all of vLLM's pages: the right values may be there by chance, of an earlier test."""
    for group in engine.shelf._groups:
        for layer in group.layers:
            layer.memory[:] = 0x41


def losing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a block is gone when it is to be loaded."""
    shelf, real = engine.shelf, engine.shelf.load

    def load(order: Any) -> None:
        keys = [
            shelf._residency.copy_key(order.root, group, order.hashes[30], 0, True)
            for group in range(len(shelf._groups))
        ]
        assert shelf.below.tiers[0].delete(keys)
        spoil(engine)
        real(order)

    monkeypatch.setattr(shelf, "load", load)


def test_a_copy_that_is_gone_when_it_is_loaded_is_computed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(8, 600)
    first = stored(engine, [asked])
    failed = engine.shelf.below.counters().get("loads_failed", 0)
    losing(engine, monkeypatch)
    answer, _ = engine.answer(asked)
    monkeypatch.undo()
    assert answer == first[0]
    assert engine.shelf.below.counters()["loads_failed"] == failed + 1
    engine.forget()
    assert engine.answer(asked) == (first[0], 599 // BLOCK * BLOCK)  # what was computed instead is stored


def test_a_reset_of_the_store_forgets(engine: Engine) -> None:
    asked = prompt(9, 300)
    first = stored(engine, [asked])
    engine.forget(store_too=True)
    assert engine.answer(asked) == (first[0], 0)


# planted mistakes: the tests above must see them ---------------------------------------------------------------------


def _differs(engine: Engine, asked: list[int], expected: tuple[int, ...]) -> bool:
    answer, cached = engine.answer(asked)
    assert cached
    return answer != expected


def test_planted_first_groups_tables_for_all(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine.family != "hybrid":  # type: ignore[attr-defined]
        pytest.skip("one cache group")
    asked = prompt(10, 600)
    (expected,) = stored(engine, [asked])
    real = GroupPages.scatter

    def mistaken(self: GroupPages, source: Any, places: Any) -> None:
        last = max(layer.table for layer in self.layers)
        real(self, source, [([tables[last]] * len(tables), position) for tables, position in places])

    monkeypatch.setattr(GroupPages, "scatter", mistaken)
    assert _differs(engine, asked, expected)


def test_planted_keys_and_values_swapped(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(11, 600)
    (expected,) = stored(engine, [asked])
    real = GroupPages.scatter

    def mistaken(self: GroupPages, source: Any, places: Any) -> None:
        if self.is_latent:  # no V: the latent where the rotated part belongs
            rolled = np.roll(source.view(np.float32).reshape(-1, self.dim), 64, axis=1)
            return real(self, rolled.reshape(-1).view(np.uint8), places)
        piece = self.block_tokens * self.dim * self.item_bytes
        swapped = source.reshape(-1, 2, piece)[:, ::-1].copy().reshape(-1)
        real(self, swapped, places)

    monkeypatch.setattr(GroupPages, "scatter", mistaken)
    assert _differs(engine, asked, expected)


def test_planted_shifted_targets(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that merely change places would not show: K knows its position, and attention does not ask for order."""
    asked = prompt(12, 600)
    (expected,) = stored(engine, [asked])
    real = GroupPages.scatter

    def mistaken(self: GroupPages, source: Any, places: Any) -> None:
        real(self, source, [(tables, min(position + 8, 36)) for tables, position in places])

    monkeypatch.setattr(GroupPages, "scatter", mistaken)
    assert _differs(engine, asked, expected)


def test_planted_partly_filled_block_saved(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine.family == "mla":  # type: ignore[attr-defined]
        pytest.skip("vLLM computes a prompt as a whole there: no block with a name is half computed")
    asked = prompt(13, 600)
    (expected,) = stored(engine, [asked])
    engine.forget(store_too=True)
    real = Book._save

    def mistaken(self: Book, tracked: Any, token_count: int, tables_of: Any) -> Any:
        return real(self, tracked, token_count + BLOCK, tables_of)

    monkeypatch.setattr(Book, "_save", mistaken)
    spoil(engine)
    # The prompt comes in two turns of chunks, so that a block is half computed when a step ends.
    engine.llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = 200
    engine.answer(asked)
    engine.llm.llm_engine.engine_core.engine_core.scheduler.max_num_scheduled_tokens = 2048
    monkeypatch.undo()
    engine.forget()
    assert _differs(engine, asked, expected)


def test_planted_failed_load_that_is_not_reported(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(15, 600)
    (expected,) = stored(engine, [asked])
    losing(engine, monkeypatch)
    real = engine.shelf.take_finished

    def mistaken() -> list[Any]:
        return [replace(one, failed=[]) for one in real()]

    monkeypatch.setattr(engine.shelf, "take_finished", mistaken)
    assert _differs(engine, asked, expected)
    monkeypatch.undo()
    engine.forget(store_too=True)
