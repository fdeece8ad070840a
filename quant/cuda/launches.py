"""Kernel launches as values: which kernel, how many threads, which arguments. Numbers only: no cupy, no torch.

The codec and the page copier plan with these functions and hand the plan to the runtime; the tests hand the same plan
to the kernels compiled for the CPU. Addresses are plain integers, as the device sees them. Any thread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from quant.record_layout import RUN_TOKENS, RecordLayout

Job: TypeAlias = "np.ndarray[Any, np.dtype[np.void]]"

# Mirrors of the structs in scalars.cuh and pages.cu, field by field. A one-element array is passed by value.
RECORD_JOB = np.dtype(
    [
        *((name, np.uint64) for name in ("tensor", "tensor_offsets", "records", "record_offsets", "accepted")),
        *((name, np.int64) for name in ("tensor_stride", "layer_stride", "head_stride", "token_stride")),
        ("record_stride", np.int64),
        ("limit", np.float64),
        *((name, np.uint32) for name in ("record_count", "block_records", "heads", "runs", "dim", "record_bytes")),
        *((name, np.uint32) for name in ("codes", "plane", "scales", "zeros", "base", "padding", "segment")),
        ("unit", np.float32),
    ]
)
COPY_JOB = np.dtype(
    [
        *((name, np.uint64) for name in ("target", "target_offsets", "source", "source_offsets")),
        *((name, np.int64) for name in ("target_stride", "source_stride")),
        *((name, np.uint32) for name in ("page_units", "page_count", "page_chunks", "unused")),
    ]
)
UNIT_BYTES = 16  # of one access, and what pages, strides and offsets are multiples of
_COPY_THREADS = 256
_UNITS_A_THREAD = 4
_RECORD_THREADS = 128  # about as many in a thread block: small records share one
_COUNT_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Keys or values of blocks: address of block 0, layer 0, head 0, token 0, and strides in bytes; dims contiguous.

    offsets_address: int64 byte offsets from `address`, one a block, readable by the device, in place of block_stride.
    """

    address: int
    block_stride: int
    layer_stride: int
    head_stride: int
    token_stride: int
    offsets_address: int = 0

    def is_aligned(self, kind: str) -> bool:
        """Kernels read and write four elements at once."""
        step = 4 * item_bytes(kind)
        parts = (self.address, self.block_stride, self.layer_stride, self.head_stride, self.token_stride)
        return not any(part % step for part in parts)


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """Records of blocks: address of block 0's first record and the bytes between blocks, or offsets as above."""

    address: int
    block_stride: int
    offsets_address: int = 0

    def is_aligned(self) -> bool:
        """Kernels read and write 16 bytes at once."""
        return not (self.address % UNIT_BYTES or self.block_stride % UNIT_BYTES)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks, and layers, KV heads and runs of 16 tokens in each."""

    blocks: int
    layers: int
    kv_heads: int
    runs: int

    @property
    def records(self) -> int:
        """Records in all blocks."""
        return self.blocks * self.layers * self.kv_heads * self.runs


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: a kernel of a module, thread blocks, threads (x, y) of each, dynamic shared bytes, the argument."""

    module: str
    kernel: str
    grid: int
    threads: tuple[int, int]
    shared_bytes: int
    job: Job


def item_bytes(kind: str) -> int:
    """Bytes of an element."""
    return 4 if kind == "fp32" else 2


def error_limit(bound: float) -> float:
    """What a record's weighted errors over its weighted magnitudes are held against, in squared 64ths of a step."""
    return bound * bound * 4096.0


def hadamard_size(dim: int) -> int:
    """Largest power of two that divides dim."""
    return dim & -dim


def value_segment(dim: int) -> int:
    """Threads for four channels each of `dim`: a power of two below 32, else a multiple of 32."""
    columns = dim // 4
    return 1 << (columns - 1).bit_length() if columns < 32 else -(-columns // 32) * 32


def _shape(threads: int) -> tuple[int, int]:
    """Threads (x, y) of a thread block: whole warps a record, several records where they are small."""
    across = -(-threads // 32) * 32
    return across, max(1, _RECORD_THREADS // across)


def _launch(work: str, bits: int, kind: str, job: Job, threads: int, exchange_buffers: int) -> Launch:
    across, rows = _shape(threads)
    shared = exchange_buffers * across * rows * UNIT_BYTES
    grid = -(-int(job["record_count"][0]) // rows)
    return Launch(f"int4_{kind}", f"{work}_{bits}", grid, (across, rows), shared, job)


def _job(tensor: TensorPlace, records: RecordPlace, counts: BlockCounts, layout: RecordLayout) -> Job:
    if counts.records >= _COUNT_LIMIT:
        raise ValueError(f"at most {_COUNT_LIMIT - 1} records in one call, got {counts.records}")
    job: Job = np.zeros(1, RECORD_JOB)
    job["tensor"], job["tensor_offsets"] = tensor.address, tensor.offsets_address
    job["records"], job["record_offsets"] = records.address, records.offsets_address
    job["tensor_stride"], job["layer_stride"] = tensor.block_stride, tensor.layer_stride
    job["head_stride"], job["token_stride"] = tensor.head_stride, tensor.token_stride
    job["record_stride"] = records.block_stride
    job["record_count"], job["block_records"] = counts.records, counts.records // counts.blocks
    job["heads"], job["runs"] = counts.kv_heads, counts.runs
    job["record_bytes"], job["padding"] = layout.record_bytes, layout.used_bytes
    return job


def _key_job(tensor: TensorPlace, records: RecordPlace, counts: BlockCounts, layout: RecordLayout) -> Job:
    job = _job(tensor, records, counts, layout)
    job["dim"], job["plane"] = layout.key_dim, layout.key_plane
    job["scales"], job["zeros"], job["base"] = layout.key_scales, layout.key_zeros, layout.key_base
    return job


def _value_job(tensor: TensorPlace, records: RecordPlace, counts: BlockCounts, layout: RecordLayout) -> Job:
    job = _job(tensor, records, counts, layout)
    job["dim"], job["codes"], job["plane"] = layout.value_dim, layout.value_codes, layout.value_plane
    job["scales"], job["zeros"], job["base"] = layout.value_scales, layout.value_zeros, layout.value_base
    job["segment"] = value_segment(layout.value_dim)
    job["unit"] = math.sqrt(1.0 / hadamard_size(layout.value_dim))
    return job


def encode_launches(
    places: tuple[TensorPlace, TensorPlace | None],
    records: RecordPlace,
    accepted_address: int,
    counts: BlockCounts,
    layout: RecordLayout,
    kind: str,
    bounds: tuple[float, float],
) -> list[Launch]:
    """Keys (and values) of blocks into records. `accepted`: a byte a block that the caller set to 1; refusal clears it.

    bounds: largest relative RMS error of keys and of values, as they apply to the layout's bits.
    """
    keys, values = places
    if counts.records == 0:
        return []
    job = _key_job(keys, records, counts, layout)
    job["accepted"], job["limit"] = accepted_address, error_limit(bounds[0])
    found = [_launch("encode_keys", layout.key_bits, kind, job, layout.key_dim // 2, 0)]
    if values is not None:
        job = _value_job(values, records, counts, layout)
        job["accepted"], job["limit"] = accepted_address, error_limit(bounds[1])
        buffers = 2 if hadamard_size(layout.value_dim) > 128 or layout.value_bits == 3 else 0
        threads = 2 * value_segment(layout.value_dim)
        found.append(_launch("encode_values", layout.value_bits, kind, job, threads, buffers))
    return found


def decode_launches(
    records: RecordPlace,
    places: tuple[TensorPlace, TensorPlace | None],
    counts: BlockCounts,
    layout: RecordLayout,
    kind: str,
) -> list[Launch]:
    """Records into keys (and values), rounded to the element kind."""
    keys, values = places
    if counts.records == 0:
        return []
    job = _key_job(keys, records, counts, layout)
    found = [_launch("decode_keys", layout.key_bits, kind, job, layout.key_dim // 2, 0)]
    if values is not None:
        job = _value_job(values, records, counts, layout)
        buffers = 2 if hadamard_size(layout.value_dim) > 128 else 0
        threads = 2 * value_segment(layout.value_dim)
        found.append(_launch("decode_values", layout.value_bits, kind, job, threads, buffers))
    return found


def copy_launch(target: RecordPlace, source: RecordPlace, page_bytes: int, page_count: int) -> Launch | None:
    """Copies of page_count pages that do not overlap; offsets (and addresses) are multiples of 16. None for no page.

    ValueError for sizes, addresses or strides that are not multiples of 16.
    """
    if page_bytes < UNIT_BYTES or page_bytes % UNIT_BYTES or page_bytes >= _COUNT_LIMIT * UNIT_BYTES:
        raise ValueError(f"page bytes must be a positive multiple of {UNIT_BYTES}, got {page_bytes}")
    for name, place in (("target", target), ("source", source)):
        if not place.is_aligned():
            raise ValueError(
                f"{name} address and stride must be multiples of {UNIT_BYTES}, "
                f"got {place.address:#x} and {place.block_stride}"
            )
    if page_count == 0:
        return None
    units = page_bytes // UNIT_BYTES
    across = 32
    while across < _COPY_THREADS and across * _UNITS_A_THREAD < units:
        across *= 2
    rows = _COPY_THREADS // across
    chunks = -(-units // (across * _UNITS_A_THREAD))
    if page_count * chunks >= _COUNT_LIMIT:
        raise ValueError(f"too much for one launch: {page_count} pages of {page_bytes} bytes")
    job: Job = np.zeros(1, COPY_JOB)
    for name, place in (("target", target), ("source", source)):
        job[name], job[f"{name}_offsets"], job[f"{name}_stride"] = (
            place.address,
            place.offsets_address,
            place.block_stride,
        )
    job["page_units"], job["page_count"], job["page_chunks"] = units, page_count, chunks
    return Launch("pages", "copy_pages", -(-page_count * chunks // rows), (across, rows), 0, job)


def record_runs(block_tokens: int) -> int:
    """Runs of 16 tokens in a block."""
    return block_tokens // RUN_TOKENS
