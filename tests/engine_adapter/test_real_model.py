"""SmolLM2-135M-Instruct in float32 against transformers' generate, token for token."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from engine_adapter.model_source import LoadedModel, load_model
from tests.engine_adapter.paged_kit import Paged, reference_tokens

pytestmark = pytest.mark.model

NEW_TOKENS = 12
LENGTHS = (1, 15, 16, 17, 32, 300)
TEXT = (
    "The lighthouse keeper wrote the weather down every evening, in pencil, because ink froze in that room. "
    "On the ninth of March the wind turned to the north and the glass fell faster than he had ever seen it. "
    "He carried oil up the stairs twice, trimmed both lamps, and set the clockwork going before it was dark. "
)


@cache
def _model() -> LoadedModel:
    try:
        return load_model(None, torch.float32)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@cache
def _prompts() -> dict[int, list[int]]:
    ids = _model().tokenizer(TEXT * 8)["input_ids"]
    return {length: ids[at : at + length] for at, length in enumerate(LENGTHS)}


@cache
def _expected(length: int) -> list[int]:
    return reference_tokens(_model().model, _prompts()[length], NEW_TOKENS)


@pytest.fixture
def paged() -> object:
    for length in LENGTHS:
        _expected(length)
    engine = Paged(_model().model, blocks=160)
    yield engine
    engine.runner.release()


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens_equal_generate(paged: Paged, length: int) -> None:
    assert paged.generate("one", _prompts()[length], NEW_TOKENS) == _expected(length)


@pytest.mark.parametrize("chunk", [16, 23, 64, 256])
def test_greedy_tokens_equal_generate_in_chunks(paged: Paged, chunk: int) -> None:
    assert paged.generate("one", _prompts()[300], NEW_TOKENS, chunk) == _expected(300)


def test_a_step_may_mix_prefill_and_decode(paged: Paged) -> None:
    """Sequences start one step after another, so that every step but the first mixes chunks with decode tokens."""
    found: dict[int, list[int]] = {length: [] for length in LENGTHS}
    fed = dict.fromkeys(LENGTHS, 0)
    for turn in range(200):
        parts, rows = [], []
        for at, length in enumerate(LENGTHS):
            if turn < at or len(found[length]) == NEW_TOKENS:
                continue
            prompt = _prompts()[length]
            ids = prompt[fed[length] : fed[length] + 50] or found[length][-1:]
            fed[length] += len(ids)
            wanted = int(fed[length] >= length)
            rows += [length] * wanted
            parts.append(paged.slice(str(length), ids, wanted))
        if not parts:
            break
        for length, row in zip(rows, paged.step(*parts), strict=True):
            found[length].append(int(row.argmax()))
    assert found == {length: _expected(length) for length in LENGTHS}


def test_prompts_that_share_a_prefix_read_the_same_blocks(paged: Paged) -> None:
    """Hits of B-1, B, B+1 and 2B tokens: whole blocks are shared, the rest is computed again."""
    prompt = _prompts()[300][:64]
    expected = _expected_of(paged, prompt)
    paged.prefill("first", prompt)
    for hit in (15, 16, 17, 32):
        name, whole = f"hit {hit}", hit // 16
        paged.tables[name] = [list(paged.tables["first"][0][:whole])]
        paged.lengths[name] = whole * 16
        assert paged.generate(name, prompt[whole * 16 :], 8) == expected


def _expected_of(paged: Paged, prompt: list[int]) -> list[int]:
    return paged.generate("alone", prompt, 8)
