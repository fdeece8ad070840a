"""Decode attention cut into work items of about equal length: pure arithmetic over block tables, once a step and group.

An item is a run of blocks of one form of one sequence. A sequence's full blocks come first, then its INT4 blocks;
attention does not mind the order of keys, so every block carries its number. Long sequences become many items and
short ones a single one, so that one launch keeps all of a device busy whatever the lengths are.

No torch here; every backend may use it. Called by the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine_adapter.attention.step_plan import checked_table, first_visible
from engine_adapter.batch import Int64Array, SequenceSlice


@dataclass(frozen=True, slots=True)
class DecodeSlice:
    """A slice of few tokens: its first row among the step's flattened tokens, its checked table, and the numbers of
    the full and of the INT4 blocks that it reads, int64[blocks] each, ascending.
    """

    first_row: int
    part: SequenceSlice
    table: Int64Array
    full_blocks: Int64Array
    cold_blocks: Int64Array

    @classmethod
    def of(
        cls, first_row: int, part: SequenceSlice, group: int, block_tokens: int, window_tokens: int | None
    ) -> DecodeSlice:
        """Raises UsageError when the table lacks a block that must be seen."""
        table = checked_table(part, group, block_tokens, window_tokens)
        first = first_visible(part.start, window_tokens) // block_tokens
        numbers = np.arange(first, len(table))
        cold = (table[first:] & 1).astype(bool)
        return cls(first_row, part, table, numbers[~cold], numbers[cold])

    @property
    def block_count(self) -> int:
        return len(self.full_blocks) + len(self.cold_blocks)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Work items of the decode and verify slices of a step, for one cache group.

    entries, numbers: int64[blocks], table entries (slot * 2 + form) and block numbers, sequence by sequence.
    items: int64[items, 4]: sequence, first of its blocks in `entries`, how many, and where its partial results begin,
        counted in tokens: an item leaves a row for each query head of each token of its sequence.
    sequences: int64[sequences, 5]: first row, tokens, position of the first, first item, items.
    tokens: int64[tokens, 2]: sequence, number inside the slice.
    partial_tokens: sum over items of the tokens of their sequence. cold: whether an INT4 block is read.
    """

    entries: Int64Array
    numbers: Int64Array
    items: Int64Array
    sequences: Int64Array
    tokens: Int64Array
    partial_tokens: int
    tokens_max: int
    cold: bool


def split_decode(slices: Sequence[DecodeSlice], item_blocks: int) -> SplitPlan:
    """Plan the slices (at least one). No item has more than item_blocks blocks; those of a sequence and form are equal
    but for one block.
    """
    listed: list[Int64Array] = []
    entries: list[Int64Array] = []
    items: list[tuple[int, int, int, int]] = []
    sequences: list[tuple[int, int, int, int, int]] = []
    at, partial = 0, 0
    for sequence, one in enumerate(slices):
        first_item = len(items)
        for numbers in (one.full_blocks, one.cold_blocks):
            count = len(numbers)
            pieces = -(-count // item_blocks)
            for piece in range(pieces):
                begin, end = count * piece // pieces, count * (piece + 1) // pieces
                items.append((sequence, at + begin, end - begin, partial))
                partial += one.part.token_count
            listed.append(numbers)
            entries.append(one.table[numbers])
            at += count
        sequences.append((one.first_row, one.part.token_count, one.part.start, first_item, len(items) - first_item))
    counts = [one.part.token_count for one in slices]
    tokens = np.empty((sum(counts), 2), np.int64)
    tokens[:, 0] = np.repeat(np.arange(len(slices)), counts)
    tokens[:, 1] = np.concatenate([np.arange(count) for count in counts])
    flat = np.concatenate(entries)
    return SplitPlan(
        entries=flat,
        numbers=np.concatenate(listed).astype(np.int64),
        items=np.array(items, np.int64),
        sequences=np.array(sequences, np.int64),
        tokens=tokens,
        partial_tokens=partial,
        tokens_max=max(counts),
        cold=bool((flat & 1).any()),
    )


def item_blocks_for(items: int, slices: Sequence[DecodeSlice], least_blocks: int) -> int:
    """Blocks of an item so that all slices together become about so many items, none planned shorter than the least."""
    total = sum(one.block_count for one in slices)
    return max(-(-total // max(1, items)), least_blocks, 1)
