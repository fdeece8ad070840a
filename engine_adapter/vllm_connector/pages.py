"""vLLM's own cache tensors as pages that can be gathered from, checked against its own writer at start.

Imports vLLM, as connector.py does. Called once, by the worker's side.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from allocator import CacheGroup, ConfigError, GroupKind, KVGeometry
from engine_adapter.vllm_connector.layout import GroupPages, LayerPages, blocks_per_page
from engine_adapter.vllm_connector.shards import shard_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LAYER = re.compile(r"\.(\d+)\.")


def scales_name(layers: Mapping[str, Any]) -> str:
    """Names the scales of an FP8 cache, layer by layer."""
    found = {name: (float(one._k_scale_float), float(one._v_scale_float)) for name, one in layers.items()}
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


def group_pages(
    geometry: KVGeometry,
    kv_cache_config: KVCacheConfig,
    kv_caches: Mapping[str, torch.Tensor],
    model_dtype: torch.dtype,
    rank: tuple[int, int] = (0, 1),
) -> list[GroupPages]:
    """Where the layers of each cache group lie.

    kv_caches: per layer name Tensor[blocks, heads of this rank, engine block tokens, 2 * dim], of MLA [blocks, 1,
    engine block tokens, dim], contiguous; of FP8 caches uint8. model_dtype: of what vLLM writes into them.
    """
    places: dict[int, tuple[int, torch.Tensor, int]] = {}
    for table, engine_group in enumerate(kv_cache_config.kv_cache_groups):
        for name in engine_group.layer_names:
            found = _LAYER.search(name)
            if found is not None and name in kv_caches:
                places[int(found[1])] = (table, kv_caches[name], engine_group.kv_cache_spec.block_size)
    groups = []
    for group in geometry.groups:
        start, stop = shard_of(group.kv_heads, *rank).heads
        layers, ratio = [], 1
        for layer in group.layers:
            if layer not in places:
                raise ConfigError(f"layer {layer} of {group.name!r} has no KV cache of its own in vLLM: not supported")
            table, tensor, engine_tokens = places[layer]
            ratio = blocks_per_page(engine_tokens, geometry.block_tokens)
            _check_tensor(geometry, group, tensor, (stop - start, engine_tokens))
            layers.append(LayerPages(tensor.view(torch.uint8).reshape(-1).numpy(), table))
        is_latent = group.kind is GroupKind.LATENT
        shape = (stop - start, group.key_dim, geometry.block_tokens, ratio, geometry.dtype_bytes, is_latent)
        pages = GroupPages(tuple(layers), *shape)
        if not is_latent:
            check_layout(geometry, pages, model_dtype)
        groups.append(pages)
    return groups


def _check_tensor(
    geometry: KVGeometry, group: CacheGroup, tensor: torch.Tensor, heads_and_tokens: tuple[int, int]
) -> None:
    expected = (*heads_and_tokens, group.key_dim + group.value_dim)
    dtype = torch.uint8 if geometry.dtype.startswith("float8") else getattr(torch, geometry.dtype)
    if not tensor.is_contiguous() or tuple(tensor.shape[1:]) != expected or tensor.dtype != dtype:
        raise ConfigError(
            f"{group.name!r}: vLLM's cache of a layer is {tensor.dtype}, of shape {tuple(tensor.shape)}, strides "
            f"{tensor.stride()}; expected {dtype}, contiguous blocks of {expected}"
        )


def check_layout(geometry: KVGeometry, group: GroupPages, model_dtype: torch.dtype) -> None:
    """ConfigError where vLLM's own writer does not lay K and V out as layout.py reads them: it depends on the CPU."""
    heads, dim, ratio = group.kv_heads, group.dim, group.blocks_per_page
    tokens, dtype = group.block_tokens * ratio, getattr(torch, geometry.dtype)
    is_fp8 = group.item_bytes == 1
    codes = torch.arange(2 * tokens * heads * dim).reshape(2, tokens, heads, dim).remainder(113 if is_fp8 else 251)
    values = codes.to(torch.uint8).view(dtype) if is_fp8 else codes.to(dtype)
    written = values.to(model_dtype)
    cache = torch.zeros(2, heads, 2 * tokens, dim, dtype=torch.uint8 if is_fp8 else dtype)
    kind = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}.get(geometry.dtype, "auto")
    isa = _get_attn_isa(model_dtype, tokens, dim, kind)
    slots = torch.arange(tokens, 2 * tokens)
    halves = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        written[0].contiguous(), written[1].contiguous(), *halves, slots, isa, kv_cache_dtype=kind
    )
    flat = LayerPages(cache.view(torch.uint8).reshape(-1).numpy(), 0)
    pages = GroupPages((flat,), heads, dim, group.block_tokens, ratio, group.item_bytes)
    row = torch.zeros(ratio * pages.block_bytes, dtype=torch.uint8)
    pages.gather([([[1]], position) for position in range(ratio)], row.numpy())
    found = row.view(dtype).reshape(ratio, heads, 2, group.block_tokens, dim).permute(2, 0, 3, 1, 4)
    if not torch.equal(found.reshape(2, tokens, heads, dim).to(model_dtype), written):
        raise ConfigError(
            f"dtype: vLLM packs {geometry.dtype} keys for this CPU ({isa!r}) in a way that is not supported; expected "
            "--dtype float32"
        )
