"""How the triton backend's kernels are called: which arrays, which tile sizes, which compile-time constants.

`kernel_calls` builds the launches of one layer without launching them, so that tests compile the same calls for devices
that are not there. Imports Triton only inside functions. Used by triton_paged, on the thread that runs the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.split_plan import DecodeSlice, SplitPlan, item_blocks_for, split_decode
from engine_adapter.attention.torch_paged import TorchPlan
from engine_adapter.batch import Int64Array
from engine_adapter.paged_cache import PagedCache
from quant import BlockShape
from quant.record_layout import RUN_TOKENS, record_layout
from quant.rotation import hadamard_size, signs, unit

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDEST = 576
WIDEST_FLOAT32 = 256
"""Head dims that registers and shared memory hold."""
_LOG2_E = math.log2(math.e)


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU in its interpreter (TRITON_INTERPRET=1): for tests."""
    import triton

    return bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of a program: query rows, tokens of a step over full and over INT4 blocks, warps, pipeline stages."""

    rows: int
    tokens: int
    cold_tokens: int
    warps: int
    stages: int


def tiles_for(rows: int, key_dim: int, value_dim: int, dtype_bytes: int) -> Tiles:
    """What fits the registers and the 99 KiB of shared memory of the smallest devices (compile_matrix shows it)."""
    widest, tile_rows = max(key_dim, value_dim), 16 if rows <= 16 else 32
    if widest <= 128:
        return Tiles(tile_rows, 64 if dtype_bytes == 2 else 32, 64 if dtype_bytes == 2 else 32, tile_rows // 4, 2)
    if dtype_bytes == 4:
        return Tiles(16, 16, 16, 8, 2)
    if widest <= 256:
        return Tiles(tile_rows, 32, 32, tile_rows // 4, 2)
    return Tiles(16, 32, 32, 8, 2)


def pieces(dim: int, least: int, whole: int) -> tuple[tuple[int, int], ...]:
    """(first, width), powers of two that cover dim, none below `least`; the last may reach past it.

    Up to `whole` one piece: padding then costs less than the registers of a second one.
    """
    padded = max(least, 1 << (dim - 1).bit_length())
    if padded in (least, dim) or padded <= whole:
        return ((0, padded),)
    rest = dim - padded // 2
    return ((0, padded // 2), (padded // 2, max(least, 1 << (rest - 1).bit_length())))


@dataclass(frozen=True, slots=True)
class Decode:
    """Device copies of a SplitPlan's arrays, int64."""

    split: SplitPlan
    entries: torch.Tensor
    numbers: torch.Tensor
    items: torch.Tensor
    sequences: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step for one cache group. rest: what torch attends, rows [tokens] of the step; rows None: the whole step."""

    cache: PagedCache
    group: int
    decode: Decode | None
    rest: TorchPlan | None
    rest_rows: torch.Tensor | None


def plan_decode(cache: PagedCache, group: int, slices: list[DecodeSlice], programs: int, item_tokens: int) -> Decode:
    """Cut the slices (at least one) into items of at least item_tokens, for about so many programs a launch."""
    items = -(-programs // cache.geometry.groups[group].kv_heads)
    least = -(-item_tokens // cache.geometry.block_tokens)
    split = split_decode(slices, item_blocks_for(items, slices, least))
    arrays = (split.entries, split.numbers, split.items, split.sequences, split.tokens)
    return Decode(split, *_one_copy(cache, arrays))


def covers(cache: PagedCache, group: int) -> bool:
    """Whether the kernels know the group's dtype, dims and codec."""
    found = cache.geometry.groups[group]
    widest = max(found.key_dim, found.value_dim)
    if cache.dtype not in DTYPES or found.key_dim % 8 or found.value_dim % 8:
        return False
    if widest > (WIDEST_FLOAT32 if cache.dtype == torch.float32 else WIDEST):
        return False
    codec: Any = cache.cold_codec
    return codec is None or (codec.name == "int4" and not codec.bits.rows and codec.bits.uniform == (4, 4))


def _one_copy(cache: PagedCache, arrays: tuple[Int64Array, ...]) -> tuple[torch.Tensor, ...]:
    """The arrays on the device by a single copy, each flat and 16-byte aligned (else a kernel is compiled anew)."""
    starts, at = [], 0
    for array in arrays:
        starts.append(at)
        at += array.size + array.size % 2
    whole = np.zeros(at, np.int64)
    for start, array in zip(starts, arrays, strict=True):
        whole[start : start + array.size] = array.reshape(-1)
    moved = cache.tensor(whole)
    return tuple(moved[start : start + array.size] for start, array in zip(starts, arrays, strict=True))


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A launch: kernel[grid](*arguments, **constants)."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def kernel_calls(
    plan: TritonPlan, layer: int, query: torch.Tensor, settings: AttentionSettings, out: torch.Tensor
) -> tuple[KernelCall, KernelCall]:
    """The launches that attend the decode slices of a plan in one layer; one after the other, on one stream."""
    from engine_adapter.attention.triton_kernels.decode import combine_splits, paged_decode

    decode = plan.decode
    assert decode is not None
    group, split = plan.cache.geometry.groups[plan.group], decode.split
    groups, value_dim = query.shape[1] // group.kv_heads, out.shape[-1]
    row_count = split.partial_tokens * query.shape[1]
    scratch = query.new_empty(row_count * (value_dim + 2), dtype=torch.float32)
    sums, peaks, totals = scratch.split((row_count * value_dim, row_count, row_count))
    tiles = tiles_for(groups * split.tokens_max, group.key_dim, value_dim, query.element_size())
    tile_count = -(-groups * split.tokens_max // tiles.rows)
    attend = KernelCall(
        paged_decode,
        (len(split.items) * tile_count, group.kv_heads),
        (
            query, *query.stride(), *_full_arguments(plan, layer), *_cold_arguments(plan, layer),
            decode.entries, decode.numbers, decode.items, decode.sequences, tile_count,
            *_scoring(settings, group.window_tokens), sums, peaks, totals,
        ),
        _decode_constants(plan, query, settings, tiles)
        | {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True},
    )  # fmt: skip
    rotated = split.cold and group.value_dim > 0
    padded = 1 << (value_dim - 1).bit_length()
    combine = KernelCall(
        combine_splits,
        (len(split.tokens), query.shape[1]),
        (
            sums, peaks, totals, decode.entries, decode.items, decode.sequences, decode.tokens,
            sums if settings.sinks is None else settings.sinks.to(out.device, torch.float32).contiguous(),
            _turn_back(value_dim, out.device) if rotated else sums,
            out, out.stride(0), out.stride(1),
        ),
        {
            "KV_HEADS": group.kv_heads, "GROUPS": groups, "VALUE_DIM": value_dim, "PADDED_DIM": padded,
            "SINKS": settings.sinks is not None, "ROTATED": rotated,
            "STAGES": hadamard_size(value_dim).bit_length() - 1,
            "num_warps": max(1, min(4, padded // 128)), "enable_fp_fusion": True,
        },
    )  # fmt: skip
    return attend, combine


def _full_arguments(plan: TritonPlan, layer: int) -> tuple[Any, ...]:
    """keys and values (first slot of this layer), elements of a slot and of a head."""
    _, position = plan.cache.place(layer)
    keys = plan.cache.slab.keys_view(plan.group)[:, position]
    values = (
        plan.cache.slab.values_view(plan.group)[:, position]
        if plan.cache.geometry.groups[plan.group].value_dim
        else keys
    )
    return keys, values, keys.stride(0), keys.stride(1)


def _cold_arguments(plan: TritonPlan, layer: int) -> tuple[Any, ...]:
    """The slab as int32; slots of an extent; words of an extent, of a slot, before this layer, and of a head."""
    cache, group = plan.cache, plan.cache.geometry.groups[plan.group]
    layout, number = cache.slab.layout, 2 * plan.group + 1
    words = cache.slab.bytes[: layout.total_bytes // 16 * 16].view(torch.int32)
    codec: Any = cache.cold_codec
    if codec is None:
        return words, 1, 0, 0, 0, 0
    _, position = cache.place(layer)
    shape = BlockShape(len(group.layers), group.kv_heads, cache.geometry.block_tokens, group.key_dim, group.value_dim)
    head_bytes = cache.geometry.block_tokens // RUN_TOKENS * record_layout(group.key_dim, group.value_dim).record_bytes
    first = position * group.kv_heads * head_bytes
    assert first == codec.head_offsets(shape)[position][0]
    return (
        words, layout.per_extent[number], layout.extent_bytes // 4, layout.slot_bytes[number] // 4, first // 4,
        head_bytes // 4,
    )  # fmt: skip


def _scoring(settings: AttentionSettings, window_tokens: int | None) -> tuple[float, float, int]:
    """Factor on products, softcap (0: none), window (0: none); scores come out in units of log2."""
    if settings.softcap is None:
        return settings.scaling * _LOG2_E, 0.0, window_tokens or 0
    return settings.scaling / settings.softcap, settings.softcap * _LOG2_E, window_tokens or 0


def _decode_constants(
    plan: TritonPlan, query: torch.Tensor, settings: AttentionSettings, tiles: Tiles
) -> dict[str, Any]:
    """What paged_decode is compiled for."""
    import triton.language as tl

    from engine_adapter.attention.triton_kernels.cold import Layout

    assert plan.decode is not None
    group = plan.cache.geometry.groups[plan.group]
    latent = group.value_dim == 0
    value_dim = settings.latent_value_dim if latent else group.value_dim
    assert value_dim is not None
    found = record_layout(group.key_dim, group.value_dim)
    layout = Layout(
        record=found.record_bytes // 4,
        value_codes=found.value_codes // 4,
        key_scales=found.key_scales // 4,
        key_zeros=found.key_zeros // 4,
        value_scales=found.value_scales // 4,
        bases=found.key_base // 4,
    )
    key_pieces = pieces(group.key_dim, 16, 128)
    return {
        "KV_HEADS": group.kv_heads,
        "GROUPS": query.shape[1] // group.kv_heads,
        "KEY_DIM": group.key_dim,
        "VALUE_DIM": value_dim,
        "LATENT": latent,
        "BLOCK_TOKENS": plan.cache.geometry.block_tokens,
        "SOFTCAP": settings.softcap is not None,
        "WINDOW": group.window_tokens is not None,
        "COLD": plan.decode.split.cold,
        "LAYOUT": layout,
        "ARITH": _arithmetic(tl, query.dtype),
        "COLD_ARITH": tl.float32 if query.dtype == torch.float32 else tl.float16,
        "KEY_PIECES": key_pieces,
        "VALUE_PIECES": key_pieces[: 1 if value_dim <= key_pieces[0][1] else 2]
        if latent
        else pieces(value_dim, 16, 128),
        "LINE_PIECES": pieces(group.key_dim // 8, 4, 16),
        "ROWS": tiles.rows,
        "TILE": tiles.tokens,
        "COLD_TILE": tiles.cold_tokens,
    }


def _arithmetic(tl: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.bfloat16:
        return tl.float32 if interpreted() else tl.bfloat16  # the interpreter's products of bfloat16 are wrong
    return tl.float16 if dtype == torch.float16 else tl.float32


@lru_cache(maxsize=16)
def _turn_back(value_dim: int, device: torch.device) -> torch.Tensor:
    """float32[value_dim]: what each channel is multiplied by after the butterflies."""
    return signs(value_dim, device) * unit(value_dim)
