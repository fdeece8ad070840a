"""Figures that others have published about KV caches, with their sources, computed by the planner."""

from __future__ import annotations

import pytest

from allocator import GroupKind
from kvstore.planning.builtin_shapes import CONFIGS, find_shape
from kvstore.planning.capacity import Capacity, Demand
from kvstore.planning.effects import Effect, effects
from quant import BlockShape, get_codec

GIB, KIB = 1 << 30, 1 << 10

# Parameters as their makers' model cards state them, in 1e9 (DeepSeek and gpt-oss: all / active, output layer with it).
STATED_PARAMETERS = {
    "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55,
    "mistral-7b": 7.24, "gemma-3-27b": 27.01, "qwen2.5-7b": 7.62, "qwen2.5-72b": 72.7, "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.5, "deepseek-v2": 236.0, "deepseek-v3": 671.0, "smollm2-135m": 0.1345, "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}  # fmt: skip
STATED_ACTIVE = {"deepseek-v2": 21.0, "deepseek-v3": 37.0, "gpt-oss-120b": 5.1}


def raw(model: str, context: int, concurrency: int = 1) -> Capacity:
    return Capacity(find_shape(model), Demand(context_tokens=context, concurrency=concurrency, dtype="float16"), "raw")


def effect(model: str, what: str, base: str, **demand: int) -> Effect:
    wanted = Demand(**{"context_tokens": 4096, **demand})
    found = [one for one in effects(find_shape(model), wanted) if what in one.what and base in one.base]
    assert len(found) == 1, found
    return found[0]


def test_llama_2_13b_takes_800_kib_a_token_at_fp16() -> None:
    # vLLM paper (arXiv 2309.06180, section 1) counts the like for OPT-13B, 40 layers of 5,120: 800 KB a token.
    assert raw("llama-2-13b", 4096).token_bytes == 800 * KIB == 2 * 2 * 40 * 5120


def test_llama_2_13b_at_4096_by_8_takes_25_gib() -> None:
    assert raw("llama-2-13b", 4096, 8).total_bytes(8, 0) / GIB == pytest.approx(25, abs=0.1)


def test_llama_31_70b_at_128k_takes_40_gib_and_four_of_them_160() -> None:
    # huggingface.co/blog/llama31, "KV cache": 70B at 128k tokens 39.06 GB, which is 128,000 tokens in GiB.
    assert raw("llama-3.1-70b", 128_000).request_bytes / GIB == pytest.approx(39.06, abs=0.005)
    at_128k = raw("llama-3.1-70b", 131_072)
    assert at_128k.request_bytes / GIB == 40
    assert at_128k.total_bytes(4, 0) / GIB == 160


def test_llama_2_70b_gqa_needs_8_times_less() -> None:
    # arXiv 2307.09288, table 1 and appendix A.2.1: GQA with 8 KV heads for 64 query heads.
    found = effect("llama-2-70b", "GQA", "MHA: 64 heads x (128 + 128)")
    assert (found.times_less, found.amount) == (8.0, 80 * 8 * 256)


def test_mistral_7b_gqa_needs_4_times_less_and_keeps_4096_tokens() -> None:
    # arXiv 2310.06825, table 1: 32 heads, 8 KV heads, window 4,096.
    assert effect("mistral-7b", "GQA", "MHA").times_less == 4.0
    (group,) = find_shape("mistral-7b").groups
    assert (group.kind, group.window_tokens) == (GroupKind.SLIDING, 4096)
    window = effect("mistral-7b", "sliding window", "32,768 tokens", context_tokens=32768)
    assert window.times_less == pytest.approx(8, rel=0.01)  # "a window of 4,096 at 32k tokens saves 8 times"
    assert raw("mistral-7b", 32768).request_bytes <= (4096 + 16) * 128 * KIB
    assert raw("mistral-7b", 1 << 20).request_bytes == raw("mistral-7b", 32768).request_bytes


@pytest.mark.parametrize(
    ("base", "fewer"),
    [
        # arXiv 2405.04434, section 2.1: n_h = 128, d_h = 128, d_c = 512, d_R = 64, 60 layers.
        ("MHA: 128 heads x (128 + 128)", 98.2),
        # The same paper's comparison is with DeepSeek-67B (95 layers, 8 KV heads): "reduces the KV cache by 93.3 %",
        # which counts V2's values in 6 bits; in equal precision it is 82.2 %.
        ("DeepSeek-67B's GQA: 95 layers, 8 heads x (128 + 128)", 82.2),
        ("DeepSeek-67B's GQA in 16 bits (the figure usually quoted)", 93.3),
    ],
)
def test_deepseek_v2_latent_against_three_bases(base: str, fewer: float) -> None:
    assert effect("deepseek-v2", "MLA, a latent of 576", base).fewer_percent == pytest.approx(fewer, abs=0.05)


@pytest.mark.parametrize("model", sorted(CONFIGS))
@pytest.mark.parametrize("codec", ["int4", "int8k"])
def test_cold_bytes_are_the_codecs_own(model: str, codec: str) -> None:
    shape = find_shape(model)
    planned = Capacity(shape, Demand(context_tokens=4096), codec)
    for group, size in zip(shape.groups, planned._cold_bytes, strict=True):
        block = BlockShape(len(group.layers), group.kv_heads, 16, group.key_dim, group.value_dim)
        assert size == get_codec(codec).encoded_bytes(block, "bfloat16")


def test_int4_is_about_3_5_times_smaller_with_scales_counted() -> None:
    ratio = effect("llama-3.1-8b", "INT4, a cold block", "bfloat16").times_less
    # Per head and 16 tokens: codes 8 x 256, K scales and zeros 128 each, V 16 + 8, two bases, padding to 64.
    assert ratio == 2 * 16 * 256 / 2368
    assert 3.4 < ratio < 3.6
    assert 3.1 < effect("deepseek-v2", "INT4, a cold block", "bfloat16").times_less < 3.2
    whole = effect("llama-3.1-8b", "INT4, a request", "bfloat16", context_tokens=256)
    assert whole.times_less < ratio / 2  # the first block and the newest tokens weigh in a short one


@pytest.mark.parametrize(("model", "billions"), STATED_PARAMETERS.items())
def test_parameters_are_those_of_the_model_card(model: str, billions: float) -> None:
    assert find_shape(model).parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("model", "billions"), STATED_ACTIVE.items())
def test_active_parameters_are_those_of_the_model_card(model: str, billions: float) -> None:
    shape = find_shape(model)
    assert (shape.active_parameters + shape.embedding_parameters) / 1e9 == pytest.approx(billions, rel=0.04)
