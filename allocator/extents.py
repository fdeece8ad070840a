"""How one span of device bytes is cut into extents, and an extent into slots of one class.

Pure arithmetic, built once at start; the same object serves the pool (which slot) and the slab (which bytes).

Class `c = 2 * group + form`, form FULL (0) or COLD (1, INT4). An extent holds slots of one class at a time. Extent
bytes
are a multiple of every full slot, so full slots lie densely over the whole span and slot `s` of a full class is simply
at
byte `s * slot_bytes`; INT4 slots leave a small remainder at the end of each extent, which the choice of extent size
keeps
small. Slot starts are 64-byte aligned. All byte numbers are Python integers: offsets never wrap at 2^31 or 2^32.
"""

from __future__ import annotations

import math

from allocator.errors import ConfigError

FULL = 0
COLD = 1
SLOT_ALIGNMENT_BYTES = 64
_EXTENT_MULTIPLE_MAX = 64


class ExtentLayout:
    """Cuts `total_bytes` into extents.

    full_slot_bytes   bytes of one full-precision block, one number a group
    cold_slot_bytes   bytes of one INT4 block, one number a group; empty: no INT4 on this device; 0: none in that group
    extent_bytes      chosen when None; else must be a multiple of every (aligned) full slot

    Raises ConfigError when the span cannot hold the extents that the groups need.
    """

    def __init__(
        self,
        total_bytes: int,
        full_slot_bytes: tuple[int, ...],
        cold_slot_bytes: tuple[int, ...] = (),
        extent_bytes: int | None = None,
    ) -> None:
        if not full_slot_bytes or min(full_slot_bytes) < 1:
            raise ConfigError(f"expected the slot bytes (>= 1) of at least one group, got {full_slot_bytes}")
        if cold_slot_bytes and len(cold_slot_bytes) != len(full_slot_bytes):
            raise ConfigError(
                f"expected {len(full_slot_bytes)} cold slot sizes (one a group) or none, got {cold_slot_bytes}"
            )
        if cold_slot_bytes and min(cold_slot_bytes) < 0:
            raise ConfigError(f"expected cold slot bytes >= 0, got {cold_slot_bytes}")
        self.total_bytes = total_bytes
        self.group_count = len(full_slot_bytes)
        self.class_count = 2 * self.group_count
        cold = cold_slot_bytes or (0,) * self.group_count
        self.raw_slot_bytes = tuple(size for pair in zip(full_slot_bytes, cold, strict=True) for size in pair)
        self.slot_bytes = tuple(_aligned(size) for size in self.raw_slot_bytes)
        for group in range(self.group_count):
            if self.slot_bytes[2 * group + COLD] > self.slot_bytes[2 * group]:
                raise ConfigError(
                    f"group {group}: a cold slot of {cold[group]} bytes is larger than the full slot of "
                    f"{full_slot_bytes[group]} bytes"
                )
        self.spare_count = 1 if any(cold) else 0
        base = math.lcm(*self.slot_bytes[::2])
        if extent_bytes is None:
            extent_bytes = base * self._choose_multiple(base)
        elif extent_bytes < 1 or extent_bytes % base:
            raise ConfigError(f"expected extent bytes that are a multiple of {base}, got {extent_bytes}")
        self.extent_bytes = extent_bytes
        self.extent_count = total_bytes // extent_bytes
        if self.extent_count < 1 + self.spare_count:
            raise ConfigError(
                f"device memory of {total_bytes} bytes holds {self.extent_count} extents of {extent_bytes} bytes (full "
                f"slots of {self.slot_bytes[::2]} bytes); expected at least {1 + self.spare_count}, so "
                f"{(1 + self.spare_count) * extent_bytes} bytes"
            )
        self.per_extent = tuple(extent_bytes // size if size else 0 for size in self.slot_bytes)
        self.remainder_bytes = tuple(
            extent_bytes - count * size for count, size in zip(self.per_extent, self.raw_slot_bytes, strict=True)
        )
        self.tail_bytes = total_bytes - self.extent_count * extent_bytes

    def _choose_multiple(self, base: int) -> int:
        """Extent size in units of `base`: least sum of INT4 remainder, spare extent and bytes left over at the end."""
        cold = [size for size in self.slot_bytes[1::2] if size]
        if not cold:
            return 1
        fit = self.total_bytes // base
        best, best_cost = 1, math.inf
        for multiple in range(1, min(_EXTENT_MULTIPLE_MAX, max(1, fit // 2)) + 1):
            extent = base * multiple
            count = self.total_bytes // extent
            if not count:
                break
            remainder = max(extent % size for size in cold) / extent
            cost = remainder + 1 / count + (self.total_bytes - count * extent) / self.total_bytes
            if cost < best_cost - 1e-12:
                best, best_cost = multiple, cost
        return best

    def has_class(self, class_index: int) -> bool:
        """Whether slots of that class can exist."""
        return 0 <= class_index < self.class_count and self.per_extent[class_index] > 0

    def slot_count(self, class_index: int) -> int:
        """Slot numbers of the class run from 0 to this, over all extents (whatever their class is now)."""
        return self.extent_count * self.per_extent[class_index]

    def slot_offset_bytes(self, class_index: int, slot: int) -> int:
        """First byte of a slot. ConfigError for a slot that cannot be."""
        per_extent = self.per_extent[class_index]
        if not 0 <= slot < self.extent_count * per_extent:
            raise ConfigError(f"class {class_index}: expected a slot in 0..{self.slot_count(class_index)}, got {slot}")
        extent, place = divmod(slot, per_extent)
        return extent * self.extent_bytes + place * self.slot_bytes[class_index]

    def extent_of(self, class_index: int, slot: int) -> int:
        """The extent that a slot lies in."""
        return slot // self.per_extent[class_index]


def class_index(group: int, form: int) -> int:
    """Number of the slot class of (group, form)."""
    return 2 * group + form


def _aligned(size: int) -> int:
    return -(-size // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
