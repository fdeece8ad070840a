"""Decode attention of others over the same scene, where installed: torch SDPA, FlashInfer, vLLM's kernels.

Each function returns a run, or raises what the library raises: the suite then says that the rival is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.card.clock import Timed
from benchmarks.card.scene import BLOCK_TOKENS, Scene


def sdpa(scene: Scene) -> Timed:
    """scaled_dot_product_attention on contiguous K and V, query heads of a KV head as rows: nothing is expanded."""
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = scene.contiguous()
    query = scene.query.view(scene.batch, scene.shape.kv_heads, -1, scene.shape.dim)
    return lambda: scaled_dot_product_attention(query, keys, values)


def sdpa_gqa(scene: Scene) -> Timed:
    """The same with enable_gqa, which some back ends do better."""
    from torch.nn.functional import scaled_dot_product_attention

    keys, values = scene.contiguous()
    query = scene.query[:, :, None]
    return lambda: scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def flashinfer(scene: Scene) -> Timed:
    """FlashInfer's batch decode over pages of 16 tokens."""
    import flashinfer as library

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=scene.device)
    wrapper = library.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    count, device = scene.per_sequence, scene.device
    starts = torch.arange(0, scene.batch * count + 1, count, dtype=torch.int32, device=device)
    last = torch.full((scene.batch,), BLOCK_TOKENS, dtype=torch.int32, device=device)
    indices = torch.randperm(scene.batch * count, device=device).to(torch.int32)
    wrapper.plan(
        starts,
        indices,
        last,
        scene.shape.query_heads,
        scene.shape.kv_heads,
        scene.shape.dim,
        BLOCK_TOKENS,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    pages = scene.pages()
    return lambda: wrapper.run(scene.query, pages)


def vllm(scene: Scene) -> Timed:
    """vLLM's build of FlashAttention over its block tables."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    keys, values = scene.pages()
    count, device = scene.per_sequence, scene.device
    table = torch.randperm(scene.batch * count, device=device).to(torch.int32).view(scene.batch, count)
    starts = torch.arange(scene.batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((scene.batch,), scene.context, dtype=torch.int32, device=device)
    return lambda: flash_attn_varlen_func(
        scene.query,
        keys,
        values,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=scene.context,
        seqused_k=lengths,
        block_table=table,
        causal=True,
    )


RIVALS: dict[str, Callable[[Scene], Timed]] = {
    "sdpa": sdpa,
    "sdpa_gqa": sdpa_gqa,
    "flashinfer": flashinfer,
    "vllm": vllm,
}
