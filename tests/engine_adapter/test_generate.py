"""transformers' `generate` with our cache equals `generate` with its DynamicCache, token for token, in float32.

Every family, every way of generating, with the model's own attention and with the paged function; and a second call
takes the prompt from the store.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from allocator import IntegrityError
from tests.engine_adapter.generate_kit import (
    BATCH,
    BLOCK,
    FAMILIES,
    NEW_TOKENS,
    PROMPT,
    SLIDING,
    generate,
    opened,
    random_ids,
    usual_ways,
    ways,
)
from tests.engine_adapter.paged_kit import tiny_model

Ways = dict[str, tuple[torch.Tensor, dict[str, Any]]]


class _Expected(dict[str, list[list[int]]]):
    """Computed when it is first asked for."""

    def __init__(self, model: Any, family: str) -> None:
        super().__init__()
        self._model, self._family = model, family

    def __missing__(self, name: str) -> list[list[int]]:
        ids, arguments = ways(self._family)[name]
        attention = self._model.config._attn_implementation
        assert attention != "kvstore_paged", "the reference attends by itself"
        self[name] = generate(self._model, ids, **arguments)
        return self[name]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> tuple[Any, str, dict[str, list[list[int]]]]:
    """(model, family, expected tokens by way), by DynamicCache."""
    model = tiny_model(request.param)
    expected = _Expected(model, request.param)
    assert len({token for row in (*expected["greedy"], *expected["padded"]) for token in row}) >= 8, (
        "a model that repeats itself would hide mistakes"
    )
    return model, request.param, expected


@pytest.mark.parametrize("paged", [False, True], ids=["own", "paged"])
def test_generate_equals_dynamic_cache_cold_and_warm(
    case: tuple[Any, str, dict[str, list[list[int]]]], paged: bool
) -> None:
    model, family, expected = case
    cold_and_warm(model, usual_ways(family, paged), expected, paged)


@pytest.mark.nightly
@pytest.mark.parametrize("paged", [False, True], ids=["own", "paged"])
def test_every_way_of_every_family(case: tuple[Any, str, dict[str, list[list[int]]]], paged: bool) -> None:
    model, family, expected = case
    cold_and_warm(model, ways(family), expected, paged)


def cold_and_warm(model: Any, chosen: Ways, expected: dict[str, list[list[int]]], paged: bool) -> None:
    for name, (ids, arguments) in chosen.items():
        right = expected[name]
        with opened(model, paged=paged) as kv:
            reused = []
            for _ in range(2):
                cache = kv.cache()
                assert generate(model, ids, cache, **arguments) == right, name
                reused.append(cache.reused_tokens)
                del cache
                gc.collect()
            assert reused[0] == 0, name
            if "chunk" not in name:  # of a prompt in pieces only the first piece is looked up
                assert reused[1] >= BLOCK, name
            assert kv.store.sequence_ids() == [] or kv._dropped


def test_drafts_are_accepted_and_rejected() -> None:
    """Else the assisted runs above would show nothing about rollback."""
    model = tiny_model("mistral")
    with opened(model) as kv:
        cache = kv.cache()
        crop, crops = cache.crop, []
        cache.crop = lambda count: (crops.append(count), crop(count))  # type: ignore[func-returns-value, method-assign]
        generate(model, PROMPT, cache, **ways("mistral")["assisted"][1])
        assert min(crops) < 0
        assert len(crops) < NEW_TOKENS, "passes: some drafts were right"


def test_layers_that_reuse_the_kv_of_another_store_none() -> None:
    """Gemma 3n style: the last two of six layers read what layers 2 and 3 have. A model that lends otherwise shows."""
    model = tiny_model("gemma3n")
    with opened(model) as kv:
        assert sorted(layer for group in kv.geometry.groups for layer in group.layers) == [0, 1, 2, 3]
    with opened(model, paged=True) as kv:
        kv._sources[4] = 0
        with pytest.raises(IntegrityError, match="layer 4 does not attend to the KV of layer 0"):
            generate(model, PROMPT, kv.cache())


def test_eager_attention_too() -> None:
    for family in ("llama", "gemma3", "gpt_oss"):
        model = tiny_model(family)
        model.set_attn_implementation("eager")
        expected = generate(model, BATCH)
        with opened(model) as kv:
            assert generate(model, BATCH, kv.cache()) == expected
            assert generate(model, BATCH, kv.cache()) == expected


def test_one_cache_for_a_conversation() -> None:
    """The second turn goes on in the same cache: only the new tokens are computed."""
    for family in ("llama", "mistral", "deepseek_v3"):
        model = tiny_model(family)
        first = generate(model, PROMPT)[0]
        longer = torch.tensor([[*PROMPT[0].tolist(), *first, *random_ids(9)]])
        expected = generate(model, longer)
        with opened(model) as kv:
            cache = kv.cache()
            assert generate(model, PROMPT, cache)[0] == first
            assert generate(model, longer, cache) == expected
            fresh = kv.cache()  # and a fresh one finds prompt and answer of the first
            assert generate(model, longer, fresh) == expected
            assert fresh.reused_tokens >= (PROMPT.shape[1] + len(first) - 1) // BLOCK * BLOCK


def test_sampling_with_several_answers_draws_the_same() -> None:
    model = tiny_model("qwen3")
    drawn = []
    with opened(model) as kv:
        for cache in (None, kv.cache(), kv.cache()):
            torch.manual_seed(5)
            drawn.append(generate(model, PROMPT, cache, do_sample=True, num_return_sequences=3))
    assert drawn[0] == drawn[1] == drawn[2]


def test_every_length_of_prompt_and_of_shared_prefix() -> None:
    model = tiny_model("gemma2")
    ids = PROMPT[0].tolist()
    with opened(model) as kv:
        generate(model, PROMPT, kv.cache())
        for shared in (1, BLOCK - 1, BLOCK, BLOCK + 1, 40):
            other = torch.tensor([[*ids[:shared], *random_ids(7)]])
            assert generate(model, other, kv.cache()) == generate(model, other), shared


def test_case_023_a_whole_prompt_in_the_store_leaves_one_token_to_compute() -> None:
    model = tiny_model("llama")
    with opened(model) as kv:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
            ids = torch.tensor([random_ids(length)])
            expected = generate(model, ids)
            assert generate(model, ids, kv.cache()) == expected
            cache = kv.cache()
            assert generate(model, ids, cache) == expected
            assert cache.reused_tokens == (length - 1) // BLOCK * BLOCK


def test_a_batch_reuses_what_its_rows_have_in_common() -> None:
    """Columns are computed from one on for all rows; the luckier row gives back what it has beyond."""
    model = tiny_model("llama")
    with opened(model) as kv:
        alone = BATCH[2:, 23:]
        generate(model, alone, kv.cache())
        cache = kv.cache()
        assert generate(model, BATCH, cache) == generate(model, BATCH)
        assert cache.reused_tokens == 0  # row 0 has nothing, and begins at column 0
        cache = kv.cache()
        assert generate(model, BATCH, cache) == generate(model, BATCH)
        assert cache.reused_tokens == 32 + (32 - 7) + (32 - 23)
        assert cache.reused_by_tier == {"device": cache.reused_tokens}


@pytest.mark.parametrize("width", [30, 40])
@pytest.mark.parametrize("family", SLIDING)
def test_rows_whose_windows_are_full_but_begin_at_other_tokens(family: str, width: int) -> None:
    """Little padding: every row's window is full, and lies in the same blocks or nearly."""
    model = tiny_model(family)
    ids = torch.tensor([[0] * pad + random_ids(width - pad) for pad in (5, 0, 3)])
    expected = generate(model, ids)
    with opened(model) as kv:
        for _ in range(2):
            assert generate(model, ids, kv.cache()) == expected


def test_without_reuse_where_the_caller_wants_every_row_of_output() -> None:
    model = tiny_model("llama")
    with opened(model) as kv:
        generate(model, PROMPT, kv.cache())
        with torch.inference_mode():
            whole = model(input_ids=PROMPT, cache=kv.cache()).logits
            states = model(input_ids=PROMPT, cache=kv.cache(), logits_to_keep=1, output_hidden_states=True)
            kept = model(input_ids=PROMPT, cache=kv.cache(), logits_to_keep=9).logits
            expected = model(input_ids=PROMPT).logits
        assert states.hidden_states[0].shape[1] == PROMPT.shape[1]
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(kept, expected[:, -9:], rtol=0, atol=1e-4)


def test_the_store_is_told_how_fast_prompts_are_computed() -> None:
    """It weighs loading against computing by it; a decode step and a short rest of a prompt say nothing."""
    model = tiny_model("llama")
    with opened(model) as kv:
        costs = kv.store._parts.costs
        guess = costs.prefill_tokens_per_second
        generate(model, torch.tensor([random_ids(40)]), cache=kv.cache())
        assert costs.prefill_tokens_per_second == guess
        started = time.perf_counter()
        generate(model, torch.tensor([random_ids(200)]), cache=kv.cache())
        seconds = time.perf_counter() - started
        assert costs.prefill_tokens_per_second != guess
        assert costs.prefill_tokens_per_second >= 200 / seconds
