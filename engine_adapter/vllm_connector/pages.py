"""vLLM's own cache tensors as pages that can be gathered from, checked against its own writer at start.

Imports vLLM, as connector.py does. Called once, by the worker's side.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from allocator import CacheGroup, ConfigError, GroupKind, KVGeometry
from engine_adapter.vllm_connector.layout import GroupPages, LayerPages, PagesShape, blocks_per_page
from engine_adapter.vllm_connector.shards import shard_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from engine_adapter.vllm_connector.cuda_copier import CardPages

_SCALES = ("_k_scale_float", "_v_scale_float")
_LAYER = re.compile(r"\.(\d+)\.")


def pages_device(device_type: str) -> torch.device:
    """Where this worker's pages will lie."""
    return (
        torch.device(device_type, torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    )


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
    attention: Mapping[str, Any] | None = None,
) -> list[PagesShape]:
    """Where the layers of each cache group lie.

    kv_caches: per layer name Tensor[blocks, heads of this rank, engine block tokens, 2 * dim], of MLA [blocks, 1,
    engine block tokens, dim]; contiguous in host memory, any strides on a card; of FP8 caches uint8. model_dtype: of
    what vLLM writes into them. attention: vLLM's attention layers by name, which write there.
    """
    places: dict[int, tuple[int, str, int]] = {}
    for table, engine_group in enumerate(kv_cache_config.kv_cache_groups):
        for name in engine_group.layer_names:
            found = _LAYER.search(name)
            if found is not None and name in kv_caches:
                places[int(found[1])] = (table, name, engine_group.kv_cache_spec.block_size)
    groups: list[PagesShape] = []
    for group in geometry.groups:
        start, stop = shard_of(group.kv_heads, *rank).heads
        layers, ratio, name = [], 1, ""
        for layer in group.layers:
            if layer not in places:
                raise ConfigError(f"layer {layer} of {group.name!r} has no KV cache of its own in vLLM: not supported")
            table, name, engine_tokens = places[layer]
            ratio = blocks_per_page(engine_tokens, geometry.block_tokens)
            _check_tensor(geometry, group, kv_caches[name], (stop - start, engine_tokens))
            layers.append((kv_caches[name], table))
        is_latent = group.kind is GroupKind.LATENT
        shape = (stop - start, group.key_dim, geometry.block_tokens, ratio, geometry.dtype_bytes, is_latent)
        if layers[0][0].device.type == "cuda":
            writer, stored = (attention or {}).get(name), getattr(torch, geometry.dtype)
            groups.append(_card_pages(group, layers, shape, writer, model_dtype, stored))
            continue
        flat = tuple(LayerPages(one.view(torch.uint8).reshape(-1).numpy(), table) for one, table in layers)
        pages = GroupPages(flat, *shape)
        if not is_latent:
            check_layout(geometry, pages, model_dtype)
        groups.append(pages)
    return groups


def _card_pages(
    group: CacheGroup,
    layers: Sequence[tuple[torch.Tensor, int]],
    shape: tuple[int, int, int, int, int, bool],
    attention: Any,
    model_dtype: torch.dtype,
    dtype: torch.dtype,
) -> CardPages:
    from engine_adapter.vllm_connector.cuda_copier import CardLayer, CardPages, check_pages

    pages = CardPages(tuple(CardLayer(*one) for one in layers), *shape)
    check_pages(group.name, pages)
    if not pages.is_latent:
        check_writer(pages, attention, model_dtype, dtype)
    return pages


def check_writer(pages: CardPages, attention: Any, model_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """ConfigError where an attention layer does not write a token's K and then its V, as CardPages reads them.

    Every value tells its own place, a digit of base 4 a turn, which FP8 carries too. dtype: of what is stored.
    """
    like, heads, dim = pages.layers[0].tensor, pages.kv_heads, pages.dim
    tokens = like.shape[2]
    numbers = torch.arange(2 * tokens * heads * dim, device=like.device).reshape(2, tokens, heads, dim)
    scratch = torch.empty_strided((2, *like.shape[1:]), like.stride(), dtype=like.dtype, device=like.device).zero_()
    slots = torch.arange(tokens, 2 * tokens, device=like.device)
    writer: Any = getattr(getattr(attention, "impl", None), "do_kv_cache_update", None)
    scales = [getattr(attention, name, 1.0) if pages.item_bytes == 1 else 1.0 for name in _SCALES]
    is_read = writer is not None
    for digit in range(math.ceil(math.log(numbers.numel(), 4)) if writer is not None else 0):
        codes = numbers // 4**digit % 4 + 1
        keys, values = ((part * scale).to(model_dtype) for part, scale in zip(codes, scales, strict=True))
        writer(attention, keys, values, scratch, slots)
        found = scratch[1].view(dtype).unflatten(-1, (2, dim)).permute(2, 1, 0, 3)
        is_read = is_read and torch.equal(found.to(torch.float32), codes.to(torch.float32))
    if not is_read:
        raise ConfigError(
            f"attention backend {type(getattr(attention, 'impl', None)).__name__}: it does not keep K and V in "
            "the order that is supported; expected FLASH_ATTN or TRITON_ATTN (--attention-backend)"
        )


def _check_tensor(
    geometry: KVGeometry, group: CacheGroup, tensor: torch.Tensor, heads_and_tokens: tuple[int, int]
) -> None:
    expected = (*heads_and_tokens, group.key_dim + group.value_dim)
    dtype = torch.uint8 if geometry.dtype.startswith("float8") else getattr(torch, geometry.dtype)
    is_laid_out = tensor.is_contiguous() or (tensor.device.type == "cuda" and tensor.stride(-1) == 1)
    if not is_laid_out or tuple(tensor.shape[1:]) != expected or tensor.dtype != dtype:
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
