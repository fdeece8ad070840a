"""SmolLM2-135M-Instruct in float32 through the whole path, against transformers' own generate, token for token.

In bf16 equality of tokens would be the wrong test: rounding depends on the batch. Here every setting that moves,
shares, drops or recomputes blocks must leave every token as it is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_adapter.drafter import PromptLookupDrafter
from engine_adapter.model_source import load_model
from engine_adapter.request import Request
from tests.engine_adapter.paged_kit import reference_tokens
from tests.integration.model_kit import ModelKit, differences

pytestmark = pytest.mark.model

NEW_TOKENS = 16
BLOCK = 16
TEXT = (
    "The ferry left at six because the tide would not wait, and the town knew it. Old Marten counted the crates twice, "
    "then once more for the harbour master, who never believed a number that he had not seen written down. "
    "By the time the lamps were lit the water had turned grey, and the gulls had gone inland to sit on the chapel. "
)

Case = tuple[Any, dict[str, list[int]], dict[str, list[int]]]


@pytest.fixture(scope="module")
def case() -> Case:
    """(model, prompts, expected tokens by name): lengths around block edges, prefixes of one another, one twice."""
    try:
        loaded = load_model(None, torch.float32)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    ids = loaded.tokenizer(TEXT * 4)["input_ids"]
    prompts = {f"len{n}": ids[:n] for n in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 200)}
    prompts["own"] = ids[31:80]
    prompts["branch"] = [*ids[:100], *ids[7:20]]
    prompts["again"] = ids[:200]
    return loaded.model, prompts, {name: reference_tokens(loaded.model, p, NEW_TOKENS) for name, p in prompts.items()}


def requests(prompts: dict[str, list[int]], **changes: Any) -> list[Request]:
    return [Request(name, tokens, NEW_TOKENS, **changes) for name, tokens in prompts.items()]


@pytest.mark.parametrize("step_tokens", [8, 256])
def test_chunks_and_full_prompt_hits(case: Case, step_tokens: int) -> None:
    model, prompts, truth = case
    kit = ModelKit(model, blocks=80, step_tokens=step_tokens)
    try:
        cold = kit.run(*requests(prompts))
        assert not differences(cold, truth)
        warm = kit.run(*requests(prompts))
        assert not differences(warm, truth)
        for name, result in warm.items():
            assert sum(result.reused_tokens.values()) >= (len(prompts[name]) - 1) // BLOCK * BLOCK
    finally:
        kit.close()


def test_little_memory_with_a_host_tier(case: Case) -> None:
    model, prompts, _ = case
    asked = {f"r{index}": prompts["len200"][7 * index :][:44] for index in range(6)}
    truth = {name: reference_tokens(model, tokens, 2 * NEW_TOKENS) for name, tokens in asked.items()}
    kit = ModelKit(model, blocks=18, host_blocks=60, step_tokens=64)
    try:
        results = kit.run(*(Request(name, tokens, 2 * NEW_TOKENS) for name, tokens in asked.items()))
        assert not differences(results, truth)
        assert sum(result.preemptions for result in results.values()) > 0
    finally:
        kit.close()


def test_drafts_branches_and_aborted_neighbours(case: Case) -> None:
    model, prompts, truth = case
    kit = ModelKit(model, blocks=120, step_tokens=64, drafter=PromptLookupDrafter(draft_tokens=4))
    try:
        for request in requests(prompts, n=2):
            kit.loop.submit(request)
        for name in ("own", "len17"):
            for _ in range(5):
                kit.loop.step()
            kit.loop.abort(name)
        results = kit.run()
        assert not differences(results, {n: t for n, t in truth.items() if n not in ("own", "len17")})
        assert sum(result.accepted_tokens for result in results.values()) > 0
    finally:
        kit.close()
