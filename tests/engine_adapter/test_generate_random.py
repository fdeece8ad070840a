"""Random calls of `generate`, one after the other over one store, equal to those with a DynamicCache.

Rows and paddings of any size, shared beginnings, and every way to generate: what no list of cases thinks of.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.engine_adapter.generate_kit import FAMILIES, assistant, generate, opened
from tests.engine_adapter.paged_kit import tiny_model

CALLS = 5


def a_way(draw: random.Random, family: str, rows: int) -> dict[str, Any]:
    count = draw.randrange(1, 24)
    way: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count}
    kind = draw.choice(("greedy", "greedy", "beams", "answers", "pieces", "lookup", "assisted"))
    if kind in ("beams", "answers"):
        way["num_beams"] = draw.choice((2, 3))
        way["num_return_sequences"] = 2 if kind == "answers" else 1
    elif kind == "pieces":
        way["prefill_chunk_size"] = draw.randrange(1, 30)
    elif kind == "lookup" and rows == 1:
        way["prompt_lookup_num_tokens"] = 3
    elif kind == "assisted" and rows == 1:
        way["assistant_model"] = assistant(family)
    return way


def a_prompt(draw: random.Random, rows: int, beginning: list[int]) -> torch.Tensor:
    """int64[rows, columns], padded on the left, each row with most of the same beginning."""
    width = draw.randrange(18, 88)
    made = []
    for row in range(rows):
        pad = 0 if row == 0 else draw.randrange(0, draw.choice((4, 18)))
        shared = beginning[: max(0, width - pad - draw.choice((0, 0, 1, 3, 9, 40)))]
        own = [draw.randrange(1, 97) for _ in range(width - pad - len(shared))]
        made.append([0] * pad + shared + own)
    draw.shuffle(made)
    return torch.tensor(made)


def run(seed: int) -> int:
    """Calls over one store; how many tokens were reused."""
    draw = random.Random(seed)
    family, paged = draw.choice(FAMILIES), draw.random() < 0.4
    model = tiny_model(family)
    beginning = [draw.randrange(1, 97) for _ in range(90)]
    calls = []
    for _ in range(CALLS):
        rows = draw.choice((1, 1, 2, 3))
        calls.append((a_prompt(draw, rows, beginning), a_way(draw, family, rows)))
    expected = [generate(model, ids, **way) for ids, way in calls]
    reused = 0
    with opened(model, paged=paged) as kv:
        for (ids, way), tokens in zip(calls, expected, strict=True):
            cache = kv.cache()
            found = generate(model, ids, cache, **way)
            assert found == tokens, (seed, family, paged, ids.tolist(), sorted(way))
            reused += cache.reused_tokens
            cache.finish()
    return reused


def test_random_calls() -> None:
    assert sum(run(seed) for seed in range(5)) > 200


@pytest.mark.nightly
@pytest.mark.slow
def test_many_random_calls() -> None:
    for seed in range(100, 1100):
        run(seed)
