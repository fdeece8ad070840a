"""What int4 and int8k share: blocks cut into records of 16 tokens, in (layer, head, run) order, in cache-sized pieces.

Stateless; any thread. Subclasses say how long a record is and how a batch of records is coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quant.codec import BlockShape, BlockTooLossy, CodecError, DtypeName, HeadError, Payload
from quant.error_bound import relative_rms
from quant.native import codec as native
from quant.record_layout import RUN_TOKENS, BitsTable, RecordLayout, check_dims, check_run_tokens
from quant.scratch import scratch
from quant.tensor_checks import as_payload, check_block_shape, check_out, check_places, resolve_dtype, shape_of

if TYPE_CHECKING:
    from quant.cuda.codec import CudaCodec

PIECE_ELEMENTS = 1 << 19  # of K and V together: 1 MiB of each in fp32
LOSSY_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Heads whose records lie one after another in the payload and have the same bits.

    `layers` and `kv_heads` are index ranges; more than one layer only when kv_heads is all of them.
    """

    layers: slice
    kv_heads: slice
    bits: tuple[int, int]
    offset: int
    record_bytes: int


def _part(keys: torch.Tensor, values: torch.Tensor | None, run: HeadRun) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Views of the run's layers and heads of [N, L, H, T, dim]."""
    some = None if values is None or not values.shape[-1] else values[:, run.layers, run.kv_heads]
    return keys[:, run.layers, run.kv_heads], some


class RecordCodec(ABC):
    """Base of the lossy codecs. Implements BlockCodec but for `name`, record_bytes, coding and validation."""

    exact = False

    def __init__(self, bits: BitsTable, error_bound: float) -> None:
        self._bits = bits
        self._error_bound = error_bound

    # ---- what a codec defines

    @property
    @abstractmethod
    def name(self) -> str:
        """Registry name."""

    @abstractmethod
    def record_bytes(self, key_dim: int, value_dim: int, bits: tuple[int, int]) -> int:
        """Bytes of one record."""

    @abstractmethod
    def _encode_piece(
        self, keys: torch.Tensor, values: torch.Tensor | None, records: torch.Tensor, bits: tuple[int, int]
    ) -> torch.Tensor:
        """[P, 16, dim], any strides, into records uint8 [P, record_bytes]; bool [P] accepted."""

    @abstractmethod
    def _decode_piece(
        self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None, bits: tuple[int, int]
    ) -> None:
        """records [P, record_bytes] into keys and values of any shape with as many elements."""

    @abstractmethod
    def _validate_piece(self, records: torch.Tensor, dims: tuple[int, int], bits: tuple[int, int]) -> torch.Tensor:
        """bool [P]."""

    def _native_layout(self, dims: tuple[int, int], bits: tuple[int, int]) -> RecordLayout | None:
        """Layout of records that the C kernels code as this codec does; None where they do not."""
        return None

    def _cuda(self, operation: str, tensor: torch.Tensor) -> CudaCodec | None:
        """CUDA kernels that do the operation ("int4_encode", "int4_decode") where the tensor lies, if there are any."""
        return None

    # ---- sizes

    def encoded_bytes(self, shape: BlockShape, dtype: DtypeName) -> int:
        """Payload bytes of one block. Raises CodecError for dims, block_tokens or dtypes the codec does not take."""
        check_block_shape(shape)
        self._check_shape(shape, resolve_dtype(dtype))
        runs = shape.block_tokens // RUN_TOKENS
        heads = [(run, self._head_count(run, shape)) for run in self._head_runs(shape)]
        return sum(run.record_bytes * count * runs for run, count in heads)

    def head_offsets(self, shape: BlockShape) -> list[list[int]]:
        """[layers][kv_heads]: byte offset of a head's first record inside the payload."""
        runs = shape.block_tokens // RUN_TOKENS
        offsets: list[list[int]] = []
        at = 0
        for layer in range(shape.layers):
            offsets.append([])
            for head in range(shape.kv_heads):
                offsets[-1].append(at)
                at += runs * self.record_bytes(shape.key_dim, shape.value_dim, self._bits.pair(layer, head))
        return offsets

    def _check_shape(self, shape: BlockShape, dtype: torch.dtype) -> None:
        check_dims(shape.key_dim, shape.value_dim)
        check_run_tokens(shape)
        self._bits.check(shape)
        if dtype not in LOSSY_DTYPES:
            raise CodecError(f"codec {self.name!r} takes bfloat16, float16 and float32, got {dtype}")

    def _head_count(self, run: HeadRun, shape: BlockShape) -> int:
        layers, heads = run.layers.indices(shape.layers), run.kv_heads.indices(shape.kv_heads)
        return (layers[1] - layers[0]) * (heads[1] - heads[0])

    def _head_runs(self, shape: BlockShape) -> list[HeadRun]:
        """The block's heads in payload order, as few runs as the bits table allows."""
        size = {
            bits: self.record_bytes(shape.key_dim, shape.value_dim, bits)
            for bits in {self._bits.uniform, *(pair for row in self._bits.rows for pair in row)}
        }
        if not self._bits.rows:
            bits = self._bits.uniform
            return [HeadRun(slice(0, shape.layers), slice(0, shape.kv_heads), bits, 0, size[bits])]
        offsets, found = self.head_offsets(shape), []
        for layer in range(shape.layers):
            start = 0
            for head in range(1, shape.kv_heads + 1):
                bits = self._bits.pair(layer, start)
                if head == shape.kv_heads or self._bits.pair(layer, head) != bits:
                    place = offsets[layer][start]
                    found.append(HeadRun(slice(layer, layer + 1), slice(start, head), bits, place, size[bits]))
                    start = head
        return found

    def _pieces(self, shape: BlockShape, blocks: int) -> Iterator[tuple[slice, slice, HeadRun]]:
        """(blocks, layers, run) pieces of about PIECE_ELEMENTS, covering everything once."""
        for run in self._head_runs(shape):
            first, last, _ = run.layers.indices(shape.layers)
            per_layer = shape.element_count // shape.layers
            layer_step = max(1, min(last - first, PIECE_ELEMENTS // per_layer))
            block_step = max(1, PIECE_ELEMENTS // (per_layer * layer_step))
            for block in range(0, blocks, block_step):
                for layer in range(first, last, layer_step):
                    yield slice(block, block + block_step), slice(layer, min(last, layer + layer_step)), run

    def _records_view(
        self, payload: torch.Tensor, blocks: slice, layers: slice, run: HeadRun, runs: int
    ) -> torch.Tensor:
        """uint8 [blocks, heads * runs of the piece, record_bytes], a view of payload [N, encoded_bytes]."""
        heads = run.kv_heads.stop - run.kv_heads.start
        skipped = (layers.start - run.layers.start) * heads * runs
        count = (layers.stop - layers.start) * heads * runs
        start = run.offset + skipped * run.record_bytes
        part = payload[blocks, start : start + count * run.record_bytes]
        return part.view(part.shape[0], count, run.record_bytes)

    def _native_runs(self, shape: BlockShape, *tensors: torch.Tensor | None) -> list[tuple[HeadRun, RecordLayout]]:
        """The head runs with the layouts of their records, for the C kernels; [] where those are not to be had."""
        if not native.usable(*tensors):
            return []
        dims = shape.key_dim, shape.value_dim
        found = [(run, self._native_layout(dims, run.bits)) for run in self._head_runs(shape)]
        return [(run, layout) for run, layout in found if layout is not None]

    # ---- slots of a slab, in place

    def encode_slots(
        self,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        slots: Sequence[int],
        memory: torch.Tensor,
        places_bytes: Sequence[int],
    ) -> torch.Tensor | None:
        """Encode blocks `slots` of keys [S, L, H, T, Dk] and values, without a copy, into memory uint8 [bytes].

        Block i goes to memory[places_bytes[i]:]. bool [len(slots)] accepted; None where there is no kernel for it:
        gather the blocks then and call encode_batch. Raises CodecError for shapes and for what is out of range.
        """
        shape = shape_of(keys, values, batch_dims=1)
        size = self.encoded_bytes(shape, keys.dtype)
        if coder := self._cuda("int4_encode", keys):
            given = keys, values if shape.value_dim else None
            return coder.encode_slots(given, slots, memory, places_bytes, self._head_runs(shape), self._error_bound)
        native_runs = self._native_runs(shape, keys, values, memory)
        if not native_runs or keys.stride(-1) != 1 or (values is not None and values.stride(-1) != 1):
            return None
        if slots and not 0 <= min(slots) <= max(slots) < keys.shape[0]:
            raise CodecError(f"expected slots in 0..{keys.shape[0] - 1}, got {slots}")
        check_places(torch.tensor(places_bytes, dtype=torch.int64), memory, len(slots), size)
        accepted = torch.ones(len(slots), dtype=torch.bool)
        for run, layout in native_runs:
            places = [place + run.offset for place in places_bytes]
            parts = _part(keys, values, run)
            accepted &= native.encode_slots(*parts, slots, memory, places, layout, self._error_bound)
        return accepted

    def decode_slots(
        self, memory: torch.Tensor, places_bytes: torch.Tensor, keys: torch.Tensor, values: torch.Tensor | None
    ) -> bool:
        """Decode the blocks at byte offsets int64 [N] of memory uint8 [bytes] into keys [N, L, H, T, Dk] and values.

        False where there is no kernel for it: gather the payloads then and call decode_into.
        """
        shape = shape_of(keys, values, batch_dims=1)
        size = self.encoded_bytes(shape, keys.dtype)
        if coder := self._cuda("int4_decode", keys):
            given = keys, values if shape.value_dim else None
            return coder.decode_slots(memory, places_bytes, given, self._head_runs(shape))
        native_runs = self._native_runs(shape, keys, values, memory)
        if native_runs:
            check_places(places_bytes, memory, keys.shape[0], size)
        for run, layout in native_runs:
            native.decode_blocks(memory, *_part(keys, values, run), layout, offsets=places_bytes + run.offset)
        return bool(native_runs)

    # ---- encode

    def encode_batch(self, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """keys [N, L, H, T, Dk], values [N, L, H, T, Dv] or None -> out uint8 [N, encoded_bytes]; bool [N] accepted."""
        shape = shape_of(keys, values, batch_dims=1)
        check_out(out, (keys.shape[0], self.encoded_bytes(shape, keys.dtype)), keys.device)
        if coder := self._cuda("int4_encode", keys):
            given = keys, values if shape.value_dim else None
            return coder.encode(*given, out, self._head_runs(shape), self._error_bound)
        accepted = torch.ones(keys.shape[0], dtype=torch.bool, device=keys.device)
        if native_runs := self._native_runs(shape, keys, values):
            for run, layout in native_runs:
                parts = _part(keys, values, run)
                accepted &= native.encode_blocks(*parts, out[:, run.offset :], layout, self._error_bound)
            return accepted
        runs = shape.block_tokens // RUN_TOKENS
        for blocks, layers, run in self._pieces(shape, keys.shape[0]):
            key_part = keys[blocks, layers, run.kv_heads].reshape(-1, RUN_TOKENS, shape.key_dim)
            value_part = None
            if values is not None and shape.value_dim:
                value_part = values[blocks, layers, run.kv_heads].reshape(-1, RUN_TOKENS, shape.value_dim)
            view = self._records_view(out, blocks, layers, run, runs)
            records = scratch("records", (key_part.shape[0], run.record_bytes), torch.uint8, keys.device)
            good = self._encode_piece(key_part, value_part, records, run.bits)
            view.copy_(records.view(view.shape))
            accepted[blocks] &= good.view(view.shape[:2]).all(1)
        return accepted

    def encode_into(self, keys: torch.Tensor, values: torch.Tensor | None, out: torch.Tensor) -> None:
        """Encode [..., L, H, T, dim] into out [..., encoded_bytes]. Raises CodecError, BlockTooLossy."""
        batch = max(0, keys.ndim - 4)
        shape = shape_of(keys, values, batch)
        check_out(out, (*keys.shape[:batch], self.encoded_bytes(shape, keys.dtype)), keys.device)
        if batch == 0:
            keys, values, out = keys[None], None if values is None else values[None], out[None]
        if batch > 1:
            for index in range(keys.shape[0]):
                self.encode_into(keys[index], None if values is None else values[index], out[index])
            return
        accepted = self.encode_batch(keys, values, out)
        if not bool(accepted.all()):
            raise self._too_lossy(keys, values if shape.value_dim else None, accepted)

    def encode(self, keys: torch.Tensor, values: torch.Tensor | None) -> bytes:
        """Payload of one block. Raises CodecError, BlockTooLossy."""
        shape = shape_of(keys, values, batch_dims=0)
        out = torch.empty(self.encoded_bytes(shape, keys.dtype), dtype=torch.uint8, device=keys.device)
        self.encode_into(keys, values, out)
        return out.cpu().numpy().tobytes()

    def _too_lossy(self, keys: torch.Tensor, values: torch.Tensor | None, accepted: torch.Tensor) -> BlockTooLossy:
        """The refused heads of [N, L, H, T, dim], measured by encoding again and comparing in float64."""
        errors = []
        for block in (~accepted).nonzero().flatten().tolist():
            shape = shape_of(keys[block], None if values is None else values[block], batch_dims=0)
            for _, layers, run in self._pieces(shape, 1):
                part = (layers, run.kv_heads)
                heads = run.kv_heads.stop - run.kv_heads.start
                tensors = [keys[block][part].reshape(-1, RUN_TOKENS, shape.key_dim)]
                if values is not None:
                    tensors.append(values[block][part].reshape(-1, RUN_TOKENS, shape.value_dim))
                errors += [
                    HeadError(block, layers.start + index // heads, run.kv_heads.start + index % heads, *found)
                    for index, found in self._measure(tensors, run.bits, shape.block_tokens // RUN_TOKENS)
                ]
        worst = max((error.relative_error for error in errors), default=float("nan"))
        return BlockTooLossy(
            f"{int((~accepted).sum())} of {len(accepted)} blocks refused by codec {self.name!r}: {len(errors)} head "
            f"parts, worst relative RMS error {worst:.4g} against bound {self._error_bound}",
            tuple(errors),
        )

    def _measure(
        self, tensors: list[torch.Tensor], bits: tuple[int, int], runs: int
    ) -> list[tuple[int, tuple[str, float, float]]]:
        """(head index, (part, relative error, bound)) of each part to blame, for heads with a refused record."""
        keys, values = tensors[0], tensors[1] if len(tensors) > 1 else None
        size = self.record_bytes(keys.shape[-1], 0 if values is None else values.shape[-1], bits)
        records = torch.empty((keys.shape[0], size), dtype=torch.uint8, device=keys.device)
        good = self._encode_piece(keys, values, records, bits).view(-1, runs).all(1)
        decoded = [torch.empty_like(tensor, dtype=torch.float32) for tensor in tensors]
        self._decode_piece(records, decoded[0], decoded[1] if len(decoded) > 1 else None, bits)
        worst = [relative_rms(a, b).view(-1, runs).amax(1).tolist() for a, b in zip(tensors, decoded, strict=True)]
        found = []
        for head in (~good).nonzero().flatten().tolist():
            parts = [
                (part, errors[head], bound)
                for part, errors, bound in zip(("keys", "values"), worst, self._bounds(bits), strict=False)
            ]
            over = [part for part in parts if part[1] > part[2]]
            found += [(head, part) for part in over or [max(parts, key=lambda part: part[1] / part[2])]]
        return found

    def _bounds(self, bits: tuple[int, int]) -> tuple[float, float]:
        """Error bounds of keys and values."""
        return self._error_bound, self._error_bound

    # ---- decode

    def decode_into(self, payload: Payload, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        """Decode payload [..., encoded_bytes] into keys [..., L, H, T, Dk] and values. Raises CodecError."""
        batch = max(0, keys.ndim - 4)
        shape = shape_of(keys, values, batch)
        source = as_payload(payload, (*keys.shape[:batch], self.encoded_bytes(shape, keys.dtype)), keys.device)
        if batch == 0:
            source, keys, values = source[None], keys[None], None if values is None else values[None]
        if batch > 1:
            for index in range(keys.shape[0]):
                self.decode_into(source[index], keys[index], None if values is None else values[index])
            return
        if coder := self._cuda("int4_decode", keys):
            coder.decode(source, keys, values if shape.value_dim else None, self._head_runs(shape))
            return
        if native_runs := self._native_runs(shape, source, keys, values):
            for run, layout in native_runs:
                native.decode_blocks(source[:, run.offset :], *_part(keys, values, run), layout)
            return
        runs = shape.block_tokens // RUN_TOKENS
        for blocks, layers, run in self._pieces(shape, keys.shape[0]):
            records = self._records_view(source, blocks, layers, run, runs).reshape(-1, run.record_bytes)
            value_part = values[blocks, layers, run.kv_heads] if values is not None and shape.value_dim else None
            self._decode_piece(records, keys[blocks, layers, run.kv_heads], value_part, run.bits)

    def decode(self, payload: Payload, shape: BlockShape, dtype: DtypeName) -> tuple[torch.Tensor, torch.Tensor | None]:
        """keys [L, H, T, Dk] and values in `dtype`, on the payload's device. Raises CodecError."""
        kind = resolve_dtype(dtype)
        device = payload.device if isinstance(payload, torch.Tensor) else torch.device("cpu")
        source = as_payload(payload, (self.encoded_bytes(shape, kind),), device)
        keys = torch.empty(shape.keys_shape, dtype=kind, device=device)
        values = torch.empty(shape.values_shape, dtype=kind, device=device) if shape.value_dim else None
        self.decode_into(source, keys, values)
        return keys, values

    def validate(self, payload: Payload, shape: BlockShape, dtype: DtypeName) -> torch.Tensor:
        """bool [...]: could this codec have written the payload [..., encoded_bytes]; False for a wrong length."""
        size = self.encoded_bytes(shape, dtype)
        source = as_payload(payload, None, None)
        lead = source.shape[:-1]
        if source.ndim == 0 or source.shape[-1] != size:
            return torch.zeros(lead, dtype=torch.bool, device=source.device)
        source = source.reshape(-1, size)
        good = torch.ones(source.shape[0], dtype=torch.bool, device=source.device)
        runs = shape.block_tokens // RUN_TOKENS
        if native_runs := self._native_runs(shape, source):
            for run, layout in native_runs:
                good &= native.validate_blocks(source[:, run.offset :], layout, (1, self._head_count(run, shape), runs))
            return good.view(lead)
        for blocks, layers, run in self._pieces(shape, source.shape[0]):
            view = self._records_view(source, blocks, layers, run, runs)
            records = view.reshape(-1, run.record_bytes)
            fine = self._validate_piece(records, (shape.key_dim, shape.value_dim), run.bits)
            good[blocks] &= fine.view(view.shape[:2]).all(1)
        return good.view(lead)
