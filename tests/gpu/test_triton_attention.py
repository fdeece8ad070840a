"""The triton kernels on a card: the interpreter's cases, long contexts, and a slab past 2^31 bytes."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.attention import AttentionSettings, get_backend, triton_paged
from engine_adapter.attention.triton_paged import TritonPagedAttention
from tests.engine_adapter.triton.attention_cases import CASES, Case, TritonScene, check_case, torch_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_backend_is_ready() -> None:
    works, reason = triton_paged.status()
    assert works, reason
    assert triton_paged.supports("cuda")
    assert not triton_paged.supports("cpu")
    assert isinstance(get_backend("triton"), TritonPagedAttention)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("item_tokens", [48, 1 << 20], ids=["split", "whole"])
def test_attention_equals_float64(case: Case, item_tokens: int) -> None:
    check_case(case, "cuda", TritonPagedAttention(programs=1000, item_tokens_min=item_tokens))


LONG = [(4000, 1), (4096, 1), (17, 1), (1023, 8), (2500, 3), (0, 1)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)])
def test_long_contexts(dtype: str, dims: tuple[int, int]) -> None:
    scene = {"cold_share": 0.8, "dtype": dtype, "key_dim": dims[0], "value_dim": dims[1]}
    error = 1e-3 if dtype == "float16" else 5e-3
    case = Case("long", LONG, scene, AttentionSettings(dims[0] ** -0.5), error)
    check_case(case, "cuda", TritonPagedAttention())
    assert torch_error(case, "cuda") < 10 * error


def test_long_latents() -> None:
    scene = {"cold_share": 0.8, "dtype": "bfloat16", "key_dim": 576, "value_dim": 0, "kv_heads": 1}
    case = Case("latent", LONG, scene, AttentionSettings(0.07, latent_value_dim=512), 5e-3)
    check_case(case, "cuda", TritonPagedAttention())


def test_slots_past_two_and_four_gibibytes() -> None:
    """The same blocks moved to the far end of a slab of 5 GiB: offsets are 64 bit."""
    from dataclasses import replace

    from allocator import ExtentLayout, Slab
    from engine_adapter.paged_cache import PagedCache

    scene, settings = TritonScene([(200, 1)], cold_share=0.5, dtype="float16"), AttentionSettings(0.25)
    small = scene.slab.layout
    layout = ExtentLayout(5 << 30, small.raw_slot_bytes[::2], small.raw_slot_bytes[1::2], small.extent_bytes)
    slab = Slab(layout, scene.geometry, "cuda")
    moved = layout.extent_count - small.extent_count
    start = moved * layout.extent_bytes
    assert start > 1 << 32
    used = small.extent_count * small.extent_bytes
    slab.bytes[start : start + used].copy_(scene.slab.bytes[:used])
    one = scene.sequences[0]
    table = one.part.tables[0].copy()
    for form in (0, 1):
        table[table & 1 == form] += moved * layout.per_extent[form] * 2
    size = scene.geometry.block_tokens
    mapping = one.part.slot_mappings[0] + moved * layout.per_extent[0] * size
    one.part = replace(one.part, tables=(table,), slot_mappings=(mapping,))
    scene.slab, scene.device, scene.cache = slab, "cuda", PagedCache(slab, scene.geometry, scene.codec)
    found, expected = scene.attend(TritonPagedAttention(), 0, settings), scene.expected(0, settings)
    assert float((found - expected).norm() / expected.norm()) < 1e-3
