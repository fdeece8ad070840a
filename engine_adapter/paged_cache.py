"""The slab as attention sees it: write this step's KV by slot, read blocks by table entry, full or INT4.

One object per model and device, over one `allocator.Slab`. Used by the thread that runs the model, while it holds no
lock: the store hands out only slots that stay as they are until the step is over.

Table entries are int64, slot << 1 | form: form 0 is a block in full precision, form 1 a block of INT4 records; -1 is
a block that the window dropped. Layout of a full block: [layers, kv_heads, (K, V), block_tokens, dim]. All offsets
are 64 bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from allocator import COLD, ConfigError, KVGeometry, UsageError
from engine_adapter.batch import Int64Array
from engine_adapter.native_layout import GroupLayout, group_layout
from quant import BlockShape, native, record_bytes, unpack_records
from quant.int4_records import RecordParts
from quant.record_layout import RUN_TOKENS

if TYPE_CHECKING:
    from allocator import Slab
    from quant import BlockCodec


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where rows of a group lie for its first layer; other layers add a constant (PagedCache.read_full, write).

    keys, values: int64 tensors. In a dense group they number rows of one matrix (values None: they are in `keys`,
    after the keys); else they hold slots, and for a write the offsets inside them.
    places: for a write in C, the slot mapping itself, int64[tokens]; the tensors are then empty.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    places: Int64Array | None = None


class PagedCache:
    """Reads and writes the KV of every layer in a slab.

    slab: allocator.Slab cut for `geometry`. cold_codec: codec of the INT4 slots, None when there are none.
    Raises ConfigError when slab and geometry do not fit each other.
    """

    def __init__(self, slab: Slab, geometry: KVGeometry, cold_codec: BlockCodec | None = None) -> None:
        self.slab = slab
        self.geometry = geometry
        self.cold_codec = cold_codec
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._groups = [_GroupRows(slab, geometry, group, cold_codec) for group in range(len(geometry.groups))]
        self.device = self._groups[0].full.device
        self._places = {
            layer: (group, position)
            for group, found in enumerate(geometry.groups)
            for position, layer in enumerate(found.layers)
        }

    def place(self, layer: int) -> tuple[int, int]:
        """(group, position inside the group) of a model layer. Raises UsageError for a layer the geometry lacks."""
        try:
            return self._places[layer]
        except KeyError:
            raise UsageError(
                f"layer {layer} is in no cache group; the geometry has {len(self._places)} layers"
            ) from None

    def native_layout(self, group: int) -> GroupLayout | None:
        """Where the group lies, for the C kernels; None where they cannot work on it."""
        return self._groups[group].native

    # ---- write

    def write_index(self, group: int, slot_mapping: Int64Array) -> RowIndex:
        """Where tokens are written: int64[tokens], slot * block_tokens + offset. Once per step, good for all layers."""
        return self._groups[group].write_index(slot_mapping)

    def write(
        self, layer: int, slot_mapping: Int64Array | RowIndex, keys: torch.Tensor, values: torch.Tensor | None
    ) -> None:
        """Store the KV of tokens in one layer.

        slot_mapping: int64[tokens], or the RowIndex made of it. keys: Tensor[tokens, kv_heads, key_dim];
        values: Tensor[tokens, kv_heads, value_dim], None for a latent group; any strides, cast to the cache's dtype.
        """
        group, position = self.place(layer)
        rows = self._groups[group]
        index = slot_mapping if isinstance(slot_mapping, RowIndex) else rows.write_index(slot_mapping)
        expected = (rows.kv_heads, rows.key_dim), (rows.kv_heads, rows.value_dim)
        found = tuple(keys.shape[1:]), tuple(values.shape[1:]) if values is not None else (rows.kv_heads, 0)
        if found != expected:
            raise ConfigError(
                f"layer {layer} brings keys {list(keys.shape)} and values "
                f"{list(values.shape) if values is not None else None}; the geometry expects "
                f"[tokens, kv_heads, dim] with heads and dims {expected}"
            )
        rows.write(position, index, keys.to(self.dtype), None if values is None else values.to(self.dtype))

    # ---- read

    def full_index(self, group: int, slots: torch.Tensor) -> RowIndex:
        """Rows of full blocks: slots int64[..., blocks] of any shape, on the cache's device."""
        return self._groups[group].full_index(slots)

    def read_full(self, layer: int, index: RowIndex, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy full blocks out: shape (sequences, blocks) of the slots given to full_index.

        Returns keys Tensor[sequences, kv_heads, blocks * block_tokens, key_dim] and values likewise (a latent group's
        values are empty, dim 0), in the cache's dtype, contiguous. Bytes of unwritten tokens come along as they are.
        """
        group, position = self.place(layer)
        return self._groups[group].read_full(position, index, shape)

    def read_cold(
        self, layer: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Decode INT4 blocks: slots int64[blocks] -> keys Tensor[blocks, kv_heads, block_tokens, key_dim], values."""
        group, position = self.place(layer)
        return self._groups[group].read_cold(position, slots, dtype)

    def has_records(self, group: int) -> bool:
        """Whether read_records works for a group: the cold codec is int4 and the group has V."""
        return self._groups[group].has_records

    def read_records(self, layer: int, slots: torch.Tensor) -> RecordParts:
        """INT4 blocks taken apart but not decoded, for attention that folds scales: slots int64[blocks].

        Parts are as quant.unpack_records gives them; record (block * kv_heads + head) * runs + run, 16 tokens each.
        """
        group, position = self.place(layer)
        return self._groups[group].read_records(position, slots)

    def gather(self, layer: int, entries: Int64Array) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of one sequence, in order: entries int64[blocks], full and INT4 mixed, none dropped.

        Returns keys Tensor[kv_heads, blocks * block_tokens, key_dim] and values, in the cache's dtype. The caller
        cuts what lies beyond the written tokens. Raises UsageError for a dropped entry.
        """
        keys, values = self.gather_batch(layer, [entries])
        return keys[0], values[0]

    def gather_batch(self, layer: int, tables: Sequence[Int64Array]) -> tuple[torch.Tensor, torch.Tensor]:
        """KV of several sequences, each in order, padded to the longest with zeros.

        Returns keys Tensor[sequences, kv_heads, longest * block_tokens, key_dim] and values likewise.
        """
        group, _ = self.place(layer)
        rows = self._groups[group]
        longest = max(len(table) for table in tables)
        padded = np.full((len(tables), longest), -1, np.int64)
        for at, table in enumerate(tables):
            if (np.asarray(table) < 0).any():
                raise UsageError(f"layer {layer}: a table to gather holds a dropped block (entry -1)")
            padded[at, : len(table)] = table
        flat = padded.reshape(-1)
        shape = (len(tables), rows.kv_heads, longest, rows.block_tokens)
        keys = torch.zeros((*shape, rows.key_dim), dtype=self.dtype, device=self.device)
        values = torch.zeros((*shape, rows.value_dim), dtype=self.dtype, device=self.device)
        for form in (0, 1):
            found = np.flatnonzero((flat >= 0) & (flat & 1 == form))
            if not len(found):
                continue
            slots = self.tensor(flat[found] >> 1)
            if form == 0:
                found_keys, found_values = self.read_full(
                    layer, self.full_index(group, slots[:, None]), (len(found), 1)
                )
            else:
                found_keys, decoded = self.read_cold(layer, slots, self.dtype)
                found_values = found_keys[..., :0] if decoded is None else decoded
            sequence, block = self.tensor(found // longest), self.tensor(found % longest)
            keys[sequence, :, block] = found_keys
            values[sequence, :, block] = found_values
        return keys.flatten(2, 3), values.flatten(2, 3)

    def tensor(self, array: Int64Array) -> torch.Tensor:
        """An index array on the cache's device; a copy, so that the array may change while a device still reads."""
        return torch.tensor(array, dtype=torch.int64, device=self.device)


class _GroupRows:
    """One group's share of the slab. `dense`: keys and values of one dim, slots without gaps: one matrix of rows."""

    def __init__(self, slab: Slab, geometry: KVGeometry, group: int, cold_codec: BlockCodec | None) -> None:
        found = geometry.groups[group]
        self.group = group
        self.slab = slab
        self.layers = len(found.layers)
        self.nothing = torch.empty(0, dtype=torch.int64)
        self.kv_heads = found.kv_heads
        self.key_dim = found.key_dim
        self.value_dim = found.value_dim
        self.block_tokens = geometry.block_tokens
        self.full = slab.full_view(group)
        wanted = (self.layers, self.kv_heads, self.block_tokens * (self.key_dim + self.value_dim))
        if tuple(self.full.shape[1:]) != wanted or self.full.dtype != getattr(torch, geometry.dtype):
            raise ConfigError(
                f"the slab's blocks of group {group} are {list(self.full.shape[1:])} {self.full.dtype}; "
                f"the geometry expects {list(wanted)} {geometry.dtype}"
            )
        self.native = group_layout(slab, geometry, group, cold_codec)
        self.dense = self.full.is_contiguous() and self.key_dim == self.value_dim
        self.cold_codec = cold_codec
        self.cold_words: torch.Tensor | None = None
        self.cold_offsets: list[int] = []
        if not self.dense:
            self.keys_view = slab.keys_view(group)
            self.values_view = slab.values_view(group) if self.value_dim else None
            return
        self.parts = 2 * self.kv_heads
        self.block_rows = self.full.view(-1, self.block_tokens * self.key_dim)
        self.token_rows = self.full.view(-1, self.key_dim)
        heads = torch.arange(self.kv_heads, device=self.full.device)
        # Row of K of a head among a block's rows of one layer; V follows.
        self.part_rows = torch.stack((2 * heads, 2 * heads + 1))

    # ---- full blocks

    def write_index(self, slot_mapping: Int64Array) -> RowIndex:
        if self.native is not None:
            places = np.ascontiguousarray(slot_mapping, np.int64)
            limit = self.full.shape[0] * self.block_tokens
            if len(places) and not 0 <= places.min() <= places.max() < limit:
                raise UsageError(
                    f"group {self.group}: the slot mapping names places {places.min()}..{places.max()}; "
                    f"the slab has 0..{limit - 1}"
                )
            return RowIndex(self.nothing, None, places)
        mapping = torch.tensor(slot_mapping, dtype=torch.int64, device=self.full.device)
        slots, offsets = mapping // self.block_tokens, mapping % self.block_tokens
        if not self.dense:
            return RowIndex(slots, offsets)
        parts = self.part_rows * self.block_tokens
        base = slots * (self.layers * self.parts * self.block_tokens) + offsets
        rows = parts[:, None, :] + base[None, :, None]  # [K or V, tokens, kv_heads]
        return RowIndex(rows[0].reshape(-1), rows[1].reshape(-1))

    def write(self, position: int, index: RowIndex, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        if index.places is not None:
            self._write_native(position, index.places, keys, values)
            return
        assert index.values is not None
        if self.dense and values is not None:
            shift = position * self.parts * self.block_tokens
            self.token_rows.index_copy_(0, index.keys + shift, keys.reshape(-1, self.key_dim))
            self.token_rows.index_copy_(0, index.values + shift, values.reshape(-1, self.value_dim))
            return
        slots, offsets = index.keys, index.values
        self.keys_view[slots, position, :, offsets] = keys
        if values is not None and self.values_view is not None:
            self.values_view[slots, position, :, offsets] = values

    def _write_native(self, position: int, places: Int64Array, keys: torch.Tensor, values: torch.Tensor | None) -> None:
        assert self.native is not None
        if len(keys) != len(places) or (values is not None and len(values) != len(places)):
            raise UsageError(f"group {self.group}: got KV of {len(keys)} tokens for {len(places)} places")
        if keys.stride(2) != 1:
            keys = keys.contiguous()
        item = keys.element_size()
        address = token = head = 0
        if values is not None:
            if values.stride(2) != 1:
                values = values.contiguous()
            address, token, head = values.data_ptr(), values.stride(0) * item, values.stride(1) * item
        native.kernels.write_tokens(
            self.native.address, position, places.ctypes.data, len(places),
            keys.data_ptr(), keys.stride(0) * item, keys.stride(1) * item, address, token, head,
        )  # fmt: skip

    def full_index(self, slots: torch.Tensor) -> RowIndex:
        if not self.dense:
            return RowIndex(slots, None)
        base = slots * (self.layers * self.parts)
        # [K or V, sequences, kv_heads, blocks]
        rows = self.part_rows[:, None, :, None] + base[None, :, None, :]
        return RowIndex(rows.reshape(-1), None)

    def read_full(self, position: int, index: RowIndex, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        sequences, blocks = shape
        tokens = blocks * self.block_tokens
        if self.dense:
            found = torch.index_select(self.block_rows, 0, index.keys + position * self.parts)
            both = found.view(2, sequences, self.kv_heads, tokens, self.key_dim)
            return both[0], both[1]
        keys = self.keys_view[index.keys, position].transpose(1, 2)  # [sequences, kv_heads, blocks, block_tokens, dim]
        keys = keys.reshape(sequences, self.kv_heads, tokens, self.key_dim)
        if self.values_view is None:
            return keys, keys[..., :0]
        values = self.values_view[index.keys, position].transpose(1, 2)
        return keys, values.reshape(sequences, self.kv_heads, tokens, self.value_dim)

    # ---- INT4 blocks

    @property
    def has_records(self) -> bool:
        return self.cold_codec is not None and self.cold_codec.name == "int4" and self.value_dim > 0

    def read_cold(
        self, position: int, slots: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        codec: Any = self._codec_of_records()
        device = self.slab.device
        shape = (len(slots), 1, self.kv_heads, self.block_tokens)
        keys = torch.empty((*shape, self.key_dim), dtype=dtype, device=device)
        values = torch.empty((*shape, self.value_dim), dtype=dtype, device=device) if self.value_dim else None
        if hasattr(codec, "for_range"):  # bits may differ by layer
            codec = codec.for_range(slice(position, position + 1), slice(0, self.kv_heads))
        if not (hasattr(codec, "decode_slots") and codec.decode_slots(*self._places(position, slots), keys, values)):
            codec.decode_into(self._payload(position, slots), keys, values)
        return keys[:, 0], None if values is None else values[:, 0]

    def read_records(self, position: int, slots: torch.Tensor) -> RecordParts:
        payload = self._payload(position, slots)
        codec: Any = self.cold_codec
        runs = self.block_tokens // RUN_TOKENS
        pairs = [codec.bits.pair(position, head) for head in range(self.kv_heads)]
        found, at, head = [], 0, 0
        while head < self.kv_heads:
            count = 1
            while head + count < self.kv_heads and pairs[head + count] == pairs[head]:
                count += 1
            size = record_bytes(self.key_dim, self.value_dim, *pairs[head])
            records = payload[:, at : at + count * runs * size].reshape(-1, size)
            key_bits, value_bits = pairs[head]
            parts = unpack_records(records, self.key_dim, self.value_dim, key_bits=key_bits, value_bits=value_bits)
            found.append((parts, count * runs))
            head, at = head + count, at + count * runs * size
        return found[0][0] if len(found) == 1 else _join_heads(found, len(slots))

    def _payload(self, position: int, slots: torch.Tensor) -> torch.Tensor:
        """One layer's records, copied as words (bytes take 5 times as long): uint8[blocks, layer bytes]."""
        self._codec_of_records()
        if self.cold_words is None:
            self.cold_words = self.slab.cold_view(self.group).view(torch.int64)
            self.cold_offsets = self._layer_offsets()
        first, last = self.cold_offsets[position : position + 2]
        per_extent = self.cold_words.shape[1]
        words = self.cold_words[slots // per_extent, slots % per_extent, first // 8 : last // 8]
        return words.view(torch.uint8)

    def _codec_of_records(self) -> BlockCodec:
        if self.cold_codec is None:
            raise UsageError(f"group {self.group}: a table holds an INT4 entry, but the cache has no cold codec")
        return self.cold_codec

    def _places(self, position: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The slab's bytes, and where in them one layer's records of INT4 slots begin: int64[blocks]."""
        if not self.cold_offsets:
            self.cold_offsets = self._layer_offsets()
        layout, index = self.slab.layout, 2 * self.group + COLD
        extents, inside = slots // layout.per_extent[index], slots % layout.per_extent[index]
        places = extents * layout.extent_bytes + inside * layout.slot_bytes[index] + self.cold_offsets[position]
        return self.slab.bytes, places

    def _layer_offsets(self) -> list[int]:
        """First byte of each layer's records inside an INT4 slot, and the end; multiples of 64."""
        codec: Any = self.cold_codec
        shape = BlockShape(self.layers, self.kv_heads, self.block_tokens, self.key_dim, self.value_dim)
        return [heads[0] for heads in codec.head_offsets(shape)] + [codec.encoded_bytes(shape, self.full.dtype)]


def _join_heads(found: list[tuple[RecordParts, int]], blocks: int) -> RecordParts:
    """Parts of head ranges with different bits, put together: found holds (parts, records of a block)."""

    def join(name: str) -> torch.Tensor:
        parts = [getattr(one, name) for one, _ in found]
        shaped = [part.view(blocks, count, *part.shape[1:]) for part, (_, count) in zip(parts, found, strict=True)]
        return torch.cat(shaped, 1).flatten(0, 1)

    return RecordParts(*(join(field.name) for field in fields(RecordParts)))
