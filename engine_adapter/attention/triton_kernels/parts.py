"""What the Triton kernels share: the groups of values they hand each other, the online softmax, loads and stores.

Device functions have no types of Python's: an argument is a pointer, a number or a block of numbers, as its docstring
says. Nothing runs at import.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# ruff: noqa: N803  (the language of kernels: constants in capitals, many arguments, tuples)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """Query rows of a tile: pointers to their first channel, stride of a channel, which are real, their positions."""

    at: Any
    stride: Any
    live: Any
    position: Any


class Blocks(NamedTuple):
    """An item's blocks: pointers to its table entries and block numbers, how many."""

    entries: Any
    numbers: Any
    count: Any


class Scoring(NamedTuple):
    """scaling: from dot product to log2 units, or to units of softcap where there is one (softcap > 0)."""

    scaling: Any
    softcap: Any
    window_tokens: Any


class Partial(NamedTuple):
    """Where an item leaves its results: float32 sums [rows, value_dim], peaks [rows], totals [rows]; row numbers."""

    sums: Any
    peaks: Any
    totals: Any
    rows: Any


@triton.jit
def load_query(rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr):
    """[rows, WIDTH], channels FIRST.. of the query, zero from END on."""
    channel = FIRST + tl.arange(0, WIDTH)
    mask = rows.live[:, None] & (channel < END)[None, :]
    return tl.load(rows.at[:, None] + (channel * rows.stride)[None, :], mask=mask, other=0.0)


@triton.jit
def weigh(scores, scoring, peak, total, position, key_position, there, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr):
    """One step of the online softmax: weights [rows, tokens], decay of what was summed before, new peak and total."""
    scores = scores * scoring.scaling
    if SOFTCAP:
        scores = scoring.softcap * (2.0 * tl.sigmoid(2.0 * scores) - 1.0)
    seen = there[None, :] & (key_position[None, :] <= position[:, None])
    if WINDOW:
        seen = seen & (key_position[None, :] > position[:, None] - scoring.window_tokens)
    scores = tl.where(seen, scores, float("-inf"))
    found = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(found == float("-inf"), 0.0, found)  # a row that has seen nothing yet: -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    return weights, decay, found, total * decay + tl.sum(weights, 1)


@triton.jit
def store_partial(partial, live, peak, total):
    tl.store(partial.peaks + partial.rows, peak, mask=live)
    tl.store(partial.totals + partial.rows, total, mask=live)


@triton.jit
def store_sums(
    partial, live, summed, FIRST: tl.constexpr, WIDTH: tl.constexpr, END: tl.constexpr, VALUE_DIM: tl.constexpr
):
    """summed [rows, WIDTH] are the channels FIRST.. of rows of VALUE_DIM; those from END on are padding."""
    channel = FIRST + tl.arange(0, WIDTH)
    mask = live[:, None] & (channel < END)[None, :]
    tl.store(partial.sums + (partial.rows * VALUE_DIM)[:, None] + channel[None, :], summed, mask=mask)
