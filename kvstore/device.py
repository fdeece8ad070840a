"""What a store needs of a device, and the device that has no bytes: the control plane alone.

A store over an `AbsentDevice` decides, counts and evicts as any other; it is for planning, simulation and benchmarks.
Imports no torch. See `kvstore.device_blocks` for devices with bytes, and for who calls these methods and when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from allocator import ExtentLayout, Slab
    from kvstore.tier import Buffer, ByteRow


class BlockBytes(Protocol):
    """What the store needs of a device."""

    writes_in_place: bool
    """`write_buffer` is the slot itself, so what a tier has put there can be read at once."""

    @property
    def slab(self) -> Slab | None: ...

    def encode(self, group: int, full_slots: list[int], cold_slots: list[int]) -> list[bool]: ...

    def copy(self, group: int, form: int, source_slot: int, target_slot: int) -> None: ...

    def zero_tail(self, group: int, slot: int, token: int) -> None: ...

    def poison(self, group: int, slots: list[int]) -> None: ...

    def read_buffer(self, group: int, form: int, slot: int) -> Buffer: ...

    def copy_out(self, group: int, form: int, slot: int, row: ByteRow) -> None: ...

    def write_buffer(self, group: int, form: int, slot: int) -> Buffer: ...

    def write_back(self, group: int, form: int, slot: int, buffer: Buffer) -> None: ...


class AbsentDevice:
    """No bytes at all: every method is accounting only, and cooling always succeeds.

    Its buffers have the length of a slot and no meaning, so only tiers that keep no bytes either may be below it.
    """

    slab = None
    writes_in_place = False

    def __init__(self, layout: ExtentLayout) -> None:
        self._slot_bytes = layout.raw_slot_bytes
        self._row = np.empty(max(self._slot_bytes), dtype=np.uint8)  # never touched, so it takes no memory

    def encode(self, group: int, full_slots: list[int], cold_slots: list[int]) -> list[bool]:
        return [True] * len(full_slots)

    def copy(self, group: int, form: int, source_slot: int, target_slot: int) -> None:
        return None

    def zero_tail(self, group: int, slot: int, token: int) -> None:
        return None

    def poison(self, group: int, slots: list[int]) -> None:
        return None

    def read_buffer(self, group: int, form: int, slot: int) -> ByteRow:
        return self._row[: self._slot_bytes[2 * group + form]]

    def copy_out(self, group: int, form: int, slot: int, row: ByteRow) -> None:
        return None

    write_buffer = read_buffer

    def write_back(self, group: int, form: int, slot: int, buffer: Buffer) -> None:
        return None
