"""INT4 records coded by the C kernels: torch tensors to addresses. The only file of `quant.native` that imports torch.

Called by int4_records, record_codec and slots when `usable` says so; the torch code beside them is the reference and
gives the same bytes. Work is shared by as many threads as torch may use. Any thread; nothing here keeps state.

Blocks are [N, layers, kv_heads, tokens, dim] in bfloat16, float16 or float32 on the CPU, tokens a multiple of 16, any
strides (only the last dim must be consecutive; otherwise a copy is made).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import torch

from quant import dispatch, native
from quant.error_bound import ERROR_STEPS, part_bound
from quant.record_layout import RUN_TOKENS, RecordLayout

_OPERATIONS = ("int4_encode", "int4_decode")
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STREAM_BYTES = 4 << 20
"""Decoded bytes from which stores go around the caches: a target this large would not stay in them anyway."""
_LINE_BYTES = 64
_Places: TypeAlias = "tuple[int, int, int, int, int, int, int]"
_ABSENT: _Places = (0, 0, 0, 0, 0, 0, 0)


def usable(*tensors: torch.Tensor | None) -> bool:
    """Whether the C kernels run and take these tensors: on the CPU, uint8 or all of one dtype they know.

    The codec is native as a whole or not at all: forcing either operation elsewhere takes both.
    """
    if native.kernels is None or any(
        dispatch.implementation_of(operation, "cpu") != "native" for operation in _OPERATIONS
    ):
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    dtypes = {tensor.dtype for tensor in given} - {torch.uint8}
    return len(dtypes) <= 1 and dtypes <= _DTYPES.keys() and all(tensor.device.type == "cpu" for tensor in given)


@lru_cache(maxsize=256)
def _fields(layout: RecordLayout) -> tuple[int, ...]:
    return dataclasses.astuple(layout)


def _limit(bound: float, bits: int) -> float:
    """What `within_bound` multiplies the signal by."""
    own = part_bound(bound, bits)
    return own * own * (ERROR_STEPS * ERROR_STEPS)


def _rows(blocks: torch.Tensor | None, offsets: torch.Tensor | None = None) -> _Places:
    """Where the rows of [N, layers, kv_heads, tokens, dim] lie; offsets int64 [N]: bytes, instead of a stride."""
    if blocks is None or not blocks.shape[-1]:
        return _ABSENT
    item = blocks.itemsize
    block, layer, head, token, _ = (stride * item for stride in blocks.stride())
    at = 0 if offsets is None else offsets.data_ptr()
    return blocks.data_ptr(), at, block, layer, head, RUN_TOKENS * token, token


def _records(
    records: torch.Tensor, layout: RecordLayout, heads: int, runs: int, offsets: torch.Tensor | None = None
) -> _Places:
    """Where the records lie: rows of uint8 [N, bytes], or blocks at byte offsets int64 [N] of a flat tensor."""
    size = layout.record_bytes
    at = 0 if offsets is None else offsets.data_ptr()
    block = records.stride(0) if offsets is None else 0
    return records.data_ptr(), at, block, heads * runs * size, runs * size, size, 0


def _counts(blocks: torch.Tensor, count: int) -> tuple[int, int, int, int]:
    return count, blocks.shape[1], blocks.shape[2], blocks.shape[3] // RUN_TOKENS


def encode_blocks(
    keys: torch.Tensor, values: torch.Tensor | None, records: torch.Tensor, layout: RecordLayout, bound: float
) -> torch.Tensor:
    """Blocks into records uint8 [N, bytes], in (layer, head, run) order from each row's start; bool [N] accepted."""
    if keys.stride(-1) != 1:
        keys = keys.contiguous()
    if values is not None and values.stride(-1) != 1:
        values = values.contiguous()
    count, layers, heads, runs = _counts(keys, keys.shape[0])
    accepted = torch.empty(count, dtype=torch.uint8)
    native.kernels.codec_encode(
        _fields(layout), _DTYPES[keys.dtype], (count, layers, heads, runs), _rows(keys), _rows(values),
        _records(records, layout, heads, runs), _limit(bound, layout.key_bits), _limit(bound, layout.value_bits),
        accepted.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return accepted.view(torch.bool)


def encode_slots(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    slots: Sequence[int],
    memory: torch.Tensor,
    places_bytes: Sequence[int],
    layout: RecordLayout,
    bound: float,
) -> torch.Tensor:
    """Blocks `slots` of keys and values into `memory` uint8 [bytes] at `places_bytes`; bool [len(slots)] accepted."""
    count = len(slots)
    _, layers, heads, runs = _counts(keys, count)
    accepted = torch.empty(count, dtype=torch.uint8)
    index = torch.tensor(slots, dtype=torch.int64)
    offsets = [None if part is None else index * (part.stride(0) * part.itemsize) for part in (keys, values)]
    targets = torch.tensor(places_bytes, dtype=torch.int64)
    native.kernels.codec_encode(
        _fields(layout), _DTYPES[keys.dtype], (count, layers, heads, runs), _rows(keys, offsets[0]),
        _rows(values, offsets[1]), _records(memory, layout, heads, runs, targets), _limit(bound, layout.key_bits),
        _limit(bound, layout.value_bits), accepted.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return accepted.view(torch.bool)


def decode_blocks(
    records: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor | None,
    layout: RecordLayout,
    *,
    offsets: torch.Tensor | None = None,
    rotated: bool = False,
) -> None:
    """Records into blocks [N, layers, kv_heads, tokens, dim] that the caller owns, values rotated still if asked.

    Expanded targets go through torch's copy, which refuses those that overlap themselves.

    records: uint8 [N, bytes], or with `offsets` int64 [N] the flat uint8 memory that they are byte offsets of.
    """
    targets = keys, values
    if any(part is not None and (part.stride(-1) != 1 or 0 in part.stride()) for part in targets):
        keys = torch.empty_like(keys, memory_format=torch.contiguous_format)
        values = None if values is None else torch.empty_like(values, memory_format=torch.contiguous_format)
    count, layers, heads, runs = _counts(keys, keys.shape[0])
    places = _rows(keys), _rows(values)
    total_bytes = sum(part.numel() * part.itemsize for part in (keys, values) if part is not None)
    stream = total_bytes >= STREAM_BYTES and not any(number % _LINE_BYTES for place in places for number in place)
    native.kernels.codec_decode(
        _fields(layout), _DTYPES[keys.dtype], (count, layers, heads, runs), *places,
        _records(records, layout, heads, runs, offsets), rotated, stream, torch.get_num_threads(),
    )  # fmt: skip
    for target, part in zip(targets, (keys, values), strict=True):
        if target is not None and part is not None and part is not target:
            target.copy_(part)


def validate_blocks(records: torch.Tensor, layout: RecordLayout, counts: tuple[int, int, int]) -> torch.Tensor:
    """bool [N]: records uint8 [N, bytes] that an encoder may have written. counts: layers, kv_heads, runs."""
    valid = torch.empty(records.shape[0], dtype=torch.uint8)
    places = _records(records, layout, counts[1], counts[2])
    native.kernels.codec_validate(_fields(layout), (records.shape[0], *counts), places, valid.data_ptr())
    return valid.view(torch.bool)
