"""What a StoreCache refuses: whatever would make KV something else than its tokens say, and use at the wrong place."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import CapacityError, ConfigError, IntegrityError, UsageError
from engine_adapter.transformers_cache import ModelStore
from engine_adapter.transformers_cache.model_store import weights_in_memory
from kvstore import KVStoreConfig
from tests.engine_adapter.generate_kit import BATCH, PROMPT, again, generate, logits_of, opened, random_ids
from tests.engine_adapter.paged_kit import tiny_config, tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def test_padding_on_the_right_is_refused(model: Any) -> None:
    with opened(model) as kv, pytest.raises(UsageError, match="left only"):
        model.generate(BATCH.flip(1), attention_mask=(BATCH.flip(1) != 0).long(), cache=kv.cache(), max_new_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.arange(3, 45)[None]}, "position_ids: expected 0, 1, 2"),
        ({"attention_mask": torch.ones(1, 1, 42, 42)}, "attention_mask: got"),
        ({"attention_mask": torch.ones(1, 41)}, "attention_mask: got"),
        ({"attention_mask": torch.tensor([[0] + [1] * 41])}, "position_ids: rows with padding need them"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(1, 42, 32)}, "needs input_ids"),
        ({"input_ids": None}, "input_ids: expected"),
    ],
)
def test_arguments_that_do_not_say_what_the_kv_is(model: Any, arguments: dict[str, Any], message: str) -> None:
    with opened(model) as kv, pytest.raises(UsageError, match=message), torch.inference_mode():
        model(**{"input_ids": PROMPT, "cache": kv.cache(), **arguments})


def test_another_models_cache_training_gradients_and_the_wrong_time(model: Any) -> None:
    other = tiny_model("llama")
    with opened(model) as kv, opened(other) as second:
        with pytest.raises(UsageError, match="outside a forward pass of the model that its ModelStore"):
            generate(model, PROMPT, second.cache())
        with pytest.raises(UsageError, match="outside a forward pass"):
            kv.cache().update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
        with pytest.raises(UsageError, match="no gradients"):
            model(input_ids=PROMPT, cache=kv.cache())
        model.train()
        with pytest.raises(UsageError, match=r"model\.eval"):
            generate(model, PROMPT, kv.cache())
        model.eval()
        cache = kv.cache()
        logits_of(model, random_ids(3), cache)
        with pytest.raises(UsageError, match="negative count"):
            cache.crop(2)
        with pytest.raises(UsageError, match="rows"):
            cache.reorder_cache(torch.tensor([1]))


def test_a_layer_that_does_not_update_the_cache_is_noticed(model: Any) -> None:
    with opened(model) as kv:
        cache = kv.cache()
        taken = cache.update
        cache.update = lambda keys, values, layer, **_: (  # type: ignore[method-assign]
            (keys, values) if layer == 2 else taken(keys, values, layer)
        )
        with pytest.raises(IntegrityError, match=r"layers \[2\]"):
            generate(model, PROMPT, cache)
        with pytest.raises(UsageError, match="make a new one"):
            generate(model, PROMPT, cache)
        cache.finish()
        assert kv.store.lookup(PROMPT[0].tolist()).tokens == 0, "nothing of it was saved"


def test_a_pass_that_fails_leaves_nothing_of_it(model: Any) -> None:
    ids = random_ids(30)
    with opened(model) as kv:
        cache = kv.cache()
        logits_of(model, ids, cache)
        hook = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits_of(model, random_ids(40), cache)
        hook.remove()
        assert cache.get_seq_length() == 30
        generate(model, torch.tensor([ids + random_ids(5)]), cache)  # goes on as if it had not been
        gc.collect()


def test_a_store_that_is_too_small_says_so_and_holds_nothing(model: Any) -> None:
    with opened(model, device_bytes="128 KiB") as kv:
        with pytest.raises(CapacityError):
            generate(model, torch.tensor([random_ids(400)]), kv.cache())
        gc.collect()
        assert generate(model, PROMPT, kv.cache()) == generate(model, PROMPT)


def test_models_whose_kv_depends_on_more_than_the_tokens_are_refused() -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match="dynamic"):
        ModelStore(_of(config))
    indexed = tiny_config("deepseek_v3")
    indexed.index_topk = 4
    with pytest.raises(ConfigError, match="index_topk"):
        ModelStore(_of(indexed))


def test_latents_of_another_build_are_refused_in_paged_mode_by_name() -> None:
    model = tiny_model("deepseek_v3")
    for layer in model.model.layers:
        layer.self_attn.v_head_dim_kept = layer.self_attn.v_head_dim
        del layer.self_attn.v_head_dim
    with pytest.raises(ConfigError, match=r"DeepseekV3ForCausalLM keeps latents.*paged=False"):
        ModelStore(model, paged=True)


def _of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config).eval()


def test_a_paged_model_without_our_cache_says_so_and_is_itself_again_after_close(model: Any) -> None:
    expected = generate(model, PROMPT)
    with opened(model, paged=True) as kv:
        generate(model, PROMPT, kv.cache())
        with pytest.raises(UsageError, match="give it a cache"):
            generate(model, PROMPT)
    assert generate(model, PROMPT) == expected


# ---- identity


def test_weights_name_the_store(model: Any) -> None:
    assert weights_in_memory(model) == weights_in_memory(tiny_model("llama"))
    assert weights_in_memory(model) != weights_in_memory(tiny_model("llama", seed=1))
    assert weights_in_memory(model) != weights_in_memory(tiny_model("llama", rms_norm_eps=1e-3)), "same weights"
    with opened(model, paged=True) as kv:
        assert kv.identity.weights == weights_in_memory(model)


def test_a_batch_that_cannot_be_admitted_leaves_the_cache_as_it_was(model: Any) -> None:
    with opened(model, device_bytes="192 KiB") as kv:
        generate(model, PROMPT, kv.cache())
        cache = kv.cache()
        with pytest.raises(CapacityError):
            generate(
                model, torch.cat((PROMPT.repeat(1, 1), *(torch.tensor([random_ids(42)]) for _ in range(5)))), cache
            )
        assert cache.get_seq_length() == 0
        cache.finish()
        gc.collect()
        cache = kv.cache()
        assert generate(model, PROMPT, cache) == generate(model, PROMPT)


def test_case_003_adapters_and_tenants_share_nothing(model: Any) -> None:
    with opened(model) as kv:
        generate(model, PROMPT, kv.cache(adapter=("a", 1, "X"), tenant="t"))
        found = {}
        for name, of in {
            "same": {"adapter": ("a", 1, "X"), "tenant": "t"},
            "other digest": {"adapter": ("a", 1, "Y"), "tenant": "t"},
            "other tenant": {"adapter": ("a", 1, "X"), "tenant": "u"},
            "plain": {},
        }.items():
            cache = kv.cache(**of)
            generate(model, PROMPT, cache, max_new_tokens=1, min_new_tokens=1)
            found[name] = cache.reused_tokens
        assert found == {"same": 32, "other digest": 0, "other tenant": 0, "plain": 0}


def test_a_model_with_adapters_needs_their_name(model: Any) -> None:
    model.peft_config = {"mine": object()}
    try:
        with pytest.raises(ConfigError, match="name the active one"):
            ModelStore(model)
        with opened(model, adapter="mine") as kv:
            generate(model, PROMPT, kv.cache())
    finally:
        del model.peft_config


# ---- tiers

_PROGRAM = """
import sys, torch
from tests.engine_adapter.generate_kit import again
from tests.engine_adapter.paged_kit import tiny_model
print(*again(tiny_model(sys.argv[1]), sys.argv[2]))
"""


def test_a_second_process_reuses_through_the_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    cold, by_tier, tokens = again(tiny_model("gemma3"), path)
    assert (cold, by_tier) == (0, {})
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "gemma3", path],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"64 {{'disk': 64}} {tokens}"
    assert again(tiny_model("gemma3", seed=1), path)[:2] == (0, {}), "other weights share nothing"


def test_latents_come_back_from_the_disk(tmp_path: Path) -> None:
    path = str(tmp_path / "kv")
    model = tiny_model("deepseek_v3")
    first = again(model, path, paged=True)
    second = again(model, path, paged=False)
    assert (first[0], second[0], second[1]) == (0, 64, {"disk": 64})
    assert first[2] == second[2]


def test_what_the_device_cannot_hold_comes_back_from_the_host(model: Any) -> None:
    prompts = [torch.tensor([random_ids(120)]) for _ in range(4)]
    expected = [generate(model, ids) for ids in prompts]
    settings = {"device_bytes": "192 KiB", "host_bytes": "4 MiB", "load_always": True, "spill_policy": "everything"}
    with opened(model, **settings) as kv:
        tiers: dict[str, int] = {}
        for _ in range(2):
            for ids, tokens in zip(prompts, expected, strict=True):
                cache = kv.cache()
                assert generate(model, ids, cache) == tokens
                assert sum(cache.reused_by_tier.values()) == cache.reused_tokens
                for tier, count in cache.reused_by_tier.items():
                    tiers[tier] = tiers.get(tier, 0) + count
                del cache
                gc.collect()
        assert tiers["host"] > 0


def test_the_name_that_transformers_had_before(model: Any) -> None:
    with opened(model) as kv:
        cache = kv.cache()
        with pytest.warns(FutureWarning, match="past_key_values"):
            model.generate(
                PROMPT, attention_mask=torch.ones_like(PROMPT), past_key_values=cache, max_new_tokens=2, pad_token_id=0
            )
        assert cache.get_seq_length() == PROMPT.shape[1] + 1


def test_two_stores_of_one_model(model: Any) -> None:
    with opened(model) as first, opened(model, tenant="second") as second:
        expected = generate(model, PROMPT)
        for kv in (first, second, first):
            assert generate(model, PROMPT, kv.cache()) == expected


def test_config_is_the_stores_own() -> None:
    model = tiny_model("llama")
    with ModelStore(model, KVStoreConfig(device_bytes="1 MiB", codec="raw"), block_tokens=32, weights="rev1") as kv:
        assert kv.geometry.block_tokens == 32
        assert kv.identity.weights == "rev1"
        cache = kv.cache()
        assert generate(model, PROMPT, cache) == generate(model, PROMPT)
    kv.close()


def test_what_a_newcomer_gets_wrong_is_said_at_once(model: Any) -> None:
    with pytest.raises(ConfigError, match="model: got None"):
        ModelStore(None)
    with opened(model) as kv:
        with pytest.raises(UsageError, match="exact: got 'yes'; expected True or False"):
            kv.cache(exact="yes")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="media: got 5; expected a list of Media for each prompt"):
            kv.cache(media=5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="media: got"):
            kv.cache(media=[5])  # type: ignore[list-item]
        cache = kv.cache()
        generate(model, PROMPT, cache)
        with pytest.raises(UsageError, match="another prompt needs a cache of its own"):
            generate(model, PROMPT[:, :5], cache)
        used = kv.cache()
    with pytest.raises(UsageError, match="the ModelStore of this cache is closed"):
        generate(model, PROMPT, used)
