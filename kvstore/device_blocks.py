"""The bytes of device blocks: the one file of `kvstore` that imports torch.

`DeviceBlocks` owns the slab and does what the store decides: encode full slots into INT4 slots, copy a slot for
copy on write, zero the unwritten end of a fresh block, and hand out a slot's bytes to a tier. It decides nothing
and keeps no state about blocks. Methods may run on an executor's thread; the store fences the slots they touch
(a block in flight is neither handed out nor evicted), so no lock is needed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from allocator import COLD, FULL, ConfigError, KVGeometry, Slab
from kvstore.tier import as_byte_row
from quant import BlockShape, CodecError, get_codec
from quant.native import pages

if TYPE_CHECKING:
    from allocator import ExtentLayout
    from kvstore.tier import ByteRow
    from quant import BlockCodec

_TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def block_shapes(geometry: KVGeometry) -> tuple[BlockShape, ...]:
    """One codec shape per cache group of `geometry`."""
    return tuple(
        BlockShape(
            layers=len(group.layers),
            kv_heads=group.kv_heads,
            block_tokens=geometry.block_tokens,
            key_dim=group.key_dim,
            value_dim=group.value_dim,
        )
        for group in geometry.groups
    )


def cold_slot_bytes(geometry: KVGeometry, codec: BlockCodec) -> tuple[int, ...]:
    """Bytes of one encoded block per group.

    Raises ConfigError naming the group whose shape `codec` cannot hold.
    """
    dtype = _TORCH_DTYPES[geometry.dtype]
    sizes = []
    for group, shape in zip(geometry.groups, block_shapes(geometry), strict=True):
        try:
            sizes.append(codec.encoded_bytes(shape, dtype))
        except (CodecError, ValueError) as error:
            raise ConfigError(
                f"cache group {group.name!r} ({shape}) cannot be stored as {codec.name!r}: {error}; "
                f"use block_tokens a multiple of 16 and head dims a multiple of 8, or codec = 'raw'"
            ) from error
    return tuple(sizes)


def make_codec(name: str, error_bound: float) -> BlockCodec | None:
    """The codec of cold blocks, or None when cold blocks stay raw."""
    if name == "raw":
        return None
    try:
        return get_codec(name, error_bound=error_bound)
    except (CodecError, KeyError, TypeError) as error:
        raise ConfigError(f"codec {name!r} cannot be used for cold blocks: {error}") from error


def _checked_device(name: str) -> torch.device:
    """The device of that name. ConfigError when torch does not know it, or has it not on this machine."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device: got {name!r}; expected 'cpu' or a device that torch has here ({reason})") from error
    return device


class DeviceBlocks:
    """Slab and codec of one device. `device` is a torch device string: "cpu", "cuda", "cuda:1"."""

    def __init__(self, geometry: KVGeometry, layout: ExtentLayout, codec: BlockCodec | None, device: str) -> None:
        self._geometry = geometry
        self._codec = codec
        self._on_host = self.writes_in_place = _checked_device(device).type == "cpu"
        self._slab = Slab(layout, geometry, device=device)

    @property
    def slab(self) -> Slab:
        return self._slab

    def encode(self, group: int, full_slots: list[int], cold_slots: list[int]) -> list[bool]:
        """Encode full slots into INT4 slots; False where the block is too lossy and must stay raw."""
        codec = self._codec
        if codec is None:
            raise ConfigError("no cold codec is configured (codec = 'raw'): nothing can be encoded")
        slab = self._slab
        keys = slab.keys_view(group)
        values = slab.values_view(group) if self._geometry.groups[group].value_dim else None
        in_place = getattr(codec, "encode_slots", None)
        if in_place is not None:
            places = [slab.layout.slot_offset_bytes(2 * group + COLD, slot) for slot in cold_slots]
            done = in_place(keys, values, full_slots, slab.bytes, places)
            if done is not None:
                return [bool(flag) for flag in done.tolist()]
        index = torch.as_tensor(full_slots, device=slab.device)
        keys, values = keys[index], None if values is None else values[index]
        cold = slab.cold_view(group)
        out = torch.empty((len(full_slots), cold.shape[-1]), dtype=torch.uint8, device=slab.device)
        accepted = codec.encode_batch(keys, values, out)
        extents, inside = slab.cold_index(group, np.asarray(cold_slots, dtype=np.int64))
        cold[torch.from_numpy(extents), torch.from_numpy(inside)] = out
        return [bool(flag) for flag in accepted.tolist()]

    def copy(self, group: int, form: int, source_slot: int, target_slot: int) -> None:
        if self._on_host:
            source = self._slab.slot_memory(2 * group + form, source_slot)
            pages.move(source, 0, self._slab.slot_memory(2 * group + form, target_slot), 0, source.nbytes)
        else:
            self._slab.copy_slots(2 * group + form, [source_slot], [target_slot])

    def zero_tail(self, group: int, slot: int, token: int) -> None:
        self._slab.zero_tail(group, slot, token)

    def poison(self, group: int, slots: list[int]) -> None:
        """Fill full slots with NaN."""
        self._slab.poison(2 * group + FULL, slots)

    def read_buffer(self, group: int, form: int, slot: int) -> memoryview:
        """The slot's bytes: the slab's own memory on the host, a copy of it otherwise."""
        if self._on_host:
            return self._slab.slot_memory(2 * group + form, slot)
        return memoryview(bytes(self._slab.slot_bytes_view(2 * group + form, slot).cpu().numpy()))

    def copy_out(self, group: int, form: int, slot: int, row: ByteRow) -> None:
        """The slot's bytes into `row`, uint8 of their number."""
        pages.move(as_byte_row(self.read_buffer(group, form, slot)), 0, row, 0, row.nbytes)

    def write_buffer(self, group: int, form: int, slot: int) -> memoryview:
        """Where a tier should put the slot's bytes; `write_back` brings them to the device afterwards."""
        if self._on_host:
            return self._slab.slot_memory(2 * group + form, slot)
        return memoryview(bytearray(self._slab.slot_bytes_view(2 * group + form, slot).numel()))

    def write_back(self, group: int, form: int, slot: int, buffer: memoryview) -> None:
        if not self._on_host:
            target = self._slab.slot_bytes_view(2 * group + form, slot)
            target.copy_(torch.frombuffer(buffer, dtype=torch.uint8))
