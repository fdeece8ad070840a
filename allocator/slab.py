"""The one allocation that all device blocks live in, and the views that engines and codecs read it through.

The only file of the package that imports torch; `allocator.Slab` loads it on first use. Views alias the slab: what is
written through one is seen through all, and offsets are 64 bit. Who writes which slot is the pool's business; the slab
knows no states. Any thread may use the views; nothing here locks or waits.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from allocator.errors import GeometryError, UsageError
from allocator.extents import COLD, FULL, ExtentLayout
from allocator.geometry import KVGeometry

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_POISON_BYTE = 0xFF  # NaN in every dtype of DTYPE_BYTES


class Slab:
    """`layout.total_bytes` of device memory.

    On the CPU an anonymous map, 2 MiB aligned, asked to be huge pages: zero, and without cost until touched.
    Elsewhere one uint8 tensor. GeometryError when layout and geometry differ in their slots.
    """

    def __init__(self, layout: ExtentLayout, geometry: KVGeometry, device: torch.device | str = "cpu") -> None:
        expected = tuple(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
        if layout.raw_slot_bytes[::2] != expected:
            raise GeometryError(
                f"expected a layout with full slots of {expected} bytes, got {layout.raw_slot_bytes[::2]}"
            )
        self.layout = layout
        self.geometry = geometry
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._memory: memoryview | None = None
        if self.device.type == "cpu":
            self.bytes, self._memory = _map_memory(layout.total_bytes)
        else:
            self.bytes = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=self.device)

    # -- views --------------------------------------------------------------------------------------------------

    def full_view(self, group: int) -> torch.Tensor:
        """Tensor[slots, layers, kv_heads, block_tokens * (key_dim + value_dim)] of the geometry's dtype, strided.

        One row of a slot and layer and head is K of all tokens, then V of all tokens.
        """
        spec, tokens = self.geometry.groups[group], self.geometry.block_tokens
        row = tokens * (spec.key_dim + spec.value_dim)
        heads = spec.kv_heads
        shape = (self.layout.slot_count(2 * group), len(spec.layers), heads, row)
        return self._strided(group, shape, (heads * row, row, 1), 0)

    def keys_view(self, group: int) -> torch.Tensor:
        """Tensor[slots, layers, kv_heads, block_tokens, key_dim] of the geometry's dtype, strided."""
        return self._half(group, self.geometry.groups[group].key_dim, 0)

    def values_view(self, group: int) -> torch.Tensor:
        """Tensor[slots, layers, kv_heads, block_tokens, value_dim]; value_dim 0 for a latent group."""
        spec = self.geometry.groups[group]
        return self._half(group, spec.value_dim, self.geometry.block_tokens * spec.key_dim)

    def _half(self, group: int, dim: int, offset: int) -> torch.Tensor:
        spec, tokens = self.geometry.groups[group], self.geometry.block_tokens
        row = tokens * (spec.key_dim + spec.value_dim)
        heads = spec.kv_heads
        shape = (self.layout.slot_count(2 * group), len(spec.layers), heads, tokens, dim)
        return self._strided(group, shape, (heads * row, row, dim, 1), offset)

    def _strided(self, group: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        item = self.geometry.dtype_bytes
        usable = self.layout.extent_count * self.layout.extent_bytes
        flat = self.bytes[:usable].view(self.dtype)
        return flat.as_strided(
            shape, (self.layout.slot_bytes[2 * group] // item, *strides), flat.storage_offset() + offset
        )

    def cold_view(self, group: int) -> torch.Tensor:
        """Tensor[extents, slots_per_extent, cold_slot_bytes] uint8, strided: the INT4 records of a block in one row."""
        index = 2 * group + COLD
        layout = self.layout
        if not layout.has_class(index):
            raise UsageError(f"group {group} has no INT4 slots on this device")
        shape = (layout.extent_count, layout.per_extent[index], layout.raw_slot_bytes[index])
        strides = (layout.extent_bytes, layout.slot_bytes[index], 1)
        return self.bytes.as_strided(shape, strides, self.bytes.storage_offset())

    def cold_index(
        self, group: int, slots: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(extent, place) of INT4 slots, each int64[n], to index `cold_view` with."""
        extents, places = np.divmod(slots, self.layout.per_extent[2 * group + COLD])
        return extents, places

    def slot_bytes_view(self, class_index: int, slot: int) -> torch.Tensor:
        """Tensor[slot bytes] uint8: one block in its stored layout, contiguous."""
        start = self.layout.slot_offset_bytes(class_index, slot)
        return self.bytes[start : start + self.layout.raw_slot_bytes[class_index]]

    def slot_memory(self, class_index: int, slot: int) -> memoryview:
        """The same bytes as a writable memoryview, for host copies. UsageError when the slab is not on the CPU."""
        if self._memory is None:
            raise UsageError(f"expected a slab on the CPU for slot_memory, this one is on {self.device}")
        start = self.layout.slot_offset_bytes(class_index, slot)
        return self._memory[start : start + self.layout.raw_slot_bytes[class_index]]

    # -- bytes --------------------------------------------------------------------------------------------------

    def copy_slots(self, class_index: int, sources: list[int], targets: list[int]) -> None:
        """Copies whole blocks between slots of one class, in order (copy on write, compaction)."""
        for source, target in zip(sources, targets, strict=True):
            if self._memory is not None:
                self.slot_memory(class_index, target)[:] = self.slot_memory(class_index, source)
            else:
                self.slot_bytes_view(class_index, target).copy_(self.slot_bytes_view(class_index, source))

    def zero_slots(self, group: int, slots: list[int]) -> None:
        """Full slots to zero, so that nothing left over from an earlier block can reach attention."""
        for slot in slots:
            self.slot_bytes_view(2 * group + FULL, slot).zero_()

    def zero_tail(self, group: int, slot: int, token: int) -> None:
        """Zeroes the places of tokens `token` and later in one full slot: a mask does not remove NaN."""
        self.keys_view(group)[slot, :, :, token:].zero_()
        self.values_view(group)[slot, :, :, token:].zero_()

    def poison(self, class_index: int, slots: list[int]) -> None:
        """Debug: fills slots with NaN, so that a read of a free block shows."""
        for slot in slots:
            self.slot_bytes_view(class_index, slot).fill_(_POISON_BYTE)


def _map_memory(size: int) -> tuple[torch.Tensor, memoryview]:
    """(Tensor[size] uint8, memoryview of the same bytes), 2 MiB aligned, zero, untouched."""
    span = mmap.mmap(-1, size + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages: slower, not wrong
            span.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(span, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + size], memoryview(span)[start : start + size]
