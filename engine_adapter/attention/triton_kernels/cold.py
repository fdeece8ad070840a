"""Triton: decode attention over an item of INT4 blocks, read as they lie (docs/formats/int4.md).

`(code - zero) * e4m3` is exact or nearly so in float16 (at most 8 + 4 significant bits, below 65504), so K enters the
product as that, and the record's base S multiplies a column of scores. V enters as bare codes; its scales go into the
weights, its zero points into one number a row, and the sums stay in the codec's rotated space. The query is brought to
[1, 2) by a power of two a row, which is exact and keeps it inside float16. All INT4 blocks are written to the end;
past the item's end its last record stands in, so whatever a mask hides is finite.

Offsets inside the slab and a record are in words of 32 bits. K's pieces count *lines* of 64 bytes: four channels of
the lower half of the dim and four of the upper. Called by decode.py.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,assignment"
# ruff: noqa: N803, N806, PLR0913, RUF005  (the language of kernels: constants in capitals, many arguments, tuples)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from engine_adapter.attention.triton_kernels.parts import load_query, store_partial, store_sums, weigh


class Records(NamedTuple):
    """Where a head's records lie: the slab as int32, slots of an extent, words of an extent and of a slot, and the
    head's first word inside a slot.
    """

    words: Any
    slots_per_extent: Any
    extent_words: Any
    slot_words: Any
    head_words: Any


class Layout(NamedTuple):
    """Words of a record and where its parts begin, in words: a constant of the compiled kernel."""

    record: int
    value_codes: int
    key_scales: int
    key_zeros: int
    value_scales: int
    bases: int


@triton.jit
def _octets(words):
    """int32 [W, X] -> int32 [4 W, X]: the bytes of each word, lowest first, one on top of the other."""
    even = tl.join(words & 255, (words >> 16) & 255)
    odd = tl.join((words >> 8) & 255, (words >> 24) & 255)
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (4 * words.shape[0], words.shape[1]))


@triton.jit
def _small(octets, ARITH: tl.constexpr):
    """Integers 0..255 as floats: 0x6400 | n is the float16 1024 + n, cheaper than a conversion."""
    return ((octets.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0).to(ARITH)


@triton.jit
def _e4m3(octets, ARITH: tl.constexpr):
    """Value of e4m3 bytes without sign: byte << 7 read as float16 is the value times 2^-8, subnormals too."""
    return ((octets.to(tl.int16) << 7).to(tl.float16, bitcast=True) * 256.0).to(ARITH)


@triton.jit
def _power_of_two_below(largest):
    """float32 > 0 -> the power of two in (largest / 2, largest]; of tiny numbers and 0, 2^-100."""
    bits = tl.maximum(largest, 7.888609052210118e-31).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _first_words(run, blocks, records, RUNS: tl.constexpr, RECORD: tl.constexpr):
    """First word of the records of runs `run` of the item; past its end, of the last one. int64."""
    run = tl.minimum(run, blocks.count * RUNS - 1)
    slot = tl.load(blocks.entries + run // RUNS) >> 1
    extent = slot // records.slots_per_extent
    place = slot - extent * records.slots_per_extent
    inside = records.head_words + run % RUNS * RECORD
    return extent * records.extent_words + place * records.slot_words + inside


@triton.jit
def _scaled_keys(
    words, packed, first_of_run, line, there, SCALES: tl.constexpr, ZEROS: tl.constexpr, ARITH: tl.constexpr
):
    """(code - zero) * e4m3, ARITH [4 W, tokens], from codes int32 [W, tokens] of four channels a word.

    line: int32[W], word of the scales of the record that belongs to each word of codes. first_of_run: int64[runs].
    """
    TILE: tl.constexpr = packed.shape[1]
    WIDTH: tl.constexpr = 4 * packed.shape[0]
    at = words + first_of_run[None, :] + line[:, None]
    scales = _e4m3(_octets(tl.load(at + SCALES, mask=there, other=0)), ARITH)
    # int8: with the sign bit flipped the offset is 128 for all.
    zeros = _small(_octets(tl.load(at + ZEROS, mask=there, other=0)) ^ 128, ARITH) - 128.0
    codes = tl.reshape(_small(_octets(packed), ARITH), (WIDTH, TILE // 16, 16))
    return tl.reshape((codes - zeros[:, :, None]) * scales[:, :, None], (WIDTH, TILE))


@triton.jit
def _keys(
    records, first, first_of_run, FIRST: tl.constexpr, WIDTH: tl.constexpr, LINES: tl.constexpr,
    LAYOUT: tl.constexpr, ARITH: tl.constexpr,
):  # fmt: skip
    """K without its base S, [4 WIDTH, tokens] twice: lines FIRST.. of the lower half of the dim and of the upper.

    first: int64[tokens], first word of each token's record; first_of_run: int64[runs], the same without repeats.
    """
    line = FIRST + tl.arange(0, WIDTH)
    there = (line < LINES)[:, None]
    token = tl.arange(0, first.shape[0]) % 16
    packed = tl.load(records.words + first[None, :] + (16 * line)[:, None] + token[None, :], mask=there, other=0)
    low = _scaled_keys(
        records.words, packed & 0x0F0F0F0F, first_of_run, line, there, LAYOUT.key_scales, LAYOUT.key_zeros, ARITH
    )
    line += LINES
    packed = (packed >> 4) & 0x0F0F0F0F
    high = _scaled_keys(records.words, packed, first_of_run, line, there, LAYOUT.key_scales, LAYOUT.key_zeros, ARITH)
    return low, high


@triton.jit
def _value_codes(
    words, first_of_half, FIRST: tl.constexpr, WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr, CODES: tl.constexpr,
    ARITH: tl.constexpr,
):  # fmt: skip
    """Codes of V, ARITH [tokens, WIDTH], channels FIRST...

    first_of_half: int64[2 runs], first word of the record of each of its two rows of words: row u holds the tokens
    4 u .. 4 u + 3 in low nibbles and those eight further in high ones.
    """
    HALVES: tl.constexpr = first_of_half.shape[0]
    channel = FIRST + tl.arange(0, WIDTH)
    row = first_of_half + tl.arange(0, HALVES) % 2 * VALUE_DIM + CODES
    packed = tl.load(words + row[:, None] + channel[None, :], mask=(channel < VALUE_DIM)[None, :], other=0)
    both = tl.join(tl.join(packed, packed >> 16), tl.join(packed >> 8, packed >> 24))  # [.., 2, 2]: byte 2 i + j
    both = tl.join(both & 15, (both >> 4) & 15)  # and low, high nibble
    split = tl.reshape(both, (HALVES // 2, 2, WIDTH, 2, 2, 2))  # run, row, channel, i, j, nibble
    return _small(tl.reshape(tl.permute(split, (0, 5, 1, 3, 4, 2)), (8 * HALVES, WIDTH)), ARITH)


@triton.jit
def _query(rows, KEY_PIECES: tl.constexpr, HALF: tl.constexpr, ARITH: tl.constexpr):
    """Pieces of the query, lower half and upper, ARITH [rows, 4 lines]; and the power of two taken out, float32."""
    found = ()
    largest = 0.0
    for i in tl.static_range(len(KEY_PIECES)):
        low = load_query(rows, 4 * KEY_PIECES[i][0], 4 * KEY_PIECES[i][1], HALF).to(tl.float32)
        high = load_query(rows, HALF + 4 * KEY_PIECES[i][0], 4 * KEY_PIECES[i][1], HALF + HALF).to(tl.float32)
        found = found + (low, high)
        largest = tl.maximum(largest, tl.maximum(tl.max(tl.abs(low), 1), tl.max(tl.abs(high), 1)))
    unit = _power_of_two_below(largest)
    scaled = ()
    for i in tl.static_range(len(found)):
        scaled = scaled + ((found[i] / unit[:, None]).to(ARITH),)
    return scaled, unit


@triton.jit
def _score(
    query, records, first, first_of_run, KEY_PIECES: tl.constexpr, LINES: tl.constexpr, LAYOUT: tl.constexpr,
    ARITH: tl.constexpr,
):  # fmt: skip
    """Products of query and K of a tile without S, float32 [rows, tokens]; and the pieces of K, lower, upper."""
    scores = tl.zeros([query[0].shape[0], first.shape[0]], tl.float32)
    keys = ()
    for i in tl.static_range(len(KEY_PIECES)):
        low, high = _keys(records, first, first_of_run, KEY_PIECES[i][0], KEY_PIECES[i][1], LINES, LAYOUT, ARITH)
        scores = tl.dot(query[2 * i], low, scores, input_precision="tf32x3")
        scores = tl.dot(query[2 * i + 1], high, scores, input_precision="tf32x3")
        keys = keys + (low, high)
    return scores, keys


@triton.jit
def _places(begin, blocks, records, BLOCK_TOKENS: tl.constexpr, TILE: tl.constexpr, RECORD: tl.constexpr):
    """Of a tile from run `begin` on: each token's position, whether it is in the item, its record; records by run."""
    RUNS: tl.constexpr = BLOCK_TOKENS // 16
    run = begin + tl.arange(0, TILE) // 16
    there = run < blocks.count * RUNS
    number = tl.load(blocks.numbers + run // RUNS, mask=there, other=0).to(tl.int32)
    position = number * BLOCK_TOKENS + run % RUNS * 16 + tl.arange(0, TILE) % 16
    first = _first_words(run, blocks, records, RUNS, RECORD)
    first_of_run = _first_words(begin + tl.arange(0, TILE // 16), blocks, records, RUNS, RECORD)
    return position, there, first, first_of_run


@triton.jit
def _fold_values(weights, bases, records, first, VALUE_SCALES: tl.constexpr, ARITH: tl.constexpr, TILE: tl.constexpr):
    """V's scales into the weights: ARITH [rows, tokens], to be multiplied by `top`, and sum of weight times zero."""
    token = tl.arange(0, TILE) % 16
    octet = records.words.to(tl.pointer_type(tl.uint8)) + 4 * (first + VALUE_SCALES)
    base = (bases & -65536).to(tl.float32, bitcast=True)  # the second of the two bfloat16 in the word
    top = tl.max(base, 0)
    scale = _e4m3(tl.load(octet + token), tl.float32) * (base / top)
    folded = (weights * scale[None, :]).to(ARITH)
    zeros = (tl.load(octet + 16 + token % 8).to(tl.int32) >> (token // 8 * 4)) & 15
    shift = tl.sum(folded.to(tl.float32) * zeros.to(tl.float32)[None, :], 1) * top
    return folded, top, shift


@triton.jit
def attend_cold(
    rows, blocks, records, scoring, partial,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PIECES: tl.constexpr, VALUE_PIECES: tl.constexpr,
    LAYOUT: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    ARITH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """An item of INT4 blocks with K and V; its sums are in rotated space."""
    query, unit = _query(rows, KEY_PIECES, KEY_DIM // 2, ARITH)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    shift = tl.zeros([ROWS], tl.float32)
    sums = ()
    for i in tl.static_range(len(VALUE_PIECES)):
        sums = sums + (tl.zeros([ROWS, VALUE_PIECES[i][1]], tl.float32),)
    for begin in range(0, blocks.count * (BLOCK_TOKENS // 16), TILE // 16):
        key_position, there, first, first_of_run = _places(begin, blocks, records, BLOCK_TOKENS, TILE, LAYOUT.record)
        bases = tl.load(records.words + first + LAYOUT.bases)
        scores, _ = _score(query, records, first, first_of_run, KEY_PIECES, KEY_DIM // 8, LAYOUT, ARITH)
        scores = scores * unit[:, None] * (bases << 16).to(tl.float32, bitcast=True)[None, :]
        weights, decay, peak, total = weigh(
            scores, scoring, peak, total, rows.position, key_position, there, SOFTCAP, WINDOW
        )
        folded, top, more = _fold_values(weights, bases, records, first, LAYOUT.value_scales, ARITH, TILE)
        shift = shift * decay + more
        first_of_half = _first_words(
            begin + tl.arange(0, TILE // 8) // 2, blocks, records, BLOCK_TOKENS // 16, LAYOUT.record
        )
        new = ()
        for i in tl.static_range(len(VALUE_PIECES)):
            codes = _value_codes(
                records.words, first_of_half, VALUE_PIECES[i][0], VALUE_PIECES[i][1], VALUE_DIM, LAYOUT.value_codes,
                ARITH,
            )  # fmt: skip
            new = new + (sums[i] * decay[:, None] + tl.dot(folded, codes, input_precision="tf32x3") * top,)
        sums = new
    store_partial(partial, rows.live, peak, total)
    for i in tl.static_range(len(VALUE_PIECES)):
        summed = sums[i] - shift[:, None]
        store_sums(partial, rows.live, summed, VALUE_PIECES[i][0], VALUE_PIECES[i][1], VALUE_DIM, VALUE_DIM)


@triton.jit
def attend_cold_latent(
    rows, blocks, records, scoring, partial,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_PIECES: tl.constexpr, LAYOUT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
    ARITH: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """An item of INT4 latents: V is the first VALUE_DIM channels of K, so the pieces of K serve twice."""
    HALF: tl.constexpr = KEY_DIM // 2
    query, unit = _query(rows, KEY_PIECES, HALF, ARITH)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = ()
    for i in tl.static_range(2 * len(KEY_PIECES)):
        sums = sums + (tl.zeros([ROWS, 4 * KEY_PIECES[i // 2][1]], tl.float32),)
    for begin in range(0, blocks.count * (BLOCK_TOKENS // 16), TILE // 16):
        key_position, there, first, first_of_run = _places(begin, blocks, records, BLOCK_TOKENS, TILE, LAYOUT.record)
        base = (tl.load(records.words + first + LAYOUT.bases) << 16).to(tl.float32, bitcast=True)
        scores, keys = _score(query, records, first, first_of_run, KEY_PIECES, KEY_DIM // 8, LAYOUT, ARITH)
        weights, decay, peak, total = weigh(
            scores * unit[:, None] * base[None, :], scoring, peak, total, rows.position, key_position, there,
            SOFTCAP, WINDOW,
        )  # fmt: skip
        top = tl.max(base, 0)
        folded = (weights * (base / top)[None, :]).to(ARITH)
        new = ()
        for i in tl.static_range(2 * len(KEY_PIECES)):
            if 4 * KEY_PIECES[i // 2][0] + i % 2 * HALF < VALUE_DIM:
                found = tl.dot(folded, tl.trans(keys[i]), input_precision="tf32x3")
                new = new + (sums[i] * decay[:, None] + found * top,)
            else:
                new = new + (sums[i],)
        sums = new
    store_partial(partial, rows.live, peak, total)
    for i in tl.static_range(2 * len(KEY_PIECES)):
        # A padded piece of the lower half must not reach into the upper one.
        _store_half(
            partial, rows.live, sums[i], 4 * KEY_PIECES[i // 2][0] + i % 2 * HALF, 4 * KEY_PIECES[i // 2][1],
            HALF + i % 2 * HALF, VALUE_DIM,
        )  # fmt: skip


@triton.jit
def _store_half(
    partial, live, summed, FIRST: tl.constexpr, WIDTH: tl.constexpr, HALF_END: tl.constexpr, VALUE_DIM: tl.constexpr
):
    END: tl.constexpr = HALF_END if HALF_END < VALUE_DIM else VALUE_DIM
    store_sums(partial, live, summed, FIRST, WIDTH, END, VALUE_DIM)
