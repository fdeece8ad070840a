"""Triton: decode attention over an item of full precision blocks, float32, bfloat16 or float16, read in place.

What nobody wrote is not loaded: a mask on the weights does not help, since 0 * NaN is NaN. Called by decode.py.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# ruff: noqa: N803, PLR0913, RUF005, SIM300  (the language of kernels: constants in capitals, many arguments, tuples)

from __future__ import annotations

import triton
import triton.language as tl

from engine_adapter.attention.triton_kernels.parts import load_query, store_partial, store_sums, weigh


@triton.jit
def _add_weighted(summed, decay, weights, values, ARITH: tl.constexpr):
    """summed * decay + weights @ values. bfloat16 weights go in two parts, so that they lose nothing that counts."""
    first = weights.to(ARITH)
    summed = tl.dot(first, values, summed * decay[:, None], input_precision="tf32x3")
    if ARITH == tl.bfloat16:
        summed = tl.dot((weights - first.to(tl.float32)).to(ARITH), values, summed, input_precision="tf32x3")
    return summed


@triton.jit
def attend_full(
    rows, blocks, end, keys, values, slot_stride, scoring, partial,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PIECES: tl.constexpr, VALUE_PIECES: tl.constexpr,
    LATENT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    ARITH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """An item of full blocks; keys and values point to the head's in slot 0. Tokens from `end` on are not loaded."""
    query = ()
    sums = ()
    for i in tl.static_range(len(KEY_PIECES)):
        query = query + (load_query(rows, KEY_PIECES[i][0], KEY_PIECES[i][1], KEY_DIM).to(ARITH),)
    for i in tl.static_range(len(VALUE_PIECES)):
        sums = sums + (tl.zeros([ROWS, VALUE_PIECES[i][1]], tl.float32),)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for begin in range(0, blocks.count * BLOCK_TOKENS, TILE):
        key = begin + tl.arange(0, TILE)
        there = key < blocks.count * BLOCK_TOKENS
        token = key % BLOCK_TOKENS
        entry = tl.load(blocks.entries + key // BLOCK_TOKENS, mask=there, other=0)
        number = tl.load(blocks.numbers + key // BLOCK_TOKENS, mask=there, other=0).to(tl.int32)
        key_position = number * BLOCK_TOKENS + token
        there = there & (key_position < end)
        slot = (entry >> 1) * slot_stride
        key_at = keys + slot + token * KEY_DIM
        found = ()
        scores = tl.zeros([ROWS, TILE], tl.float32)
        for i in tl.static_range(len(KEY_PIECES)):
            channel = KEY_PIECES[i][0] + tl.arange(0, KEY_PIECES[i][1])
            mask = there[None, :] & (channel < KEY_DIM)[:, None]
            piece = tl.load(key_at[None, :] + channel[:, None], mask=mask, other=0.0).to(ARITH)
            scores = tl.dot(query[i], piece, scores, input_precision="tf32x3")
            found = found + (piece,)
        weights, decay, peak, total = weigh(
            scores, scoring, peak, total, rows.position, key_position, there, SOFTCAP, WINDOW
        )
        new = ()
        for i in tl.static_range(len(VALUE_PIECES)):
            if LATENT:
                piece = tl.trans(found[i])
            else:
                channel = VALUE_PIECES[i][0] + tl.arange(0, VALUE_PIECES[i][1])
                mask = there[:, None] & (channel < VALUE_DIM)[None, :]
                value_at = values + slot + token * VALUE_DIM
                piece = tl.load(value_at[:, None] + channel[None, :], mask=mask, other=0.0).to(ARITH)
            new = new + (_add_weighted(sums[i], decay, weights, piece, ARITH),)
        sums = new
    store_partial(partial, rows.live, peak, total)
    for i in tl.static_range(len(VALUE_PIECES)):
        store_sums(partial, rows.live, sums[i], VALUE_PIECES[i][0], VALUE_PIECES[i][1], VALUE_DIM, VALUE_DIM)
