"""int4 blocks by CUDA kernels: tensors to launches, and launches onto torch's current stream.

`cuda_codec_for` of the package hands out one CudaCodec a device; the codec `int4` asks it. Bit-equal to the torch
reference, refusals included. Any thread; work goes to the calling thread's current torch stream of that device.

What does not fit a kernel (a last dimension that is not contiguous, an odd address) is copied once into place; what the
kernels do not do at all is not taken, and the caller goes on with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch

from quant.codec import CodecError
from quant.cuda.launches import (
    UNIT_BYTES,
    BlockCounts,
    Launch,
    RecordPlace,
    TensorPlace,
    decode_launches,
    encode_launches,
    record_runs,
)
from quant.error_bound import part_bound
from quant.record_layout import RecordLayout, record_layout

if TYPE_CHECKING:
    from quant.cuda.runtime import CudaDevice
    from quant.record_codec import HeadRun

KIND_OF = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Launcher(Protocol):
    """Runs launches in order. The runtime's is a CUDA stream; the tests' is the CPU."""

    def run(self, launches: list[Launch]) -> None:
        """Enqueues; may return before they ran."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A head run of a batch: its counts, layout, and where its tensors and records lie."""

    counts: BlockCounts
    layout: RecordLayout
    places: tuple[TensorPlace, TensorPlace | None]
    records: RecordPlace


def _tensor_place(tensor: torch.Tensor, run: HeadRun, offsets_address: int) -> TensorPlace:
    """The part of [N, L, H, T, dim] that a head run covers."""
    size = tensor.element_size()
    block, layer, head, token, _ = (stride * size for stride in tensor.stride())
    first = (run.layers.start or 0) * layer + (run.kv_heads.start or 0) * head
    return TensorPlace(tensor.data_ptr() + first, block, layer, head, token, offsets_address)


def _parts(
    keys: torch.Tensor,
    values: torch.Tensor | None,
    records: RecordPlace,
    runs: Sequence[HeadRun],
    slots: tuple[int, int] | None = None,
) -> list[_Part]:
    """keys [N, L, H, T, Dk], values [N, L, H, T, Dv] or None. `slots`: (count, address of a table of byte offsets)."""
    blocks, layers, kv_heads, tokens, key_dim = keys.shape
    count, table = slots or (blocks, 0)
    found = []
    for run in runs:
        first_layer, last_layer, _ = run.layers.indices(layers)
        first_head, last_head, _ = run.kv_heads.indices(kv_heads)
        counts = BlockCounts(count, last_layer - first_layer, last_head - first_head, record_runs(tokens))
        layout = record_layout(key_dim, 0 if values is None else values.shape[-1], *run.bits)
        places = _tensor_place(keys, run, table), None if values is None else _tensor_place(values, run, table)
        found.append(_Part(counts, layout, places, replace(records, address=records.address + run.offset)))
    return found


def _rows(payload: torch.Tensor) -> RecordPlace:
    """Where payload uint8 [N, encoded_bytes] lies."""
    return RecordPlace(payload.data_ptr(), payload.stride(0))


def _fits(tensor: torch.Tensor) -> bool:
    """Four elements at once: contiguous rows, everything else a multiple of four elements."""
    step = 4 * tensor.element_size()
    return tensor.stride(-1) == 1 and not any(
        part % step
        for part in (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    )


def _aligned_rows(payload: torch.Tensor) -> bool:
    return payload.stride(-1) == 1 and not (payload.data_ptr() % UNIT_BYTES or payload.stride(0) % UNIT_BYTES)


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialised tensor like it, contiguous and at the start of its own allocation."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class CudaCodec:
    """Encodes and decodes whole batches on one device. `launcher` belongs to that device."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def encode(
        self,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        out: torch.Tensor,
        runs: Sequence[HeadRun],
        error_bound: float,
    ) -> torch.Tensor:
        """keys [N, L, H, T, Dk], values [N, L, H, T, Dv] or None -> out uint8 [N, encoded_bytes]; bool [N] accepted.

        Checked arguments (RecordCodec.encode_batch), bf16, fp16 or fp32, any strides. The tensors may be given back to
        torch's allocator at once: it reuses memory in stream order.
        """
        accepted = torch.ones(keys.shape[0], dtype=torch.uint8, device=keys.device)
        if keys.shape[0] == 0:
            return accepted.view(torch.bool)
        keys = keys if _fits(keys) else _fresh(keys).copy_(keys)
        if values is not None and not _fits(values):
            values = _fresh(values).copy_(values)
        target = out if _aligned_rows(out) else _fresh(out)
        self._encode(_parts(keys, values, _rows(target), runs), accepted, keys.dtype, error_bound)
        if target is not out:
            out.copy_(target)
        return accepted.view(torch.bool)

    def decode(
        self, payload: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, runs: Sequence[HeadRun]
    ) -> None:
        """payload uint8 [N, encoded_bytes] into keys [N, L, H, T, Dk] and values, any strides."""
        if keys.shape[0] == 0:
            return
        source = payload if _aligned_rows(payload) else _fresh(payload).copy_(payload)
        key_target = keys if _fits(keys) else _fresh(keys)
        value_target = values if values is None or _fits(values) else _fresh(values)
        self._decode(_parts(key_target, value_target, _rows(source), runs), keys.dtype)
        if key_target is not keys:
            keys.copy_(key_target)
        if values is not None and value_target is not None and value_target is not values:
            values.copy_(value_target)

    # ---- in place: slots of a slab, without packing blocks together first

    def encode_slots(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor | None],
        slots: Sequence[int],
        memory: torch.Tensor,
        offsets: Sequence[int],
        runs: Sequence[HeadRun],
        error_bound: float,
    ) -> torch.Tensor:
        """Full slots straight into INT4 slots: bool [slots] accepted; the bytes of a refused one are unspecified.

        tensors: views of all full slots, keys [S, L, H, T, Dk] and values or None (Slab.keys_view, values_view).
        memory: uint8, one dimension, contiguous (the slab); offsets: bytes of each INT4 slot in it, multiples of 16.
        Raises CodecError for slots and offsets that are out of range or tensors that kernels cannot address.
        """
        keys = tensors[0]
        accepted = torch.ones(len(slots), dtype=torch.uint8, device=keys.device)
        if len(slots):
            parts, tables = self._slot_parts(tensors, slots, memory, offsets, runs)
            self._encode(parts, accepted, keys.dtype, error_bound)
            del tables  # enqueued: torch's allocator reuses memory in stream order
        return accepted.view(torch.bool)

    def decode_slots(
        self,
        memory: torch.Tensor,
        offsets: Sequence[int],
        tensors: tuple[torch.Tensor, torch.Tensor | None],
        slots: Sequence[int],
        runs: Sequence[HeadRun],
    ) -> None:
        """INT4 slots straight into full slots; arguments as for encode_slots."""
        if len(slots):
            parts, tables = self._slot_parts(tensors, slots, memory, offsets, runs)
            self._decode(parts, tensors[0].dtype)
            del tables

    def _slot_parts(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor | None],
        slots: Sequence[int],
        memory: torch.Tensor,
        offsets: Sequence[int],
        runs: Sequence[HeadRun],
    ) -> tuple[list[_Part], torch.Tensor]:
        """The parts, and the int64 [2, slots] tables of byte offsets on the device that they point into."""
        keys, values = tensors
        stride = keys.stride(0) * keys.element_size()
        if len(offsets) != len(slots) or not all(0 <= slot < keys.shape[0] for slot in slots):
            raise CodecError(f"expected slots 0..{keys.shape[0] - 1} and as many offsets, got {slots} and {offsets}")
        if not _fits(keys) or (values is not None and (not _fits(values) or values.stride(0) != keys.stride(0))):
            raise CodecError("slots must be views of one slab with contiguous rows")
        tables = torch.tensor([[slot * stride for slot in slots], list(offsets)], dtype=torch.int64).to(keys.device)
        records = RecordPlace(memory.data_ptr(), 0, tables[1].data_ptr())
        parts = _parts(keys, values, records, runs, (len(slots), tables.data_ptr()))
        block_bytes = max(
            run.offset + part.counts.records // part.counts.blocks * part.layout.record_bytes
            for run, part in zip(runs, parts, strict=True)
        )
        if memory.stride() != (1,) or memory.data_ptr() % UNIT_BYTES:
            raise CodecError("memory must be one contiguous run of bytes")
        if any(offset % UNIT_BYTES or not 0 <= offset <= memory.nbytes - block_bytes for offset in offsets):
            raise CodecError(f"offsets must be multiples of {UNIT_BYTES} inside {memory.nbytes} bytes, got {offsets}")
        return parts, tables

    # ---- launches

    def _encode(self, parts: list[_Part], accepted: torch.Tensor, dtype: torch.dtype, error_bound: float) -> None:
        launches: list[Launch] = []
        for part in parts:
            bounds = part_bound(error_bound, part.layout.key_bits), part_bound(error_bound, part.layout.value_bits)
            launches += encode_launches(
                part.places, part.records, accepted.data_ptr(), part.counts, part.layout, KIND_OF[dtype], bounds
            )
        self._launcher.run(launches)

    def _decode(self, parts: list[_Part], dtype: torch.dtype) -> None:
        launches: list[Launch] = []
        for part in parts:
            launches += decode_launches(part.records, part.places, part.counts, part.layout, KIND_OF[dtype])
        self._launcher.run(launches)


def current_stream(index: int) -> int:
    """Raw handle of torch's current stream of a device, for fences and copiers."""
    return int(torch.cuda.current_stream(index).cuda_stream)


class TorchStream:
    """Launcher on torch's current stream of a device, so that kernels run in order with torch's own."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def run(self, launches: list[Launch]) -> None:
        """Enqueues; returns before they ran."""
        self._device.launch(launches, current_stream(self._device.index))
