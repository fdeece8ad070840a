"""Configs as published, and broken: which field, what was given, what was expected."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from allocator import ConfigError, GroupKind
from engine_adapter.model_geometry import geometry_from_config
from kvstore.planning.builtin_shapes import find_shape
from kvstore.planning.model_config import load_shape, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        hf.LlamaConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4, num_key_value_heads=2),
        hf.MistralConfig(num_hidden_layers=3, sliding_window=20),
        hf.Qwen2Config(num_hidden_layers=4, use_sliding_window=True, sliding_window=64, max_window_layers=2),
        hf.Qwen2Config(num_hidden_layers=4, sliding_window=64),
        hf.Qwen3Config(num_hidden_layers=4),
        hf.Gemma2Config(num_hidden_layers=5),
        hf.Gemma3TextConfig(num_hidden_layers=13),
        hf.GptOssConfig(num_hidden_layers=6),
    ],
    ids=lambda config: config.model_type,
)
def test_a_file_and_transformers_object_mean_the_same_groups(config: Any, tmp_path: Path) -> None:
    expected = geometry_from_config(config, "bfloat16").groups
    config.save_pretrained(tmp_path)
    assert load_shape(tmp_path).groups == expected
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("layer_types", None)  # older files do not list their layers
    fields.pop("sliding_window_pattern", None)
    assert read_config(fields, "older").groups == expected


@pytest.mark.parametrize(
    "kind",
    ["mistral", "mixtral", "gpt_oss", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "cohere2",
     "starcoder2", "smollm3", "llama"],
)  # fmt: skip
def test_what_a_class_fills_in_is_filled_in(kind: str) -> None:
    # As people write configs by hand: only what differs from the class.
    given = {"model_type": kind, "num_hidden_layers": 40, "hidden_size": 4096, "num_attention_heads": 64,
             "vocab_size": 1000}  # fmt: skip
    config = hf.AutoConfig.for_model(**given)
    windowed = {"use_sliding_window": True, "sliding_window": 100} if kind == "qwen2" else {}
    config = hf.AutoConfig.for_model(**given, **windowed)
    shape = read_config(given | windowed, kind)
    assert shape.groups == geometry_from_config(config, "bfloat16").groups
    assert shape.tied is bool(config.tie_word_embeddings)


def test_a_null_is_an_answer() -> None:
    shape = read_config(LLAMA | {"model_type": "mistral", "sliding_window": None, "num_key_value_heads": None}, "m")
    assert [(group.window_tokens, group.kv_heads) for group in shape.groups] == [(None, 4)]


def test_the_text_part_of_a_multimodal_model_is_read() -> None:
    # As google/gemma-3-4b-it has it: what the class fills in is left out.
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    shape = read_config({"model_type": "gemma3", "text_config": text, "vision_config": {}}, "gemma")
    assert shape.groups == find_shape("gemma-3-4b").groups
    assert [len(group.layers) for group in shape.groups] == [5, 29]


def test_a_latent_is_one_group() -> None:
    (group,) = find_shape("deepseek-v3").groups
    assert (group.kind, group.key_dim, group.value_dim, len(group.layers)) == (GroupKind.LATENT, 576, 0, 61)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size: missing; expected a count"),
        ({"hidden_size": "64"}, "hidden_size: got '64'; expected an integer"),
        ({"hidden_size": 63}, "hidden_size: got 63 for 4 heads and no head_dim; expected a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: got 0; expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers: got True"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers: got 1000000000000000000000000000000; expected"),
        ({"num_hidden_layers": 100_000}, "num_hidden_layers: got 100000; expected an integer in .1, 2048."),
        ({"text_config": [1]}, "text_config: got list; expected an object"),
        (
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": "a"},
            "max_window_layers: got 'a'; expected a count",
        ),
        ({"num_key_value_heads": 3}, "num_key_value_heads: got 3; expected a divisor of num_attention_heads, 4"),
        ({"num_key_value_heads": -2}, "num_key_value_heads: got -2"),
        ({"head_dim": 1.5}, "head_dim: got 1.5"),
        ({"head_dim": 0}, "head_dim: got 0; expected an integer"),
        ({"num_key_value_heads": 0}, "num_key_value_heads: got 0; expected an integer"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank: got None; expected a count in a model with MLA"),
        ({"num_local_experts": -1, "num_experts_per_tok": 2}, "num_local_experts: got -1; expected an integer"),
        ({"layer_types": ["full_attention"]}, r"layer_types: got \['full_attention'\]; expected a list of 3"),
        ({"layer_types": ["mamba"] * 3}, r"layer_types: got \['mamba'\]; expected full_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is None; expected a count of tokens"),
        ({"sliding_window_pattern": 0, "sliding_window": 8}, "sliding_window_pattern: got 0"),
        ({"kv_lora_rank": 32}, "qk_rope_head_dim: got None; expected a count beside kv_lora_rank"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok: got 9; expected a count up to 8"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers: got 2"),
        ({"full_attention_interval": 4}, "full_attention_interval: got 4; expected layers"),
        ({"attn_layer_period": 8}, "attn_layer_period: got 8; expected layers that all attend"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: got 8192"),
        ({"model_type": "falcon", "multi_query": True}, "multi_query: got True; expected num_key_value_heads"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
    ],
)
def test_a_broken_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(LLAMA | change, "broken")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "got list; expected an object"),
        (b'{"text_config": {"hidden_size": 4}}', "num_hidden_layers: missing"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_a_broken_file_is_named(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=f"config.json: .*{message}"):
        load_shape(tmp_path)


def test_an_unknown_name_is_told_with_a_near_one() -> None:
    with pytest.raises(ConfigError, match=r"model: got 'llama-3\.1-80b'; did you mean 'llama-3\.1-"):
        find_shape("llama-3.1-80b")
