"""The whole path on tiny random models of each family: equal to transformers' own generate, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine_adapter.drafter import PromptLookupDrafter
from engine_adapter.request import Request
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model
from tests.integration.model_kit import ModelKit, differences

FAMILIES = ("llama", "mistral", "gemma3", "gpt_oss")
NEW_TOKENS = 20
BLOCK = 16


def prompts() -> dict[str, list[int]]:
    """Lengths around block edges; four that share 40 tokens; one twice."""
    draw = random.Random(3)
    shared = [draw.randrange(1, 97) for _ in range(40)]
    made = {f"len{n}": [draw.randrange(1, 97) for _ in range(n)] for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)}
    for index in range(4):
        made[f"shared{index}"] = [*shared, *(draw.randrange(1, 97) for _ in range(5 + index))]
    made["again"] = made["shared0"]
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[str, list[int]]]:
    """(model, expected tokens by prompt name)."""
    model = tiny_model(request.param)
    truth = {name: reference_tokens(model, tokens, NEW_TOKENS) for name, tokens in prompts().items()}
    assert len({tuple(tokens) for tokens in truth.values()}) == len(truth) - 1
    return model, truth


@pytest.mark.parametrize(
    ("step_tokens", "blocks", "host_blocks", "drafts"),
    [(256, 120, 0, 0), (7, 120, 0, 0), (33, 16, 0, 0), (33, 16, 60, 0), (64, 120, 0, 3), (24, 16, 60, 3)],
    ids=["whole", "chunked", "tight", "tight-host", "drafts", "all"],
)
def test_equals_generate(
    case: tuple[Any, dict[str, list[int]]], step_tokens: int, blocks: int, host_blocks: int, drafts: int
) -> None:
    model, truth = case
    drafter = PromptLookupDrafter(draft_tokens=drafts) if drafts else None
    kit = ModelKit(
        model,
        blocks=blocks,
        host_blocks=host_blocks,
        step_tokens=step_tokens,
        max_batch_sequences=min(8, step_tokens),
        drafter=drafter,
    )
    try:
        results = kit.run(*(Request(name, tokens, NEW_TOKENS) for name, tokens in prompts().items()))
        assert not differences(results, truth)
        if blocks < 20 and not drafts:
            assert sum(result.preemptions for result in results.values()) > 0
        again = kit.run(*(Request(name, tokens, NEW_TOKENS) for name, tokens in prompts().items()))
        assert not differences(again, truth)
        assert sum(sum(result.reused_tokens.values()) for result in again.values()) > 0
    finally:
        kit.close()


def test_branches_and_aborted_neighbours(case: tuple[Any, dict[str, list[int]]]) -> None:
    model, truth = case
    kit = ModelKit(model, blocks=60, step_tokens=32, max_batch_sequences=6)
    try:
        for name, tokens in prompts().items():
            kit.loop.submit(Request(name, tokens, NEW_TOKENS, n=2))
        for name in ("len1", "shared1", "len32"):
            for _ in range(4):
                kit.loop.step()
            kit.loop.abort(name)
        results = kit.run()
        rest = {name: tokens for name, tokens in truth.items() if name not in ("len1", "shared1", "len32")}
        assert not differences(results, rest)
    finally:
        kit.close()
