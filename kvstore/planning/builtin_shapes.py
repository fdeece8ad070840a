"""Models known by name: the fields of their published `config.json` that decide KV, weights and arithmetic.

Read with the same code as a config from a file. Names are compared without case; dots and dashes count.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from allocator import ConfigError
from kvstore.planning.model_config import ModelShape, load_shape, read_config

Fields = dict[str, Any]


def _dense(
    layers: int, hidden: int, heads: tuple[int, int], feed_forward: int, vocabulary: int, context: int, **more: Any
) -> Fields:
    """heads: (query heads, KV heads)."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        **more,
    }


def _gemma3(layers: int, hidden: int, heads: tuple[int, int], feed_forward: int, dim: int, window: int) -> Fields:
    context = 32768 if layers in (18, 26) else 131072
    vocabulary = 262144 if layers in (18, 26) else 262208
    return _dense(
        layers, hidden, heads, feed_forward, vocabulary, context,
        model_type="gemma3_text", head_dim=dim, sliding_window=window,
    )  # fmt: skip


def _qwen2(layers: int, hidden: int, heads: tuple[int, int], feed_forward: int, *, tied: bool) -> Fields:
    vocabulary = 151936 if hidden < 3584 else 152064
    return _dense(layers, hidden, heads, feed_forward, vocabulary, 32768, model_type="qwen2", tie_word_embeddings=tied)


def _qwen3(layers: int, hidden: int, heads: tuple[int, int], feed_forward: int, *, tied: bool, **more: Any) -> Fields:
    return _dense(
        layers, hidden, heads, feed_forward, 151936, 40960,
        model_type="qwen3", head_dim=128, tie_word_embeddings=tied, **more,
    )  # fmt: skip


def _deepseek(layers: int, hidden: int, dense: int, experts: int, expert_width: int, q_rank: int | None) -> Fields:
    heads = {60: 128, 27: 16, 61: 128}[layers]
    return _dense(
        layers, hidden, (heads, heads), {60: 12288, 27: 10944, 61: 18432}[layers],
        129280 if layers == 61 else 102400, 163840,
        kv_lora_rank=512, q_lora_rank=q_rank, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        n_routed_experts=experts, moe_intermediate_size=expert_width, n_shared_experts=1 if layers == 61 else 2,
        num_experts_per_tok=8 if layers == 61 else 6, first_k_dense_replace=dense,
        quantization_config={"quant_method": "fp8"} if layers == 61 else None,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Fields:
    return _dense(
        layers, 2880, (64, 8), 2880, 201088, 131072,
        model_type="gpt_oss", head_dim=64, sliding_window=128, num_local_experts=experts, num_experts_per_tok=4,
        quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip


CONFIGS: dict[str, Fields] = {
    "llama-2-7b": _dense(32, 4096, (32, 32), 11008, 32000, 4096),
    "llama-2-13b": _dense(40, 5120, (40, 40), 13824, 32000, 4096),
    "llama-2-70b": _dense(80, 8192, (64, 8), 28672, 32000, 4096),
    "llama-3.1-8b": _dense(32, 4096, (32, 8), 14336, 128256, 131072),
    "llama-3.1-70b": _dense(80, 8192, (64, 8), 28672, 128256, 131072),
    "mistral-7b": _dense(32, 4096, (32, 8), 14336, 32000, 32768, model_type="mistral", sliding_window=4096),
    "gemma-3-270m": _gemma3(18, 640, (4, 1), 2048, 256, 512),
    "gemma-3-1b": _gemma3(26, 1152, (4, 1), 6912, 256, 512),
    "gemma-3-4b": _gemma3(34, 2560, (8, 4), 10240, 256, 1024),
    "gemma-3-12b": _gemma3(48, 3840, (16, 8), 15360, 256, 1024),
    "gemma-3-27b": _gemma3(62, 5376, (32, 16), 21504, 128, 1024),
    "qwen2.5-0.5b": _qwen2(24, 896, (14, 2), 4864, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, (28, 4), 18944, tied=False),
    "qwen2.5-32b": _qwen2(64, 5120, (40, 8), 27648, tied=False),
    "qwen2.5-72b": _qwen2(80, 8192, (64, 8), 29568, tied=False),
    "qwen3-0.6b": _qwen3(28, 1024, (16, 8), 3072, tied=True),
    "qwen3-8b": _qwen3(36, 4096, (32, 8), 12288, tied=False),
    "qwen3-32b": _qwen3(64, 5120, (64, 8), 25600, tied=False),
    "qwen3-30b-a3b": _qwen3(
        48, 2048, (32, 4), 6144, tied=False, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "deepseek-67b": _dense(95, 8192, (64, 8), 22016, 102400, 4096),
    "deepseek-v2-lite": _deepseek(27, 2048, 1, 64, 1408, None),
    "deepseek-v2": _deepseek(60, 5120, 1, 160, 1536, 1536),
    "deepseek-v3": _deepseek(61, 7168, 3, 256, 2048, 1536),
    "smollm2-135m": _dense(30, 576, (9, 3), 1536, 49152, 8192, tie_word_embeddings=True),
    "smollm2-360m": _dense(32, 960, (15, 5), 2560, 49152, 8192, tie_word_embeddings=True),
    "smollm2-1.7b": _dense(24, 2048, (32, 32), 8192, 49152, 8192, tie_word_embeddings=True),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}


def find_shape(model: str) -> ModelShape:
    """The shape of a built-in name, or of the file or folder at that path."""
    fields = CONFIGS.get(model.lower())
    if fields is not None:
        return read_config(fields, model.lower())
    if Path(model).exists():
        return load_shape(model)
    near = difflib.get_close_matches(model.lower(), CONFIGS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"model: got {model!r}; {hint}expected the path of a config.json, or one of {', '.join(sorted(CONFIGS))}"
    )
