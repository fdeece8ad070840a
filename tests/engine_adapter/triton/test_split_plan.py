"""Work items of split decode attention: every visible block once, none else, of about equal length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator import UsageError
from engine_adapter.attention.split_plan import DecodeSlice, item_blocks_for, split_decode
from engine_adapter.attention.triton_launch import pieces
from engine_adapter.batch import SequenceSlice

BLOCK_TOKENS = 4


def slice_of(number: int, first_row: int, context: int, new: int, cold: int, window: int | None) -> DecodeSlice:
    blocks = -(-(context + new) // BLOCK_TOKENS)
    table = np.array([(100 * number + block) << 1 for block in range(blocks)], np.int64)
    for block in range(context // BLOCK_TOKENS):
        table[block] |= cold >> (block % 8) & 1
    positions = np.arange(context, context + new)
    mapping = (table[positions // BLOCK_TOKENS] >> 1) * BLOCK_TOKENS + positions % BLOCK_TOKENS
    part = SequenceSlice(f"s{number}", (1,) * new, context, 0, (table,), (mapping,))
    return DecodeSlice.of(first_row, part, 0, BLOCK_TOKENS, window)


shapes = st.lists(st.tuples(st.integers(0, 70), st.integers(1, 8), st.integers(0, 255)), min_size=1, max_size=6)


@given(shapes, st.one_of(st.none(), st.integers(1, 40)), st.integers(1, 9))
def test_items_cover_what_is_visible(lengths: list[tuple[int, int, int]], window: int | None, item_blocks: int) -> None:
    slices, row = [], 3
    for number, (context, new, cold) in enumerate(lengths):
        slices.append(slice_of(number, row, context, new, cold, window))
        row += new
    plan = split_decode(slices, item_blocks)
    partial = 0
    for sequence, one in enumerate(slices):
        first_row, tokens, start, first_item, item_count = plan.sequences[sequence].tolist()
        assert (first_row, tokens, start) == (one.first_row, one.part.token_count, one.part.start)
        seen: list[int] = []
        for item in plan.items[first_item : first_item + item_count].tolist():
            owner, first, count, begins = item
            assert owner == sequence
            assert 1 <= count <= item_blocks
            assert begins == partial
            partial += tokens
            entries = plan.entries[first : first + count]
            assert len(set((entries & 1).tolist())) == 1
            assert (entries == one.table[plan.numbers[first : first + count]]).all()
            seen += plan.numbers[first : first + count].tolist()
        oldest = 0 if window is None else max(0, start - window + 1) // BLOCK_TOKENS
        assert sorted(seen) == list(range(oldest, len(one.table)))
    assert plan.partial_tokens == partial
    assert plan.cold == bool((plan.entries & 1).any())
    assert plan.tokens_max == max(new for _, new, _ in lengths)
    expected = [(sequence, number) for sequence, (_, new, _) in enumerate(lengths) for number in range(new)]
    assert [tuple(pair) for pair in plan.tokens.tolist()] == expected


def test_items_are_as_many_as_asked_but_not_too_short() -> None:
    slices = [slice_of(0, 0, 400, 1, 0, None), slice_of(1, 1, 3, 1, 0, None)]
    assert item_blocks_for(10, slices, 1) == 11
    assert item_blocks_for(10, slices, 32) == 32
    assert item_blocks_for(0, slices, 0) == 102
    assert len(split_decode(slices, item_blocks_for(10, slices, 1)).items) == 11


def test_a_dropped_block_is_refused() -> None:
    good = slice_of(0, 0, 40, 1, 0, None)
    good.table[3] = -1
    with pytest.raises(UsageError, match="block 3 was dropped"):
        DecodeSlice.of(0, good.part, 0, BLOCK_TOKENS, None)


@pytest.mark.parametrize("dim", [8, 16, 24, 64, 80, 96, 128, 136, 192, 256, 320, 512, 576])
def test_pieces_cover_a_dim(dim: int) -> None:
    found = pieces(dim, 16, 128)
    at = 0
    for first, width in found:
        assert first == at
        assert width >= 16
        assert width & (width - 1) == 0
        at += width
    assert at >= dim
    assert len(found) <= 2
    assert at < 2 * max(dim, 16)
