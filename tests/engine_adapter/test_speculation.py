"""Draft and verify puts out exactly what the model would, and leaves nothing of a rejected draft behind."""

from __future__ import annotations

import dataclasses

import pytest

from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.drafter import PromptLookupDrafter
from engine_adapter.request import FinishReason, Request
from engine_adapter.sampling import draw, uniform_at
from engine_adapter.testing import ScriptedDrafter, ToyRunner, toy_generate
from tests.engine_adapter.loop_kit import FAMILIES, Kit, KitMaker, geometry, make_store, prompt


def with_drafter(kit: Kit, drafter: object, **options: object) -> None:
    settings = {"max_batch_sequences": 3, "step_tokens": 24, **options}
    kit.loop = DecodeLoop(kit.runner, kit.store, drafter=drafter, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("drafts", "right"), [(k, r) for k in range(1, 6) for r in range(k + 1)])
def test_case_094_every_draft_length_and_acceptance(make_kit: KitMaker, family: str, drafts: int, right: int) -> None:
    """k drafts, 0..k accepted, over block edges: same tokens, and every block returns."""
    for block_tokens in (1, 4):
        kit = make_kit(family, block_tokens, blocks=260)
        requests = [Request(f"r{index}", prompt(index, 5 + index), 14 + index) for index in range(3)]
        streams = [[*r.token_ids, *kit.expect(r.token_ids, r.max_new_tokens)] for r in requests]
        with_drafter(kit, ScriptedDrafter(streams, draft_tokens=drafts, right_tokens=right))
        results = kit.run_checked(*requests)
        for result in results.values():
            assert result.drafted_tokens > 0
            if right == drafts:
                assert result.accepted_tokens == result.drafted_tokens or result.accepted_tokens > 8
            if right == 0:
                assert result.accepted_tokens == 0


def test_accepted_drafts_save_forward_passes(make_kit: KitMaker) -> None:
    kit = make_kit()
    request = Request("a", prompt(1, 9), 21)
    stream = [*request.token_ids, *kit.expect(request.token_ids, 21)]
    with_drafter(kit, ScriptedDrafter([stream], draft_tokens=4, right_tokens=4))
    result = kit.run_checked(request)["a"]
    assert kit.runner.forward_count == 1 + 4
    assert result.accepted_tokens == 16


def test_rejected_drafts_are_never_named(make_kit: KitMaker) -> None:
    kit = make_kit()
    request = Request("a", prompt(1, 6), 30)
    truth = list(kit.expect(request.token_ids, 30))
    stream = [*request.token_ids, *truth]
    with_drafter(kit, ScriptedDrafter([stream], draft_tokens=5, right_tokens=1))
    kit.run_checked(request)
    for end in range(8, len(stream)):
        wrong = [*stream[: end - 1], (stream[end - 1] + 1) % 97]
        assert kit.store.lookup([*wrong, 0]).tokens <= (end - 1) // 4 * 4
    assert kit.store.lookup([*stream, 0]).tokens == (len(stream) - 1) // 4 * 4


@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_case_094_stopping_inside_a_draft(make_kit: KitMaker, block_tokens: int) -> None:
    for stop_place in range(10):
        kit = make_kit("full", block_tokens, blocks=200)
        tokens = prompt(7, 9)
        truth = kit.expect(tokens, 12)
        with_drafter(kit, ScriptedDrafter([[*tokens, *truth]], draft_tokens=4, right_tokens=4))
        request = Request("a", tokens, 12, eos_token_ids=frozenset({truth[stop_place]}))
        result = kit.drive(request)["a"]
        assert result.token_ids == truth[: truth.index(truth[stop_place]) + 1]
        assert result.finish_reason is FinishReason.STOP
        kit.nothing_left()


def test_sampled_requests_draw_the_same_with_and_without_drafts(make_kit: KitMaker) -> None:
    kit = make_kit()
    requests = [Request(f"r{i}", prompt(i, 7), 16, temperature=1.5, seed=i) for i in range(3)]
    truths = []
    for request in requests:
        truth = toy_generate(
            kit.model,
            request.token_ids,
            16,
            lambda row, place, request=request: draw(row, request, uniform_at(0, request.seed, 0, place)),  # type: ignore[misc]
        )
        truths.append([*request.token_ids, *truth])
    with_drafter(kit, ScriptedDrafter(truths, draft_tokens=4, right_tokens=2))
    results = kit.drive(*requests)
    for request, truth in zip(requests, truths, strict=True):
        assert [*request.token_ids, *results[request.request_id].token_ids] == truth
        assert results[request.request_id].accepted_tokens > 0
    kit.nothing_left()


def test_prompt_lookup_over_a_small_vocabulary() -> None:
    for family in FAMILIES:
        store = make_store(geometry(family), blocks=120)
        with store:
            runner = ToyRunner.over(store, vocab_size=3)
            drafter = PromptLookupDrafter(draft_tokens=3)
            loop = DecodeLoop(runner, store, max_batch_sequences=4, step_tokens=20, drafter=drafter)
            requests = [Request(f"r{i}", [(i + j * j) % 3 for j in range(7 + i)], 25) for i in range(6)]
            for request in requests:
                loop.submit(request)
            while loop.busy:
                loop.step()
                store.check_invariants()
            results = loop.collect()
            accepted = 0
            for request in requests:
                result = results[request.request_id]
                assert list(result.token_ids) == toy_generate(runner.model, request.token_ids, 25)
                accepted += result.accepted_tokens
            assert accepted > 10


@pytest.mark.parametrize(("family", "blocks"), [("full", 18), ("hybrid", 14)])
def test_drafts_yield_to_memory_and_to_waiting_prompts(make_kit: KitMaker, family: str, blocks: int) -> None:
    kit = make_kit(family, blocks=blocks, host_blocks=30)
    requests = [Request(f"r{index}", prompt(index, 12 + index), 24) for index in range(6)]
    streams = [[*r.token_ids, *kit.expect(r.token_ids, 24)] for r in requests]
    with_drafter(kit, ScriptedDrafter(streams, draft_tokens=5, right_tokens=3), step_tokens=9)
    results = kit.run_checked(*requests)
    assert sum(result.preemptions for result in results.values()) > 0
    assert sum(result.accepted_tokens for result in results.values()) > 0


def test_forced_tokens_are_not_drafted_for(make_kit: KitMaker) -> None:
    kit = make_kit()
    request = Request("a", prompt(1, 9), 9, forced_token_ids=prompt(2, 9))
    with_drafter(kit, PromptLookupDrafter())
    result = kit.drive(dataclasses.replace(request, token_ids=[1, 2, 1, 2, 1, 2]))["a"]
    assert result.drafted_tokens == 0
    assert result.token_ids == tuple(prompt(2, 9))
