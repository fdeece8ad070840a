"""What the SGLang tests share: its real host pools with known bytes, and storages made by its own factory.

What a page holds is read through the pool's `get_data_page`, which has nothing to do with the pointers that the storage
is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str

PAGE, PAGES, LAYERS = 4, 12, 2
MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = MHA_LAYOUTS[:3]
CPU = torch.device("cpu")


def mha_pool(
    layout: str = "layer_first", heads: int = 2, dtype: torch.dtype = torch.bfloat16, **given: Any
) -> MHATokenToKVPoolHost:
    """SGLang's host pool of K and V; its values are zeros until `fill`."""
    layers, dim, page, pages = given.get("layers", LAYERS), given.get("dim", 8), given.get("page", PAGE), PAGES
    first = given.get("first_layer", 0)
    device = tuple(torch.zeros(page * pages, heads, dim, dtype=dtype) for _ in range(layers))
    pointers = torch.tensor([one.data_ptr() for one in device], dtype=torch.uint64)
    buffers = KVBuffers(k=device, v=device, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD)
    info = MHABufferInfo(
        buffers=buffers, page_size=page, head_num=heads, head_dim=dim, v_head_dim=dim, dtype=dtype, device=CPU
    )
    with host_memory_budget_scope(1 << 32):
        return MHATokenToKVPoolHost(
            info,
            1.0,
            0,
            page,
            layout,
            pin_memory=False,
            device_capacity_tokens=given.get("tokens", page * pages),
            start_layer=first,
            end_layer=first + layers,
        )


def mla_pool(layout: str = "layer_first", dtype: torch.dtype = torch.bfloat16) -> MLATokenToKVPoolHost:
    """SGLang's host pool of latents: 16 and 8 rope values a token and layer."""
    device = tuple(torch.zeros(PAGE * PAGES, 1, 24, dtype=dtype) for _ in range(LAYERS))
    info = MLABufferInfo(
        buffers=device,
        data_ptrs=torch.tensor([one.data_ptr() for one in device], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        kv_cache_dim=24,
        dtype=dtype,
        device=CPU,
    )
    with host_memory_budget_scope(1 << 32):
        return MLATokenToKVPoolHost(
            info,
            1.0,
            0,
            PAGE,
            layout,
            pin_memory=False,
            device_capacity_tokens=PAGE * PAGES,
            start_layer=0,
            end_layer=LAYERS,
            target_layer_num=LAYERS,
        )


def fill(pool: Any, seed: int = 1) -> Any:
    """Other bytes at every place, and in every pool of another seed."""
    bytes_ = pool.kv_buffer.view(torch.uint8)
    bytes_.copy_(torch.randint(0, 256, bytes_.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return pool


def pages_of(pool: Any, pages: Sequence[int]) -> list[torch.Tensor]:
    """Copies of pages as SGLang itself reads them, uint8."""
    return [pool.get_data_page(page * pool.page_size).view(torch.uint8).clone() for page in pages]


def indices(pages: Sequence[int], page: int = PAGE) -> torch.Tensor:
    return torch.tensor([at for one in pages for at in range(one * page, (one + 1) * page)], dtype=torch.int64)


def chain(count: int, first_token: int = 0) -> list[str]:
    """Names of a prompt's pages, by SGLang's own hash."""
    return list(get_hash_str(list(range(first_token, first_token + count * PAGE)), None, PAGE))


def config(extra: dict[str, Any], **given: Any) -> HiCacheStorageConfig:
    known: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": False,
        "model_name": "tiny",
    }
    named = {
        "backend_name": "kvstore",
        "module_path": "engine_adapter.sglang_storage",
        "class_name": "KVStoreHiCache",
        "interface_v1": 1,
        "weights": "sha256:1",
    }
    return HiCacheStorageConfig(**{**known, **given, "extra_config": {**named, **extra}})


@contextmanager
def storage(pool: Any, extra: dict[str, Any], **given: Any) -> Iterator[Any]:
    """As SGLang's controller makes it: factory, host pool, other pools (v2), then work. pools: name -> pool."""
    pools = given.pop("pools", {})
    made = StorageBackendFactory.create_backend("dynamic", config(extra, **given), pool)
    try:
        made.register_mem_pool_host(pool)
        for name, one in pools.items():
            made.register_mem_host_pool_v2(one, name)
        made.on_host_pools_registered()
        yield made
    finally:
        made.close()


def flip_bytes(directory: Path) -> None:
    """Turn one bit in every 50 bytes of every copy on disk, small (in the index) and large ones."""
    for file in directory.rglob("*"):
        if file.is_file() and file.name.startswith("slots-"):
            raw = bytearray(file.read_bytes())
            for at in range(300, len(raw), 50):
                raw[at] ^= 0x40
            file.write_bytes(raw)
