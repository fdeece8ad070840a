"""Which blocks each token of a step reads: pure arithmetic over block tables, done once per step and cache group.

A slice with many tokens is a prefill piece and is handled on its own. Slices with few tokens (decode: one; verifying
drafts: a few) are batched: sequences with about the same number of blocks form a bucket, padded to its longest.
Attention does not mind the order of keys, so inside a bucket full blocks come first and INT4 blocks after them.

No torch here; every backend may use it. Called by the thread that runs the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from allocator import UsageError
from engine_adapter.batch import DROPPED, Int64Array, SequenceSlice, StepBatch

BATCHED_QUERIES_MAX = 16
"""Slices of up to so many tokens are batched with others; longer ones are prefill pieces."""
PIECE_QUERIES = 512
"""A longer prefill is cut into pieces of so many queries, which bounds its mask."""
HIDDEN_POSITION = 1 << 60
"""Position of a key that no query may see: tails of open blocks, padding."""
_BUCKET_SLACK_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class PrefillPiece:
    """Consecutive queries of one slice and the keys they may see.

    rows: [first_row, first_row + row_count) of the step's flattened tokens; the first stands at first_position.
    fresh_row: row of the key at key_start when all visible keys are computed in this very step, else None.
    entries: int64[blocks], table entries of the blocks that hold positions key_start .. key_start + key_count - 1
        (empty when fresh); key_start is then a block boundary.
    """

    first_row: int
    row_count: int
    first_position: int
    key_start: int
    key_count: int
    fresh_row: int | None
    entries: Int64Array


@dataclass(frozen=True, slots=True)
class DecodeBucket:
    """Slices of few tokens, attended together.

    rows: int64[sequences, queries], rows of the step's flattened tokens; a shorter slice repeats its last row.
    query_positions: int64[sequences, queries].
    full_slots: int64[sequences, full_blocks], padded with a slot of the same sequence.
    cold_index: int64[sequences, cold_blocks], index into GroupPlan.cold_slots, padded.
    key_positions: int64[sequences, (full_blocks + cold_blocks) * block_tokens], HIDDEN_POSITION where nothing is.
    unwritten: int64[places], flat index into [sequences, full_blocks, block_tokens] of tokens in full slots that
        nobody wrote; their bytes may be NaN and must be cleared before use.
    """

    rows: Int64Array
    query_positions: Int64Array
    full_slots: Int64Array
    cold_index: Int64Array
    key_positions: Int64Array
    unwritten: Int64Array


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A step for one cache group.

    cold_slots: int64[unique], INT4 slots that decode buckets read, each once, in the order of first use: a bucket
    that shares none of its blocks finds them in a row.
    """

    window_tokens: int | None
    pieces: tuple[PrefillPiece, ...]
    buckets: tuple[DecodeBucket, ...]
    cold_slots: Int64Array


@dataclass(frozen=True, slots=True)
class _Reader:
    """A batched slice and what it reads: full_blocks and cold_blocks are block numbers, ascending."""

    first_row: int
    part: SequenceSlice
    table: Int64Array
    full_blocks: Int64Array
    cold_blocks: Int64Array

    @property
    def block_count(self) -> int:
        return len(self.full_blocks) + len(self.cold_blocks)


def plan_group(
    batch: StepBatch, group: int, block_tokens: int, window_tokens: int | None, bucket_blocks: int
) -> GroupPlan:
    """Plan a step. bucket_blocks: blocks (padding counted) that one bucket may hold, so that it stays in cache.

    Raises UsageError when a table lacks a block that a query must see, or does not agree with the slot mapping.
    """
    pieces: list[PrefillPiece] = []
    readers: list[_Reader] = []
    row = 0
    for part in batch:
        table = checked_table(part, group, block_tokens, window_tokens)
        if part.token_count > BATCHED_QUERIES_MAX:
            pieces.extend(_cut_pieces(part, row, table, block_tokens, window_tokens))
        else:
            readers.append(_reader(part, row, table, block_tokens, window_tokens))
        row += part.token_count
    grouped = _grouped(readers, bucket_blocks)
    cold = [one.table[one.cold_blocks] >> 1 for members in grouped for one in members]
    listed = np.concatenate(cold) if cold else np.empty(0, np.int64)
    ordered, first = np.unique(listed, return_index=True)
    rank = np.empty(len(ordered), np.int64)
    rank[np.argsort(first)] = np.arange(len(ordered))
    cold_slots = listed[np.sort(first)]
    buckets = [_bucket(members, ordered, rank, block_tokens) for members in grouped]
    return GroupPlan(window_tokens, tuple(pieces), tuple(buckets), cold_slots)


def first_visible(position: int, window_tokens: int | None) -> int:
    """First position that a query at `position` sees."""
    return 0 if window_tokens is None else max(0, position - window_tokens + 1)


def checked_table(part: SequenceSlice, group: int, block_tokens: int, window_tokens: int | None) -> Int64Array:
    """The table of a slice, cut to the blocks of written tokens.

    Raises UsageError when it lacks a block that a query must see, or does not agree with the slot mapping.
    """
    if group >= len(part.tables):
        raise UsageError(
            f"sequence {part.sequence_id!r} brings tables for {len(part.tables)} cache groups; group {group} is missing"
        )
    table = np.asarray(part.tables[group], dtype=np.int64)
    needed = -(-part.end // block_tokens)
    if len(table) < needed:
        raise UsageError(
            f"sequence {part.sequence_id!r}, group {group}: the table has {len(table)} blocks of {block_tokens} "
            f"tokens, but {part.end} tokens need {needed}"
        )
    first = first_visible(part.start, window_tokens) // block_tokens
    if (table[first:needed] < 0).any():
        missing = first + int(np.flatnonzero(table[first:needed] < 0)[0])
        raise UsageError(
            f"sequence {part.sequence_id!r}, group {group}: block {missing} was dropped from the table "
            f"(entry {DROPPED}), but tokens from position {part.start} on must see it"
        )
    mapping = part.slot_mappings[group]
    positions = np.arange(part.start, part.end)
    entries = table[positions // block_tokens]
    expected = (entries >> 1) * block_tokens + positions % block_tokens
    if (entries & 1).any() or (expected != mapping).any():
        raise UsageError(
            f"sequence {part.sequence_id!r}, group {group}: the slot mapping of positions {part.start}.."
            f"{part.end - 1} does not point into the full precision blocks of its table"
        )
    return table[:needed]


def _cut_pieces(
    part: SequenceSlice, first_row: int, table: Int64Array, block_tokens: int, window_tokens: int | None
) -> list[PrefillPiece]:
    pieces = []
    for done in range(0, part.token_count, PIECE_QUERIES):
        count = min(PIECE_QUERIES, part.token_count - done)
        first = part.start + done
        key_start = first_visible(first, window_tokens)
        if key_start >= part.start:
            fresh_row: int | None = first_row + key_start - part.start
            entries = table[:0]
        else:
            fresh_row = None
            key_start -= key_start % block_tokens
            entries = table[key_start // block_tokens : -(-(first + count) // block_tokens)]
        pieces.append(
            PrefillPiece(first_row + done, count, first, key_start, first + count - key_start, fresh_row, entries)
        )
    return pieces


def _reader(
    part: SequenceSlice, first_row: int, table: Int64Array, block_tokens: int, window_tokens: int | None
) -> _Reader:
    first = first_visible(part.start, window_tokens) // block_tokens
    blocks = np.arange(first, len(table))
    cold = (table[first:] & 1).astype(bool)
    return _Reader(first_row, part, table, blocks[~cold], blocks[cold])


def _grouped(readers: Sequence[_Reader], bucket_blocks: int) -> list[list[_Reader]]:
    """Sequences of about the same length together: padding stays below a quarter, a bucket below bucket_blocks.

    A sequence with a single block has no written block to pad with, so it never shares a bucket with longer ones.
    """
    ordered = sorted(readers, key=lambda one: (one.part.token_count > 1, len(one.full_blocks), len(one.cold_blocks)))
    buckets: list[list[_Reader]] = []
    for reader in ordered:
        if buckets and _fits(buckets[-1], reader, bucket_blocks):
            buckets[-1].append(reader)
        else:
            buckets.append([reader])
    return buckets


def _fits(members: list[_Reader], reader: _Reader, bucket_blocks: int) -> bool:
    first = members[0]
    if (first.part.token_count > 1) != (reader.part.token_count > 1):
        return False
    full = max(len(reader.full_blocks), *(len(one.full_blocks) for one in members))
    cold = max(len(reader.cold_blocks), *(len(one.cold_blocks) for one in members))
    if (len(members) + 1) * (full + cold) > bucket_blocks:
        return False
    for one in (first, reader):
        if len(one.full_blocks) == 1 and full > 1:
            return False
        if full + cold > one.block_count * 5 // 4 + _BUCKET_SLACK_BLOCKS:
            return False
    return True


def _bucket(members: Sequence[_Reader], ordered: Int64Array, rank: Int64Array, block_tokens: int) -> DecodeBucket:
    """ordered: INT4 slots of the step, ascending; rank: where each stands in GroupPlan.cold_slots."""
    count = len(members)
    queries = max(one.part.token_count for one in members)
    full = max(len(one.full_blocks) for one in members)
    cold = max(len(one.cold_blocks) for one in members)
    rows = np.empty((count, queries), np.int64)
    query_positions = np.empty((count, queries), np.int64)
    full_slots = np.empty((count, full), np.int64)
    cold_index = np.zeros((count, cold), np.int64)
    positions = np.full((count, full + cold, block_tokens), HIDDEN_POSITION, np.int64)
    inside = np.arange(block_tokens)
    for at, one in enumerate(members):
        last = one.part.token_count - 1
        step = np.minimum(np.arange(queries), last)
        rows[at] = one.first_row + step
        query_positions[at] = one.part.start + step
        held = len(one.full_blocks)
        full_slots[at, :held] = one.table[one.full_blocks] >> 1
        # The first of several full blocks is written to its end, so as padding it is finite.
        full_slots[at, held:] = full_slots[at, 0]
        positions[at, :held] = one.full_blocks[:, None] * block_tokens + inside
        if len(one.cold_blocks):
            index = rank[np.searchsorted(ordered, one.table[one.cold_blocks] >> 1)]
            cold_index[at, : len(index)] = index
            cold_index[at, len(index) :] = index[0]
            positions[at, full : full + len(index)] = one.cold_blocks[:, None] * block_tokens + inside
        tail = positions[at, :held]
        tail[tail >= one.part.end] = HIDDEN_POSITION
    real = np.array([len(one.full_blocks) for one in members])
    open_places = (positions[:, :full] == HIDDEN_POSITION) & (np.arange(full) < real[:, None])[:, :, None]
    unwritten = np.flatnonzero(open_places)
    return DecodeBucket(
        rows, query_positions, full_slots, cold_index, positions.reshape(count, -1), unwritten.astype(np.int64)
    )
