"""Attention over mixed full and INT4 blocks in plain torch: the reference of every faster path, and their fallback.

Prefill pieces go one by one through scaled_dot_product_attention with a mask aligned to their context. Decode and
verify slices go in buckets: one gather of all their full blocks, one reading of each INT4 block however many sequences
share it (cold_blocks), then scores, one softmax over both kinds, and V summed.

A masked key must still be a finite number, since 0 * NaN is NaN: what nobody has written is cleared or cut off before
it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from allocator import UsageError
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.cold_blocks import ColdBlocks, ColdPick, read_cold_blocks
from engine_adapter.attention.products import scores_of, softmax_with_sinks
from engine_adapter.attention.step_plan import DecodeBucket, PrefillPiece, plan_group
from engine_adapter.batch import StepBatch
from engine_adapter.paged_cache import PagedCache, RowIndex

BUCKET_BYTES = 4 << 20
"""K and V that one bucket gathers per layer: small enough to stay in a core's caches until they are used."""


class _Tokens(NamedTuple):
    """This step's tensors in one layer: query [tokens, heads, key_dim], keys and values [tokens, kv_heads, dim]."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A prefill piece ready for any layer.

    mask: bool[row_count, key_count], None where causal order is enough. full: the rows of its blocks when all of them
    are full, else None.
    """

    piece: PrefillPiece
    mask: torch.Tensor | None
    full: RowIndex | None


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A decode bucket ready for any layer.

    mask: float32[sequences, queries, 1, keys], 0 or -inf; full blocks come first, then INT4 blocks.
    unwritten: (sequence, token) int64 places among the full blocks whose bytes nobody wrote.
    """

    rows: torch.Tensor
    shape: tuple[int, int]
    full: RowIndex
    full_blocks: int
    cold: ColdPick | None
    mask: torch.Tensor
    unwritten: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step for one cache group; cold_slots: int64[unique], None when no bucket reads INT4 blocks."""

    cache: PagedCache
    group: int
    pieces: tuple[_Piece, ...]
    buckets: tuple[_Bucket, ...]
    cold_slots: torch.Tensor | None


class TorchPagedAttention:
    """The torch AttentionBackend. Keeps nothing between steps."""

    name = "torch"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._bucket_bytes = bucket_bytes

    def plan(self, cache: PagedCache, group: int, batch: StepBatch) -> TorchPlan:
        """See AttentionBackend.plan."""
        found = cache.geometry.groups[group]
        block_tokens = cache.geometry.block_tokens
        block_bytes = block_tokens * found.kv_heads * (found.key_dim + found.value_dim) * cache.geometry.dtype_bytes
        planned = plan_group(batch, group, block_tokens, found.window_tokens, max(1, self._bucket_bytes // block_bytes))
        cold = cache.tensor(planned.cold_slots) if len(planned.cold_slots) else None
        return TorchPlan(
            cache=cache,
            group=group,
            pieces=tuple(_ready_piece(piece, cache, group) for piece in planned.pieces),
            buckets=tuple(
                _ready_bucket(bucket, cache, group, found.window_tokens, block_tokens) for bucket in planned.buckets
            ),
            cold_slots=cold,
        )

    def attend(
        self,
        plan: TorchPlan,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """See AttentionBackend.attend."""
        tokens = _Tokens(query, keys, values)
        value_dim = _value_dim(values, settings)
        out = query.new_empty((query.shape[0], query.shape[1], value_dim))
        for piece in plan.pieces:
            first = piece.piece.first_row
            out[first : first + piece.piece.row_count] = _attend_piece(plan, piece, layer, tokens, settings)
        cold: ColdBlocks | None = None
        if plan.cold_slots is not None:
            cold = read_cold_blocks(
                plan.cache, plan.group, layer, plan.cold_slots, query.dtype, settings.latent_value_dim
            )
        for bucket in plan.buckets:
            out[bucket.rows] = _attend_bucket(plan, bucket, layer, tokens, settings, cold)
        return out


def _value_dim(values: torch.Tensor | None, settings: AttentionSettings) -> int:
    if settings.latent_value_dim is not None:
        return settings.latent_value_dim
    if values is None:
        raise UsageError("a layer without V needs settings.latent_value_dim")
    return values.shape[-1]


# ---- planning


def _ready_piece(piece: PrefillPiece, cache: PagedCache, group: int) -> _Piece:
    window_tokens, device = cache.geometry.groups[group].window_tokens, cache.device
    full = None
    if piece.fresh_row is None and not (piece.entries & 1).any():
        full = cache.full_index(group, cache.tensor(piece.entries[None] >> 1))
    if window_tokens is None and piece.row_count == piece.key_count:
        return _Piece(piece, None, full)
    queries = torch.arange(piece.first_position, piece.first_position + piece.row_count, device=device)[:, None]
    keys = torch.arange(piece.key_start, piece.key_start + piece.key_count, device=device)[None, :]
    mask = keys <= queries
    if window_tokens is not None:
        mask &= keys > queries - window_tokens
    return _Piece(piece, mask, full)


def _ready_bucket(
    bucket: DecodeBucket, cache: PagedCache, group: int, window_tokens: int | None, block_tokens: int
) -> _Bucket:
    positions = cache.tensor(bucket.key_positions)[:, None, :]
    queries = cache.tensor(bucket.query_positions)[:, :, None]
    hidden = positions > queries
    if window_tokens is not None:
        hidden |= positions <= queries - window_tokens
    mask = torch.zeros(hidden.shape, dtype=torch.float32, device=cache.device).masked_fill_(hidden, float("-inf"))
    full_blocks = bucket.full_slots.shape[1]
    unwritten = None
    if len(bucket.unwritten):
        places = cache.tensor(bucket.unwritten)
        unwritten = (places // (full_blocks * block_tokens), places % (full_blocks * block_tokens))
    return _Bucket(
        rows=cache.tensor(bucket.rows),
        shape=(bucket.rows.shape[0], bucket.rows.shape[1]),
        full=cache.full_index(group, cache.tensor(bucket.full_slots)),
        full_blocks=full_blocks,
        cold=_ready_pick(bucket, cache),
        mask=mask[:, :, None, :],
        unwritten=unwritten,
    )


def _ready_pick(bucket: DecodeBucket, cache: PagedCache) -> ColdPick | None:
    if not bucket.cold_index.shape[1]:
        return None
    flat = bucket.cold_index.reshape(-1)
    first, end = int(flat[0]), int(flat[0]) + len(flat)
    in_order = bool((flat == np.arange(first, end)).all())
    return ColdPick(cache.tensor(bucket.cold_index), (first, end) if in_order else None)


# ---- prefill


def _attend_piece(
    plan: TorchPlan, ready: _Piece, layer: int, tokens: _Tokens, settings: AttentionSettings
) -> torch.Tensor:
    """Tensor[row_count, query_heads, value_dim]."""
    piece = ready.piece
    keys, values = _piece_keys(plan, ready, layer, tokens)
    if settings.latent_value_dim is not None:
        values = keys[..., : settings.latent_value_dim]
    kv_heads, count = keys.shape[0], piece.row_count
    query = tokens.query[piece.first_row : piece.first_row + count].transpose(0, 1)
    query = query.reshape(kv_heads, -1, count, query.shape[-1])  # [kv_heads, queries of a head, count, key_dim]
    if settings.softcap is None and settings.sinks is None and keys.shape[-1] == values.shape[-1]:
        groups = query.shape[1]
        # K and V are the same for all query heads of a KV head: expanded by stride, not copied.
        found = scaled_dot_product_attention(
            query,
            keys[:, None].expand(-1, groups, -1, -1),
            values[:, None].expand(-1, groups, -1, -1),
            attn_mask=ready.mask,
            is_causal=ready.mask is None,
            scale=settings.scaling,
        )
    else:
        found = _explicit_piece(query, keys, values, ready, settings)
    return found.flatten(0, 1).transpose(0, 1)


def _piece_keys(plan: TorchPlan, ready: _Piece, layer: int, tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """K Tensor[kv_heads, key_count, key_dim] and V that the piece sees, in query's dtype."""
    piece = ready.piece
    if piece.fresh_row is not None:
        span = slice(piece.fresh_row, piece.fresh_row + piece.key_count)
        keys = tokens.keys[span].transpose(0, 1)
        return keys, keys if tokens.values is None else tokens.values[span].transpose(0, 1)
    if ready.full is not None:
        all_keys, all_values = plan.cache.read_full(layer, ready.full, (1, len(piece.entries)))
        keys, values = all_keys[0], all_values[0]
    else:
        keys, values = plan.cache.gather(layer, piece.entries)
    # Cut, not masked: what lies beyond the last written token may be NaN.
    dtype = tokens.query.dtype
    return keys[:, : piece.key_count].to(dtype), values[:, : piece.key_count].to(dtype)


def _explicit_piece(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, ready: _Piece, settings: AttentionSettings
) -> torch.Tensor:
    """Scores written out, for what scaled_dot_product_attention has no word for: softcap, sinks, V of another dim."""
    kv_heads, groups, count, _ = query.shape
    scores = scores_of(query.flatten(1, 2), keys, settings.scaling).view(kv_heads, groups, count, -1)
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    mask = ready.mask
    if mask is None:
        mask = torch.ones((count, keys.shape[1]), dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, float("-inf"))
    sinks = None if settings.sinks is None else settings.sinks.float().view(kv_heads, groups, 1, 1)
    weights = softmax_with_sinks(scores, sinks).to(query.dtype).view(kv_heads, groups * count, -1)
    return torch.bmm(weights, values.to(weights.dtype)).view(kv_heads, groups, count, -1)


# ---- decode


def _attend_bucket(
    plan: TorchPlan,
    bucket: _Bucket,
    layer: int,
    tokens: _Tokens,
    settings: AttentionSettings,
    cold: ColdBlocks | None,
) -> torch.Tensor:
    """Tensor[sequences, queries, query_heads, value_dim]."""
    sequences, queries = bucket.shape
    heads, dtype = tokens.query.shape[1], tokens.query.dtype
    full_keys, full_values = _full_part(plan.cache, bucket, layer)
    kv_heads = full_keys.shape[1]
    groups = heads // kv_heads
    query = tokens.query[bucket.rows].view(sequences, queries, kv_heads, groups, -1)
    query = query.transpose(1, 2).reshape(sequences, kv_heads, queries * groups, -1)
    scores = scores_of(query.flatten(0, 1), full_keys.to(dtype).flatten(0, 1), settings.scaling)
    scores = scores.view(sequences, kv_heads, queries * groups, -1)
    if bucket.cold is not None and cold is not None:
        scores = torch.cat((scores, cold.scores(query, bucket.cold, settings.scaling)), -1)
    scores = scores.view(sequences, kv_heads, queries, groups, -1)
    if settings.softcap is not None:
        scores = torch.tanh(scores / settings.softcap) * settings.softcap
    scores += bucket.mask[:, None]
    sinks = None if settings.sinks is None else settings.sinks.float().view(1, kv_heads, 1, groups, 1)
    weights = softmax_with_sinks(scores, sinks).flatten(2, 3)
    values = full_keys[..., : settings.latent_value_dim] if settings.latent_value_dim is not None else full_values
    count = full_keys.shape[2]
    found = torch.matmul(weights[..., :count].to(dtype), values.to(dtype))
    if bucket.cold is not None and cold is not None:
        found = found.float().add_(cold.weigh(weights[..., count:], bucket.cold, dtype)).to(dtype)
    found = found.view(sequences, kv_heads, queries, groups, -1).transpose(1, 2)
    return found.reshape(sequences, queries, heads, -1)


def _full_part(cache: PagedCache, bucket: _Bucket, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Full blocks of a bucket, [sequences, kv_heads, tokens, dim] each, with all that nobody wrote cleared."""
    keys, values = cache.read_full(layer, bucket.full, (bucket.shape[0], bucket.full_blocks))
    if bucket.unwritten is not None:
        sequence, token = bucket.unwritten
        keys[sequence, :, token] = 0
        values[sequence, :, token] = 0
    return keys, values
