"""What happens to requests in a real vLLM engine: preempted, aborted, continued in chunks, named again, reset."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_adapter.vllm_connector.book import Found
from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, Engine, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", params=["full", "hybrid"])
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Engine]:
    """Room for about four of the prompts below."""
    tight = {"kv_cache_memory_bytes": 3 << 20 if request.param == "full" else 6 << 20, "max_model_len": 1024}
    with kit.engine(models[request.param], {"host_bytes": "64 MiB"}, **tight) as made:
        yield made


class Running:
    """Requests that are stepped by hand."""

    def __init__(self, engine: Engine) -> None:
        self.core = engine.llm.llm_engine
        self.tokens: dict[str, tuple[int, ...]] = {}

    def add(self, name: str, token_ids: list[int], tokens: int = 10) -> None:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        self.core.add_request(name, {"prompt_token_ids": token_ids}, sampling)

    def step(self) -> None:
        for out in self.core.step():
            self.tokens[out.request_id] = tuple(out.outputs[0].token_ids)

    def until_done(self) -> None:
        until = time.monotonic() + 60
        while self.core.has_unfinished_requests() and time.monotonic() < until:
            self.step()
        assert not self.core.has_unfinished_requests()


def scheduler(engine: Engine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def free_blocks(engine: Engine) -> int:
    return int(scheduler(engine).kv_cache_manager.block_pool.get_num_free_blocks())


def preemptions(engine: Engine) -> int:
    return int(sum(one.value for one in engine.llm.get_metrics() if one.name == "vllm:num_preemptions"))


def test_preempted_requests_say_the_same_and_load_what_they_had(engine: Engine) -> None:
    prompts = {f"p{seed}": prompt(50 + seed, 300) for seed in range(6)}
    engine.forget(store_too=True)
    expected = {name: engine.answer(one, 200)[0] for name, one in prompts.items()}
    engine.forget(store_too=True)
    before, loaded = preemptions(engine), engine.shelf.below.counters().get("loaded_tokens", 0)
    running = Running(engine)
    for name, one in prompts.items():
        running.add(name, one, 200)
    running.until_done()
    assert preemptions(engine) > before
    # vLLM gave their blocks to others; they came back from the store. (Its own count of hits leaves such requests out.)
    assert engine.shelf.below.counters()["loaded_tokens"] > loaded
    assert running.tokens == expected


def test_an_abort_while_loading_gives_the_blocks_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = prompt(60, 600)
    engine.forget(store_too=True)
    (expected,) = engine.answers([asked])
    engine.forget()
    free = free_blocks(engine)
    held: list[Any] = []
    real = engine.shelf.load
    monkeypatch.setattr(engine.shelf, "load", held.append)
    running = Running(engine)
    running.add("a", asked)
    running.step()
    assert len(held) == 1
    assert free_blocks(engine) < free
    running.core.abort_request(["a"])
    running.step()
    assert free_blocks(engine) < free  # the load may still write there
    monkeypatch.undo()
    real(held[0])
    until = time.monotonic() + 30
    while free_blocks(engine) < free and time.monotonic() < until:
        running.step()
        time.sleep(0.001)
    assert free_blocks(engine) == free
    assert engine.answer(asked)[0] == expected


@pytest.mark.parametrize("lost", [slice(0, None), slice(11, 12), slice(36, None)], ids=["all", "one", "the last"])
def test_a_block_that_goes_between_lookup_and_load_is_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, lost: slice
) -> None:
    asked = prompt(62, 600)
    engine.forget(store_too=True)
    (expected,) = engine.answers([asked])
    engine.forget()
    shelf = engine.shelf
    (tier,) = shelf.below.tiers
    groups = range(len(shelf._residency.shards))
    real, before = shelf.load, Counter(shelf.below.counters())

    def late(order: Any) -> None:
        first = [shelf._residency.copy_key(order.root, group, order.hashes[0], 0, True) for group in groups]
        assert tier.delete([key for one in first for key in one.with_hashes(order.hashes[lost])])
        real(order)

    monkeypatch.setattr(shelf, "load", late)
    assert engine.answer(asked)[0] == expected
    loaded = Counter(shelf.below.counters()) - before
    assert loaded["loads_failed"] == 1
    assert loaded["loaded_blocks_host"] <= lost.start * len(groups)
    assert loaded["loaded_tokens"] == 0
    monkeypatch.undo()
    engine.forget()
    assert engine.answer(asked) == (expected, 599 // BLOCK * BLOCK)  # stored anew


def test_an_abort_while_decoding_leaves_nothing_wrong_behind(engine: Engine) -> None:
    asked = prompt(61, 500)
    engine.forget(store_too=True)
    (expected,) = engine.answers([asked])
    engine.forget(store_too=True)
    running = Running(engine)
    running.add("a", asked, 100)
    for _ in range(5):
        running.step()
    running.core.abort_request(["a"])
    running.until_done()
    running.step()
    engine.forget()
    assert engine.answer(asked) == (expected, 499 // BLOCK * BLOCK)


def test_a_prompt_goes_on_in_chunks_where_the_stored_part_ends(engine: Engine) -> None:
    asked = prompt(62, 900)
    engine.forget(store_too=True)
    (expected,) = engine.answers([asked])
    engine.forget(store_too=True)
    scheduler(engine).max_num_scheduled_tokens = 150
    try:
        assert engine.answer(asked[:400])[1] == 0
        engine.forget()
        assert engine.answer(asked) == (expected, 400)
        engine.forget()
        assert engine.answer(asked) == (expected, 899 // BLOCK * BLOCK)
    finally:
        scheduler(engine).max_num_scheduled_tokens = 2048


def test_a_name_that_is_used_again_is_another_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the first one's load is still under way: its end says nothing about the second."""
    first, second = prompt(63, 500), prompt(64, 400)
    engine.forget(store_too=True)
    expected = engine.answers([first, second])
    engine.forget()
    running = Running(engine)
    for asked, answer in zip((first, second), expected, strict=True):
        running.add("same", asked)
        running.until_done()
        assert running.tokens["same"] == answer
    engine.forget()
    held: list[Any] = []
    real = engine.shelf.load
    monkeypatch.setattr(engine.shelf, "load", held.append)
    running.add("same", first)
    running.step()
    running.core.abort_request(["same"])
    running.step()
    running.add("same", second)
    running.step()
    monkeypatch.undo()
    for order in held:
        real(order)
    running.until_done()
    assert running.tokens["same"] == expected[1]


def test_new_weights_and_a_reset_forget_what_the_old_ones_computed(engine: Engine) -> None:
    asked = prompt(65, 400)
    engine.forget(store_too=True)
    (old,) = engine.answers([asked])
    model = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    weight = next(value for name, value in model.named_parameters() if "embed_tokens" in name)
    kept = weight.detach().clone()
    try:
        weight.data.copy_(kept.flip(0))
        engine.forget()
        mixed, cached = engine.answer(asked)
        assert cached  # without a reset of the store the old weights' blocks are taken
        engine.forget(store_too=True)
        new, cached = engine.answer(asked)
        assert cached == 0
        assert new not in (old, mixed)
        engine.forget()
        assert engine.answer(asked) == (new, 399 // BLOCK * BLOCK)
    finally:
        weight.data.copy_(kept)
        engine.forget(store_too=True)
    assert engine.answer(asked) == (old, 0)


def test_a_reset_amid_requests_loses_nothing_but_the_store(engine: Engine) -> None:
    prompts = {f"r{seed}": prompt(66 + seed, 300) for seed in range(3)}
    engine.forget(store_too=True)
    expected = {name: engine.answer(one, 40)[0] for name, one in prompts.items()}
    engine.forget(store_too=True)
    running = Running(engine)
    for name, one in prompts.items():
        running.add(name, one, 40)
    for _ in range(6):
        running.step()
    assert engine.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    running.until_done()
    assert running.tokens == expected


def test_a_lookup_that_waits_for_a_slow_tier_is_asked_again_until_its_deadline(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompt(70, 500)
    engine.forget(store_too=True)
    (expected,) = engine.answers([asked])
    book = scheduler(engine).connector._book
    answers: list[int | None] = []
    ask = book.matched_tokens

    def noting(request: Any, computed_tokens: int) -> int | None:
        answers.append(ask(request, computed_tokens))
        return answers[-1]

    monkeypatch.setattr(book, "matched_tokens", noting)
    find = engine.shelf.find
    calls: list[int] = []

    def slow(epoch: int, root: bytes, hashes: Any, local_blocks: int) -> Found:
        calls.append(0)
        return Found(0, True, epoch) if len(calls) < 5 else find(epoch, root, hashes, local_blocks)  # type: ignore[no-any-return]

    engine.forget()
    monkeypatch.setattr(engine.shelf, "find", slow)
    whole = 499 // BLOCK * BLOCK
    assert engine.answer(asked) == (expected, whole)
    assert answers == [None] * 4 + [whole]
    answers.clear()
    engine.forget()
    monkeypatch.setattr(book, "_deadline_seconds", 1.0)
    monkeypatch.setattr(engine.shelf, "find", lambda epoch, *given: Found(0, True, epoch))
    begun = time.monotonic()
    assert engine.answer(asked) == (expected, 0)
    assert time.monotonic() - begun >= 1.0
    assert answers[-1] == 0
    assert set(answers[:-1]) == {None}


def test_counts_are_on_vllms_prometheus_page(engine: Engine) -> None:
    engine.forget(store_too=True)
    asked = prompt(71, 300)

    def counts() -> dict[str, float]:
        found = [one for one in engine.llm.get_metrics() if one.name == "vllm:kvstore_counts"]
        return {one.labels["what"]: one.value for one in found}

    engine.answer(asked)
    engine.forget()
    before = counts()
    _, cached = engine.answer(asked)
    after = counts()
    assert after["loaded_tokens"] - before.get("loaded_tokens", 0) == cached
    assert after["saved_blocks"] >= 300 // BLOCK
