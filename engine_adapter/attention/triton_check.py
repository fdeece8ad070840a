"""A small case of decode attention that a device must get right before the triton backend is used on it.

One sequence with full and INT4 blocks and an open tail, in float16; the reference is the torch backend in float32, on
the same slab.
Called once per process by triton_paged.status.
"""

from __future__ import annotations

import numpy as np
import torch

from allocator import COLD, ExtentLayout, KVGeometry, Slab
from engine_adapter.attention import AttentionBackend, AttentionSettings
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.attention.triton_paged import TritonPagedAttention
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.paged_cache import PagedCache
from quant import Int4Codec

_BLOCKS, _KV_HEADS, _GROUPS, _DIM, _TOKENS = 8, 2, 3, 64, 16


def device_error(device: str = "cuda") -> float:
    """Relative error of the triton backend against torch."""
    cache, part = _case(device)
    draw = torch.Generator().manual_seed(1)
    query = torch.randn((part.token_count, _KV_HEADS * _GROUPS, _DIM), generator=draw).to(device, torch.float16)
    backend = TritonPagedAttention(programs=16, item_tokens_min=32)
    found = _attend(backend, backend.plan_covered(cache, 0, StepBatch((part,))), query)
    reference = TorchPagedAttention()
    expected = _attend(reference, reference.plan(cache, 0, StepBatch((part,))), query.float())
    return float((found - expected).norm() / expected.norm())


def _attend(backend: AttentionBackend, plan: object, query: torch.Tensor) -> torch.Tensor:
    """float64[tokens, heads, dim]. Decode slices are read from the slab, so the step's own KV need not be given."""
    unused = query.new_zeros((query.shape[0], _KV_HEADS, _DIM))
    return backend.attend(plan, 0, query, unused, unused, AttentionSettings(_DIM**-0.5)).double()


def _case(device: str) -> tuple[PagedCache, SequenceSlice]:
    """The first block and the last two full, the rest INT4; five tokens of the last are not written, and are NaN."""
    geometry = KVGeometry.uniform(layers=1, kv_heads=_KV_HEADS, head_dim=_DIM, dtype="float16", block_tokens=_TOKENS)
    codec, full_bytes = Int4Codec(), geometry.full_slot_bytes(0)
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn((1, _KV_HEADS, _BLOCKS * _TOKENS, _DIM), generator=draw)
    values = torch.randn(keys.shape, generator=draw)
    payloads = [
        codec.encode(keys[:, :, at : at + _TOKENS].contiguous(), values[:, :, at : at + _TOKENS].contiguous())
        for at in range(0, keys.shape[2], _TOKENS)
    ]
    # Two extents: full slots in the first, INT4 slots in the second.
    extent_bytes = _BLOCKS * full_bytes
    slab = Slab(ExtentLayout(2 * extent_bytes, (full_bytes,), (len(payloads[0]),), extent_bytes), geometry, device)
    slab.bytes.fill_(0xFF)
    cache = PagedCache(slab, geometry, codec)
    table = np.arange(_BLOCKS, dtype=np.int64) << 1
    first_cold = slab.layout.per_extent[COLD]
    for block in range(1, _BLOCKS - 2):
        table[block] = (first_cold + block) << 1 | 1
        payload = torch.frombuffer(bytearray(payloads[block]), dtype=torch.uint8)
        slab.slot_bytes_view(COLD, first_cold + block)[: len(payload)] = payload.to(device)
    written = np.array([token for token in range(_BLOCKS * _TOKENS - 5) if not table[token // _TOKENS] & 1])
    mapping = (table[written // _TOKENS] >> 1) * _TOKENS + written % _TOKENS
    cache.write(
        0, mapping, keys[0, :, written].transpose(0, 1).to(device), values[0, :, written].transpose(0, 1).to(device)
    )
    part = SequenceSlice("check", (0, 0), int(written[-1]) - 1, 0, (table,), (mapping[-2:],))
    return cache, part
