"""How the bytes of a pool are spent, exactly: every byte of the span is in one row. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassUsage:
    """One slot class. Blocks are counted by state; `slot_bytes` is without padding."""

    group: int
    form: int
    slot_bytes: int
    extents: int
    remainder_bytes: int
    free_blocks: int
    open_blocks: int
    sealed_blocks: int
    idle_blocks: int
    fenced_blocks: int

    @property
    def slots(self) -> int:
        """Slots of the class in all its extents."""
        return self.free_blocks + self.live_blocks + self.idle_blocks + self.fenced_blocks

    @property
    def live_blocks(self) -> int:
        """Blocks with at least one reference; a shared block counts once."""
        return self.open_blocks + self.sealed_blocks

    @property
    def live_bytes(self) -> int:
        """Bytes of blocks with at least one reference."""
        return self.live_blocks * self.slot_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are not FREE."""
        return (self.slots - self.free_blocks) * self.slot_bytes

    @property
    def extent_total_bytes(self) -> int:
        """Bytes of the extents that the class has."""
        return self.slots * self.slot_bytes + self.remainder_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """The whole span: total = tail + unassigned + sum over classes of extent_total_bytes."""

    total_bytes: int
    tail_bytes: int
    unassigned_extents: int
    unassigned_bytes: int
    spare_extents: int
    classes: tuple[ClassUsage, ...]

    @property
    def in_use_bytes(self) -> int:
        """Bytes of extents that have a class; the denominator of waste."""
        return sum(row.extent_total_bytes for row in self.classes)

    @property
    def remainder_bytes(self) -> int:
        """Bytes of those extents that no slot can use."""
        return sum(row.remainder_bytes for row in self.classes)

    @property
    def live_bytes(self) -> int:
        """Bytes of blocks with at least one reference."""
        return sum(row.live_bytes for row in self.classes)

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are not FREE: live, idle, and fenced."""
        return sum(row.used_bytes for row in self.classes)

    def of(self, group: int, form: int) -> ClassUsage:
        """Row of one class."""
        return self.classes[2 * group + form]
