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


def _is_run(memory: torch.Tensor) -> bool:
    return memory.stride() == (1,) and memory.data_ptr() % UNIT_BYTES == 0


def _check_places(
    places_bytes: torch.Tensor, memory: torch.Tensor, parts: Sequence[_Part], runs: Sequence[HeadRun]
) -> None:
    """CodecError for places int64 [N] on the CPU that are off the grid or where a block would leave the memory."""
    last = max(
        run.offset + part.counts.records // part.counts.blocks * part.layout.record_bytes
        for run, part in zip(runs, parts, strict=True)
    )
    first, end = int(places_bytes.min()), int(places_bytes.max()) + last
    if first < 0 or end > memory.nbytes or bool((places_bytes % UNIT_BYTES).any()):
        raise CodecError(
            f"places must be multiples of {UNIT_BYTES} with {last} bytes each inside {memory.nbytes}, "
            f"got {places_bytes.tolist()[:8]}"
        )


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
        places_bytes: Sequence[int],
        runs: Sequence[HeadRun],
        error_bound: float,
    ) -> torch.Tensor | None:
        """Full slots straight into INT4 slots: bool [slots] accepted; the bytes of a refused one are unspecified.

        tensors: views of all full slots, keys [S, L, H, T, Dk] and values or None (Slab.keys_view, values_view).
        memory: uint8 [bytes], contiguous (the slab); places_bytes: of each INT4 slot in it, multiples of 16.
        None where kernels cannot address them so: gather the blocks first. CodecError for what is out of range.
        """
        keys, values = tensors
        if len(slots) != len(places_bytes) or not all(0 <= slot < keys.shape[0] for slot in slots):
            raise CodecError(f"expected slots 0..{keys.shape[0] - 1} and a place for each, got {slots}, {places_bytes}")
        if not (_fits(keys) and _is_run(memory)):
            return None
        if values is not None and not (_fits(values) and values.stride(0) == keys.stride(0)):
            return None
        accepted = torch.ones(len(slots), dtype=torch.uint8, device=keys.device)
        if len(slots):
            stride = keys.stride(0) * keys.element_size()
            rows = [[slot * stride for slot in slots], list(places_bytes)]
            tables = torch.tensor(rows, dtype=torch.int64).to(keys.device)
            records = RecordPlace(memory.data_ptr(), 0, tables[1].data_ptr())
            parts = _parts(keys, values, records, runs, (len(slots), tables.data_ptr()))
            _check_places(torch.tensor(places_bytes), memory, parts, runs)
            self._encode(parts, accepted, keys.dtype, error_bound)
        return accepted.view(torch.bool)  # the tables go now: torch's allocator reuses memory in stream order

    def decode_slots(
        self,
        memory: torch.Tensor,
        places_bytes: torch.Tensor,
        tensors: tuple[torch.Tensor, torch.Tensor | None],
        runs: Sequence[HeadRun],
    ) -> bool:
        """INT4 slots at byte offsets int64 [N] of memory into keys [N, L, H, T, Dk] and values. False as None above.

        Places on the device are taken as they are; looking at them would make the caller wait.
        """
        keys, values = tensors
        if not (_fits(keys) and _is_run(memory)) or (values is not None and not _fits(values)):
            return False
        if keys.shape[0]:
            table = places_bytes.to(device=keys.device, dtype=torch.int64).contiguous()
            parts = _parts(keys, values, RecordPlace(memory.data_ptr(), 0, table.data_ptr()), runs)
            if places_bytes.device.type == "cpu":
                _check_places(places_bytes, memory, parts, runs)
            self._decode(parts, keys.dtype)
        return True

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
