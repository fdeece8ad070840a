"""What each way to need less KV changes, always against a base that is named. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from allocator import GroupKind
from kvstore.planning.builtin_shapes import find_shape
from kvstore.planning.capacity import Capacity, Demand
from kvstore.planning.model_config import ModelShape
from kvstore.planning.record_sizes import cold_block_bytes

_USUAL_MLA_BASE = "deepseek-67b"


@dataclass(frozen=True, slots=True)
class Effect:
    """`amount` instead of `base_amount`, both in `unit`; `base` says against what."""

    what: str
    base: str
    unit: str
    base_amount: float
    amount: float

    @property
    def times_less(self) -> float:
        return self.base_amount / self.amount

    @property
    def fewer_percent(self) -> float:
        return 100.0 * (1 - self.amount / self.base_amount)


def effects(shape: ModelShape, demand: Demand) -> list[Effect]:
    """Those that apply to the model and the demand."""
    return [*_heads(shape), *_window(shape, demand), *_cold(shape, demand), _sharing(shape, demand)]


def _elements(shape: ModelShape) -> int:
    return sum(group.token_elements for group in shape.groups)


def _heads(shape: ModelShape) -> list[Effect]:
    group = shape.groups[0]
    if group.kind is GroupKind.LATENT:
        return _latent(shape)
    if group.kv_heads == shape.query_heads:
        return []
    full = shape.layers * shape.query_heads * (group.key_dim + group.value_dim)
    name = "MQA" if group.kv_heads == 1 else "GQA"
    base = f"MHA: {shape.query_heads} heads x ({group.key_dim} + {group.value_dim})"
    return [Effect(f"{name}, {group.kv_heads} KV heads", base, "values a token", full, _elements(shape))]


def _latent(shape: ModelShape) -> list[Effect]:
    dim = shape.value_dim  # K without its rope part, as published comparisons count
    latent, width = _elements(shape), shape.groups[0].key_dim
    other = _elements(find_shape(_USUAL_MLA_BASE))
    what = f"MLA, a latent of {width}"
    return [
        Effect(
            what, f"MHA: {shape.query_heads} heads x ({dim} + {dim})", "values a token",
            shape.layers * shape.query_heads * 2 * dim, latent,
        ),
        Effect(what, "DeepSeek-67B's GQA: 95 layers, 8 heads x (128 + 128)", "values a token", other, latent),
        Effect(
            f"{what}, in 6 bits", "DeepSeek-67B's GQA in 16 bits (the figure usually quoted)", "bits a token",
            other * 16, latent * 6,
        ),
    ]  # fmt: skip


def _window(shape: ModelShape, demand: Demand) -> list[Effect]:
    windows = [group.window_tokens for group in shape.groups if group.window_tokens is not None]
    if not windows:
        return []
    raw = Capacity(shape, demand, "raw")
    unlimited = raw.geometry.token_bytes * -(-demand.context_tokens // demand.block_tokens) * demand.block_tokens
    layers = sum(len(group.layers) for group in shape.groups if group.window_tokens is not None)
    what = f"sliding window, {max(windows):,} tokens on {layers} of {shape.layers} layers"
    base = f"all layers keep {demand.context_tokens:,} tokens"
    return [Effect(what, base, "bytes a request", unlimited, raw.request_bytes)]


def _cold(shape: ModelShape, demand: Demand) -> list[Effect]:
    geometry = shape.geometry(demand.block_tokens, demand.dtype)
    if demand.block_tokens % 16 or geometry.dtype_bytes < 2:
        return []
    full = sum(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    cold = sum(cold_block_bytes(geometry, "int4"))
    bits = 8.0 * cold / (geometry.block_tokens * _elements(shape))
    return [
        Effect(
            f"INT4, a cold block ({bits:.2f} bits a value, scales counted)", f"the block in {demand.dtype}",
            "bytes a block", full, cold,
        ),
        Effect(
            f"INT4, a request (first block and newest {demand.residual_tokens} tokens full)",
            f"the request in {demand.dtype}", "bytes a request",
            Capacity(shape, demand, "raw").request_bytes, Capacity(shape, demand, "int4").request_bytes,
        ),
    ]  # fmt: skip


def _sharing(shape: ModelShape, demand: Demand) -> Effect:
    """With the prefix that was given; without one, what half a context in common would change."""
    shared, requests = demand.shared_tokens, max(2, demand.concurrency)
    what = f"prefix sharing, {shared:,} tokens"
    if not shared:
        shared = demand.context_tokens // 2
        what = f"prefix sharing, were half of every context common ({shared:,} tokens)"
    raw = Capacity(shape, demand, "raw")
    base = f"{requests} requests, each with its own copy"
    return Effect(what, base, "bytes", raw.total_bytes(requests, 0), raw.total_bytes(requests, shared))
