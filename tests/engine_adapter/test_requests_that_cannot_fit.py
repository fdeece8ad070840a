"""A request that the device can never hold is refused when it is submitted, and told what would do."""

from __future__ import annotations

import re

import pytest

from allocator import CapacityError
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import FinishReason, Request
from tests.engine_adapter.loop_kit import ToyRunner, geometry, make_store, prompt


@pytest.mark.parametrize("kind", ["full", "sliding"])
@pytest.mark.parametrize(("prompt_tokens", "answer_tokens"), [(70, 5), (40, 60), (4, 100_000)])
def test_what_can_never_fit_is_refused_and_what_it_names_would_do(
    kind: str, prompt_tokens: int, answer_tokens: int
) -> None:
    request = Request("long", prompt(1, prompt_tokens), answer_tokens)
    with make_store(geometry(kind), blocks=12) as store:
        loop = DecodeLoop(ToyRunner.over(store), store)
        try:
            loop.submit(request)
        except CapacityError as error:
            refused = error
        else:  # a window's blocks do not grow with the answer
            assert kind == "sliding"
            return
    assert refused.permanent
    enough = int(re.findall(r"needed (\d+) bytes|device_bytes of (\d+)", str(refused))[0][answer_tokens == 5])
    with make_store(geometry(kind), device_bytes=enough) as store:
        DecodeLoop(ToyRunner.over(store), store).submit(request)


@pytest.mark.parametrize("kind", ["full", "sliding", "hybrid"])
@pytest.mark.parametrize(("prompt_tokens", "answer_tokens"), [(70, 5), (40, 60), (30, 300), (300, 1)])
@pytest.mark.parametrize("blocks", [4, 8, 12])
def test_a_request_runs_in_what_was_named(kind: str, prompt_tokens: int, answer_tokens: int, blocks: int) -> None:
    """Found here: a window that begins within a block holds one more than was counted."""
    request = Request("long", prompt(1, prompt_tokens), answer_tokens)
    refused = ""
    with make_store(geometry(kind), blocks=blocks) as store:
        loop = DecodeLoop(ToyRunner.over(store), store)
        try:
            loop.submit(request)
            refused = loop.run()["long"].error or ""
        except CapacityError as error:
            refused = str(error)
    if not refused:
        return
    enough = int(next(filter(None, re.findall(r"device_bytes of (\d+) w|needed (\d+) b|; (\d+) w", refused)[-1])))
    with make_store(geometry(kind), device_bytes=enough) as store:
        loop = DecodeLoop(ToyRunner.over(store), store)
        loop.submit(request)
        assert loop.run()["long"].finish_reason is FinishReason.LENGTH


def test_a_prompt_must_fit_in_full_precision() -> None:
    with make_store(geometry("full"), blocks=12) as store, pytest.raises(CapacityError) as refused:
        DecodeLoop(ToyRunner.over(store), store).submit(Request("long", prompt(1, 70), 1))
    assert "a prompt must fit in full precision when it is admitted, INT4 or not" in str(refused.value)
    assert "device_bytes of" in str(refused.value)


def test_the_longest_that_is_accepted_ends_well_in_full_precision() -> None:
    """Nothing that fits is refused: by one token more it is."""
    with make_store(geometry("full"), blocks=12) as store:
        loop = DecodeLoop(ToyRunner.over(store), store)
        with pytest.raises(CapacityError, match="at most 48 tokens there"):
            loop.submit(Request("long", prompt(1, 20), 30))
        loop.submit(Request("long", prompt(1, 20), 29))
        assert loop.run()["long"].finish_reason is FinishReason.LENGTH


def test_what_outgrows_the_device_is_told_the_limit_and_what_would_do() -> None:
    """Every block might have cooled; those that are told to stay whole did not."""
    asked = Request("long", prompt(1, 40), 150)
    settings = {"codec": "int4", "cool_under_pressure": False, "residual_tokens": 1 << 20}
    with make_store(geometry("full", 16), blocks=8, **settings) as store:
        loop = DecodeLoop(ToyRunner.over(store), store)
        loop.submit(asked)
        loop.submit(Request("small", prompt(2, 6), 5))
        results = loop.run()
    error = results["long"].error
    assert results["small"].finish_reason is FinishReason.LENGTH
    assert len(results["long"].token_ids) > 10, "what it has put out is kept"
    assert error is not None
    assert "40 prompt tokens and 150 new ones" in error
    enough = int(re.findall(r"; (\d+) would do", error)[0])
    with make_store(geometry("full", 16), device_bytes=enough, **settings) as store:
        loop = DecodeLoop(ToyRunner.over(store), store)
        loop.submit(asked)
        assert loop.run()["long"].finish_reason is FinishReason.LENGTH


def test_an_answer_that_may_end_by_itself_is_let_try() -> None:
    """Clients ask for many more tokens than they expect."""
    with make_store(geometry("full"), blocks=12) as store:
        runner = ToyRunner.over(store)
        plain = DecodeLoop(runner, store)
        plain.submit(Request("short", prompt(1, 20), 8))
        answer = plain.run()["short"].token_ids
        loop = DecodeLoop(runner, store)
        loop.submit(Request("long", prompt(1, 20), 1000, eos_token_ids=frozenset(answer[5:6])))
        assert loop.run()["long"].finish_reason is FinishReason.STOP
