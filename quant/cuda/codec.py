"""int4 blocks by CUDA kernels: tensors to launches, and launches onto torch's current stream.

`cuda_codec_for` of the package hands out one CudaCodec a device; the codec `int4` asks it. Bit-equal to the torch
reference, refusals included. Any thread; work goes to the calling thread's current torch stream of that device.

What does not fit a kernel (a last dimension that is not contiguous, an odd address) is copied once into place; what the
kernels do not do at all is not taken, and the caller goes on with torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

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


def _tensor_place(tensor: torch.Tensor, run: HeadRun) -> TensorPlace:
    """The part of [N, L, H, T, dim] that a head run covers."""
    size = tensor.element_size()
    block, layer, head, token, _ = (stride * size for stride in tensor.stride())
    first = (run.layers.start or 0) * layer + (run.kv_heads.start or 0) * head
    return TensorPlace(tensor.data_ptr() + first, block, layer, head, token)


def _parts(
    keys: torch.Tensor, values: torch.Tensor | None, payload: torch.Tensor, runs: Sequence[HeadRun]
) -> list[_Part]:
    """keys [N, L, H, T, Dk], values [N, L, H, T, Dv] or None, payload uint8 [N, encoded_bytes]."""
    blocks, layers, kv_heads, tokens, key_dim = keys.shape
    found = []
    for run in runs:
        first_layer, last_layer, _ = run.layers.indices(layers)
        first_head, last_head, _ = run.kv_heads.indices(kv_heads)
        counts = BlockCounts(blocks, last_layer - first_layer, last_head - first_head, record_runs(tokens))
        layout = record_layout(key_dim, 0 if values is None else values.shape[-1], *run.bits)
        places = _tensor_place(keys, run), None if values is None else _tensor_place(values, run)
        records = RecordPlace(payload.data_ptr() + run.offset, payload.stride(0))
        found.append(_Part(counts, layout, places, records))
    return found


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
        launches: list[Launch] = []
        for part in _parts(keys, values, target, runs):
            bounds = part_bound(error_bound, part.layout.key_bits), part_bound(error_bound, part.layout.value_bits)
            launches += encode_launches(
                part.places, part.records, accepted.data_ptr(), part.counts, part.layout, KIND_OF[keys.dtype], bounds
            )
        self._launcher.run(launches)
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
        launches: list[Launch] = []
        for part in _parts(key_target, value_target, source, runs):
            launches += decode_launches(part.records, part.places, part.counts, part.layout, KIND_OF[keys.dtype])
        self._launcher.run(launches)
        if key_target is not keys:
            keys.copy_(key_target)
        if values is not None and value_target is not None and value_target is not values:
            values.copy_(value_target)


class TorchStream:
    """Launcher on torch's current stream of a device, so that kernels run in order with torch's own."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def run(self, launches: list[Launch]) -> None:
        """Enqueues; returns before they ran."""
        self._device.launch(launches, torch.cuda.current_stream(self._device.index).cuda_stream)
