"""SmolLM2 through `generate`'s cache: raw equals DynamicCache, and with INT4 cold blocks it stays within the bar.

The bar is the demo's: mean KL at most 0.006 and top-1 agreement of 95 % against full precision.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div, log_softmax

from benchmarks.quality.texts import sources, tokenizer_of
from engine_adapter.demo.promises import AGREEMENT_FLOOR, KL_LIMIT
from engine_adapter.model_source import load_model
from tests.engine_adapter.generate_kit import generate, opened

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def loaded() -> Any:
    try:
        return load_model(None, torch.float32)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def test_raw_equals_dynamic_cache_and_a_second_question_reuses_the_document(loaded: Any) -> None:
    ids = tokenizer_of(loaded.tokenizer)(next(iter(sources().values())))[:400]
    first, second = torch.tensor([ids]), torch.tensor([[*ids[:300], *ids[40:60]]])
    expected = [generate(loaded.model, prompt) for prompt in (first, second)]
    with opened(loaded.model, device_bytes="256 MiB", weights=loaded.weights) as kv:
        caches = [kv.cache(), kv.cache()]
        assert [
            generate(loaded.model, prompt, cache) for prompt, cache in zip((first, second), caches, strict=True)
        ] == (expected)
        assert [cache.reused_tokens for cache in caches] == [0, 288]


def test_int4_cold_blocks_stay_within_the_fidelity_bar(loaded: Any) -> None:
    """A past of 900 tokens, most of it INT4 by then; the next 128 tokens are scored against full precision."""
    model, past, scored = loaded.model, 900, 128
    ids = tokenizer_of(loaded.tokenizer)(next(iter(sources().values())))[: past + scored]
    with torch.inference_mode():
        expected = log_softmax(model(input_ids=torch.tensor([ids])).logits[0, past:].float(), -1)
        for paged in (False, True):
            found = log_softmax(after_int4(loaded, ids, past, paged), -1)
            mean_kl = float(kl_div(found, expected, log_target=True, reduction="batchmean"))
            agreement = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
            print(f"paged={paged}: mean KL {mean_kl:.4f}, top-1 agreement {agreement:.1%}")
            assert 1e-6 < mean_kl <= KL_LIMIT
            assert agreement >= AGREEMENT_FLOOR


def after_int4(loaded: Any, ids: list[int], past: int, paged: bool) -> torch.Tensor:
    """Logits float32[tokens, vocab] of the tokens behind `past`."""
    settings: dict[str, Any] = {"codec": "int4", "device_bytes": "256 MiB", "cool_blocks_per_step": 64}
    with opened(loaded.model, paged=paged, weights=loaded.weights, **settings) as kv:
        cache = kv.cache()
        loaded.model(input_ids=torch.tensor([ids[:past]]), cache=cache, logits_to_keep=1)
        for _ in range(2):
            cache.rows.settle()
        entries = kv.store.tables(cache.rows.rows[0].sequence_id or "")[0]
        assert (entries & 1).sum() >= (past - 128) // 16 - 2, "most of the past is INT4"
        logits: torch.Tensor = loaded.model(input_ids=torch.tensor([ids[past:]]), cache=cache).logits
        return logits[0].float()
