"""Models some of whose layers keep a state, or nothing: refused, never planned as if every layer attended."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers as hf

from allocator import ConfigError
from kvstore.planning.builtin_shapes import CONFIGS, find_shape
from kvstore.planning.model_config import read_config

LLAMA: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip
PLAIN = LLAMA | {"model_type": "not_known_yet"}


@pytest.mark.parametrize(
    "kind",
    ["mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "zamba", "zamba2", "bamba",
     "falcon_h1", "nemotron_h", "granitemoehybrid", "lfm2", "lfm2_moe", "minimax", "kimi_linear", "qwen3_next",
     "qwen3_5_text", "olmo_hybrid", "zaya"],
)  # fmt: skip
@pytest.mark.parametrize("given", ["its name", "its fields"])
def test_a_model_with_states_is_refused_by_its_name_and_by_its_fields(kind: str, given: str) -> None:
    fields = {"model_type": kind}
    if given == "its fields":
        fields = json.loads(json.dumps(hf.AutoConfig.for_model(kind).to_dict()))
        fields["model_type"] = "not_known_yet"
    said = r"expected (layers that all attend|full_attention|sliding_window)"
    if given == "its fields" and kind in ("rwkv", "xlstm"):  # have nothing of attention at all
        said = "num_attention_heads: missing"
    with pytest.raises(ConfigError, match=said):
        read_config(fields, kind)


def test_a_minimal_recurrent_config_is_told_what_it_is() -> None:
    """Found by a newcomer: it was refused for a missing num_attention_heads."""
    fields = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 100, "state_size": 16}
    with pytest.raises(ConfigError, match="got 'mamba', which is recurrent: layers keep a state instead of KV"):
        read_config(fields, "mamba")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        # recurrentgemma-2b, plamo-2-8b, Hymba-1.5B, Falcon-H1, LFM2, MiniMax-Text-01, Kimi-Linear, Nemotron-H: their
        # telling fields, as published
        ({"block_types": ["recurrent", "recurrent", "attention"]}, "block_types: got .'recurrent'"),
        ({"attention_window_size": 2048}, "attention_window_size: got 2048; expected sliding_window"),
        ({"lru_width": 2560}, "lru_width: got 2560"),
        ({"conv1d_width": 4}, "conv1d_width: got 4"),
        ({"mamba_enabled": True}, "mamba_enabled: got True"),
        ({"mamba_step": 2}, "mamba_step: got 2"),
        ({"full_attention_idx": [1]}, "full_attention_idx"),
        ({"global_attn_idx": [0, 15, 31]}, "global_attn_idx: got .0, 15, 31."),
        ({"kv_reuse_group": [[1, 2]]}, "kv_reuse_group: got .* expected layers with KV of their own"),
        ({"mamba_d_state": 16}, "mamba_d_state: got 16"),
        ({"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ({"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg"),
        ({"full_attn_idxs": [2, 5]}, "full_attn_idxs: got .2, 5."),
        ({"conv_L_cache": 3}, "conv_L_cache: got 3"),
        ({"layer_types": ["conv", "conv", "full_attention", "conv"]}, r"layer_types: got \['conv'\]; expected full"),
        ({"attn_type_list": [0, 0, 0, 1]}, "attn_type_list: got .0, 0, 0, 1."),
        ({"attn_layer_indices": [3]}, "attn_layer_indices"),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, "linear_attn_config"),
        ({"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern"),
        ({"hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern"),
        ({"layers_block_type": ["attention", "mamba"]}, "layers_block_type"),
        ({"attention_types": [[["global", "local"], 2]]}, "attention_types"),
        ({"attn_layer_pattern": "MMA"}, "attn_layer_pattern: got 'MMA'"),
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla: got True; expected layers with KV of their own"),
        ({"mixer_types": {"0": "hyena"}}, "mixer_types"),
        ({"temporal_block_types": ["anything new"]}, "temporal_block_types"),
        ({"layer_types": [["full_attention"], 1, None, {}]}, "layer_types: got"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers: got .3.; expected layers that attend to the text"),
        ({"index_topk": 2048}, "index_topk: got 2048; expected layers without keys of an index"),
        ({"per_layer_config": {"1": {"head_dim": 512}}}, "per_layer_config: got .* expected layers that are all alike"),
        ({"kv_channels": 32}, "kv_channels: got 32; expected head_dim"),
        ({"global_attn_every_n_layers": 4, "sliding_window": 8}, "layer_types: missing beside global_attn_every"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_of_layers_that_keep_something_else_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(PLAIN | fields, "foreign")
    with pytest.raises(ConfigError, match=message):
        read_config({"model_type": "seeing", "text_config": PLAIN | fields, "vision_config": {}}, "foreign")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert"},
        LLAMA | {"model_type": "roberta"},
        PLAIN | {"type_vocab_size": 2},
        PLAIN | {"is_causal": False},
        PLAIN | {"architectures": ["SomethingForMaskedLM"]},
        LLAMA | {"model_type": "gemma3_text", "use_bidirectional_attention": True, "sliding_window": 8},
    ],
    ids=["name", "roberta", "segments", "causal", "masked", "both ways"],
)
def test_an_encoder_keeps_no_kv_between_steps(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="an encoder, which keeps no KV between steps; expected a decoder"):
        read_config(config, "encoder")


@pytest.mark.parametrize("kind", ["t5", "mbart", "whisper"])
def test_an_encoder_and_decoder_is_refused_for_what_it_is(kind: str) -> None:
    with pytest.raises(ConfigError, match="is_encoder_decoder: got a model of type"):
        read_config({"model_type": kind}, kind)


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_type_list": [1, 1, 1, 1], "layernorm_linear_attention_beta": 1.0, "model_type": "minimax"},  # MiniMax-M2
        {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        {"mtp_layer_types": ["anything"]},
        {"moe_layer_pattern": [0, 1, 1, 1]},
        {"layer_norm_type": "rms"},
        {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"attention_chunk_size": None, "mamba_d_state": None, "conv_bias": False, "kv_channels": 16},
        {"type_vocab_size": 2, "is_decoder": True},
        {"no_rope_layers": [1, 1, 1, 0]},
        {"sliding_window_pattern": "LLLG", "layer_types": ["full_attention"] * 4},  # EXAONE 4
        {"cache_implementation": "hybrid"},  # Gemma 2
        {"global_attn_every_n_layers": 4, "sliding_window": 8, "layer_types": ["full_attention"] * 4},
    ],
    ids=lambda value: next(iter(value)),
)
def test_fields_that_say_nothing_of_attention_refuse_nothing(fields: dict[str, Any]) -> None:
    assert read_config(PLAIN | fields, "plain").layers == 4


@pytest.mark.parametrize(
    "kind",
    ["llama", "mistral", "mixtral", "gemma", "gemma2", "gemma3_text", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe",
     "gpt_oss", "deepseek_v3", "cohere", "cohere2", "olmo2", "olmo3", "olmoe", "phi3", "phimoe", "granite",
     "granitemoe", "smollm3", "starcoder2", "exaone4", "glm4", "ernie4_5", "minimax_m2", "gpt_neox", "opt", "biogpt",
     "kimi_k25", "llava", "internvl"],
)  # fmt: skip
def test_models_whose_layers_all_attend_stay_planned(kind: str) -> None:
    config = json.loads(json.dumps(hf.AutoConfig.for_model(kind).to_dict()))
    assert read_config(config, kind).layers > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_every_built_in_shape_is_planned(name: str) -> None:
    assert find_shape(name).layers == CONFIGS[name]["num_hidden_layers"]
