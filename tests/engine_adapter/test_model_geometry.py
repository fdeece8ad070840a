"""From configs to geometry, and what is refused because paging it would be silently wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from allocator import ConfigError, GroupKind
from engine_adapter.model_geometry import geometry_from_config, kv_sources, refuse_model
from engine_adapter.runner import HFRunner
from tests.engine_adapter.paged_kit import tiny_config, tiny_model


def test_full_attention_is_one_group() -> None:
    geometry = geometry_from_config(tiny_config("llama"), torch.bfloat16)
    (group,) = geometry.groups
    assert (group.kind, group.layers, group.kv_heads) == (GroupKind.FULL, (0, 1, 2, 3), 2)
    assert (group.key_dim, group.value_dim, group.window_tokens) == (16, 16, None)
    assert (geometry.dtype, geometry.block_tokens) == ("bfloat16", 16)


def test_window_on_all_layers_without_layer_types() -> None:
    (group,) = geometry_from_config(tiny_config("mistral"), "float32", block_tokens=32).groups
    assert (group.kind, group.window_tokens, group.layers) == (GroupKind.SLIDING, 20, (0, 1, 2, 3))


def test_hybrid_is_a_group_per_kind() -> None:
    full, sliding = geometry_from_config(tiny_config("gemma3"), "float32").groups
    assert (full.kind, full.layers) == (GroupKind.FULL, (2,))
    assert (sliding.kind, sliding.layers, sliding.window_tokens) == (GroupKind.SLIDING, (0, 1, 3), 20)


def test_a_window_that_is_switched_off_counts_for_nothing() -> None:
    config = hf.Qwen2Config(num_hidden_layers=2, use_sliding_window=False, sliding_window=64)
    assert [group.kind for group in geometry_from_config(config, "float32").groups] == [GroupKind.FULL]


def test_rope_is_part_of_the_identity() -> None:
    plain, other = tiny_config("llama"), tiny_config("llama")
    other.rope_parameters = {"rope_type": "default", "rope_theta": 5e5}
    linear = tiny_config("llama")
    linear.rope_parameters = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    prints = {geometry_from_config(config, "float32").fingerprint() for config in (plain, other, linear)}
    assert len(prints) == 3
    assert geometry_from_config(plain, "float32") == geometry_from_config(tiny_config("llama"), "float32")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_depends_on_neighbours_is_refused(rope_type: str) -> None:
    config = tiny_config("llama")
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ConfigError, match=f"'{rope_type}'.*neighbours"):
        geometry_from_config(config, "float32")


def test_rope_nested_by_layer_type_is_looked_into() -> None:
    config = tiny_config("gemma3")
    config.rope_parameters = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    with pytest.raises(ConfigError, match="full_attention layers"):
        geometry_from_config(config, "float32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, "linear_attention"),
        ({"num_kv_shared_layers": 2}, "shares KV.*does not say whose"),
        ({"layer_types": ["full_attention"]}, "1 layer types for 4 layers"),
        ({"use_bidirectional_attention": True}, "causally"),
    ],
)
def test_what_the_runner_cannot_do_is_said(change: dict[str, Any], message: str) -> None:
    config = tiny_config("llama")
    for name, value in change.items():
        setattr(config, name, value)
    with pytest.raises(ConfigError, match=message):
        geometry_from_config(config, "float32")


def test_mla_is_one_latent_a_token_and_layer() -> None:
    (group,) = geometry_from_config(hf.DeepseekV3Config(), "bfloat16").groups
    assert (group.kind, group.kv_heads, group.key_dim, group.value_dim) == (GroupKind.LATENT, 1, 512 + 64, 0)


def test_layers_that_reuse_the_kv_of_another_are_in_no_group() -> None:
    config = tiny_config("gemma3n")
    assert kv_sources(config) == {4: 2, 5: 3}
    assert kv_sources(tiny_config("gemma3")) == {}
    groups = geometry_from_config(config, "float32").groups
    assert [group.layers for group in groups] == [(1, 3), (0, 2)]


@pytest.mark.parametrize("modes", [[None, None, "reuse", None], [None, "store", "reuse_but_indexer", None]])
def test_sharing_that_is_not_understood_is_refused(modes: list[str | None]) -> None:
    config = tiny_config("llama")
    config.layer_types = ["full_attention"] * 4
    config.kv_sharing_modes = modes
    with pytest.raises(ConfigError, match=r"layer 2 .*sharing mode"):
        geometry_from_config(config, "float32")


@pytest.mark.parametrize("name", ["Bloom", "Falcon"])
def test_models_that_never_call_the_attention_function_are_refused(name: str) -> None:
    changes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "n_layer": 2}
    model = getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**changes))
    with pytest.raises(ConfigError, match="AttentionInterface"):
        refuse_model(model)
    with pytest.raises(ConfigError, match="AttentionInterface"):
        HFRunner(model)


def test_a_model_with_attention_that_is_not_causal_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ConfigError, match="does not attend causally"):
        HFRunner(model)
