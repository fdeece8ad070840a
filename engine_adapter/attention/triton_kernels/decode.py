"""Triton: the two kernels that are launched. Decode attention item by item, then the items of a sequence joined.

`paged_decode` takes one work item (a run of blocks of one form of one sequence) for one KV head and a tile of query
rows: the query heads of that KV head times the tokens of the slice. It leaves an unnormalised sum, the largest score
and the weights' total, all in units of log2. `combine_splits` joins them per token and head, turns V of INT4 items
back from the codec's rotated space, adds sinks and divides. Launched by triton_paged.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# ruff: noqa: N803, PLR0913  (the language of kernels: constants in capitals, many arguments, tuples)

from __future__ import annotations

import triton
import triton.language as tl

from engine_adapter.attention.triton_kernels.cold import Records, attend_cold, attend_cold_latent
from engine_adapter.attention.triton_kernels.full import attend_full
from engine_adapter.attention.triton_kernels.parts import Blocks, Partial, Rows, Scoring


@triton.jit(do_not_specialize=["tiles", "window_tokens", "slots_per_extent"])
def paged_decode(
    query, token_stride, head_stride, channel_stride,
    keys, values, slot_stride, kv_head_stride,
    words, slots_per_extent, extent_words, slot_words, layer_words, head_words,
    entries, numbers, items, sequences, tiles,
    scaling, softcap, window_tokens, sums, peaks, totals,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    COLD: tl.constexpr, LAYOUT: tl.constexpr, ARITH: tl.constexpr, COLD_ARITH: tl.constexpr,
    KEY_PIECES: tl.constexpr, VALUE_PIECES: tl.constexpr, LINE_PIECES: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, COLD_TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (items * tiles, KV heads).

    query: [tokens, heads, KEY_DIM], strides given. keys, values: first channel of slot 0, head 0 in this layer; words:
    the slab as int32. entries, numbers, items, sequences: see split_plan.SplitPlan. sums: float32[partial rows,
    VALUE_DIM]; peaks, totals: float32[partial rows]. COLD: there are INT4 items.
    """
    tile = tl.program_id(0) % tiles
    item = items + tl.program_id(0) // tiles * 4
    head = tl.program_id(1)
    sequence = sequences + tl.load(item) * 5
    tokens = tl.load(sequence + 1).to(tl.int32)
    row_count = tokens * GROUPS
    if tile * ROWS >= row_count:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    start = tl.load(sequence + 2).to(tl.int32)
    step_row = tl.load(sequence) + row // GROUPS
    at = query + step_row * token_stride + (head * GROUPS + row % GROUPS) * head_stride
    rows = Rows(at, channel_stride, row < row_count, start + row // GROUPS)
    first = tl.load(item + 1)
    blocks = Blocks(entries + first, numbers + first, tl.load(item + 2).to(tl.int32))
    scoring = Scoring(scaling, softcap, window_tokens)
    partial = Partial(sums, peaks, totals, tl.load(item + 3) * (KV_HEADS * GROUPS) + head * row_count + row)
    if COLD and tl.load(entries + first) & 1 == 1:
        records = Records(words, slots_per_extent, extent_words, slot_words, layer_words + head * head_words)
        if LATENT:
            attend_cold_latent(
                rows, blocks, records, scoring, partial, KEY_DIM, VALUE_DIM, LINE_PIECES, LAYOUT, BLOCK_TOKENS,
                SOFTCAP, WINDOW, COLD_ARITH, ROWS, COLD_TILE,
            )  # fmt: skip
        else:
            attend_cold(
                rows, blocks, records, scoring, partial, KEY_DIM, VALUE_DIM, LINE_PIECES, VALUE_PIECES, LAYOUT,
                BLOCK_TOKENS, SOFTCAP, WINDOW, COLD_ARITH, ROWS, COLD_TILE,
            )  # fmt: skip
    else:
        attend_full(
            rows, blocks, start + tokens, keys + head * kv_head_stride, values + head * kv_head_stride, slot_stride,
            scoring, partial, KEY_DIM, VALUE_DIM, KEY_PIECES, VALUE_PIECES, LATENT, BLOCK_TOKENS, SOFTCAP, WINDOW,
            ARITH, ROWS, TILE,
        )  # fmt: skip


@triton.jit
def _butterflies(row, DIM: tl.constexpr, STEP: tl.constexpr):
    """(a + b, a - b) for all pairs of channels STEP apart, of float32 [DIM]."""
    pairs = tl.permute(tl.reshape(row, (DIM // (2 * STEP), 2, STEP)), (0, 2, 1))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 2, 1)), (DIM,))


@triton.jit
def combine_splits(
    sums, peaks, totals, entries, items, sequences, tokens, sinks, turn, out, out_token_stride, out_head_stride,
    KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, VALUE_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    SINKS: tl.constexpr, ROTATED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, query heads). sinks: float32[heads]; turn: float32[VALUE_DIM], sign * 1 / sqrt(2 ** STAGES).

    ROTATED: INT4 items are in rotated space. out: [rows of the step, heads, VALUE_DIM], channels contiguous.
    """
    token = tokens + tl.program_id(0) * 2
    head = tl.program_id(1)
    sequence = sequences + tl.load(token) * 5
    number = tl.load(token + 1)
    row_count = tl.load(sequence + 1) * GROUPS
    first_item = tl.load(sequence + 3)
    channel = tl.arange(0, PADDED_DIM)
    mask = channel < VALUE_DIM
    # -1e30, not -inf: the difference of two infinities is NaN. A row that an item hides has peak -inf and total 0.
    peak = tl.full([], -1e30, tl.float32)
    total = tl.zeros([], tl.float32)
    plain = tl.zeros([PADDED_DIM], tl.float32)
    turned = tl.zeros([PADDED_DIM], tl.float32)
    if SINKS:
        peak = tl.maximum(peak, tl.load(sinks + head) * 1.4426950408889634)
        total += 1.0
    for item in range(0, tl.load(sequence + 4).to(tl.int32)):
        at = items + (first_item + item) * 4
        row = tl.load(at + 3) * (KV_HEADS * GROUPS) + head // GROUPS * row_count + number * GROUPS + head % GROUPS
        found = tl.load(peaks + row)
        new = tl.maximum(peak, found)
        decay = tl.exp2(peak - new)
        weight = tl.exp2(found - new)
        total = total * decay + tl.load(totals + row) * weight
        summed = tl.load(sums + row * VALUE_DIM + channel, mask=mask, other=0.0) * weight
        cold = 0.0
        if ROTATED:
            cold = (tl.load(entries + tl.load(at + 1)) & 1).to(tl.float32)
            turned = turned * decay + summed * cold
        plain = plain * decay + summed * (1.0 - cold)
        peak = new
    if ROTATED:
        turn_back = tl.load(turn + channel, mask=mask, other=0.0)
        for stage in tl.static_range(STAGES):
            turned = _butterflies(turned, PADDED_DIM, 1 << stage)
        plain += turned * turn_back
    step_row = tl.load(sequence) + number
    at_out = out + step_row * out_token_stride + head * out_head_stride + channel
    tl.store(at_out, (plain / total).to(out.dtype.element_ty), mask=mask)
