"""Extents and slots: sizes, offsets, and the choice of the extent size."""

from __future__ import annotations

import pytest

from allocator import COLD, ConfigError, ExtentLayout

SMOLLM_FULL, SMOLLM_COLD = 368_640, 109_440


def test_full_slots_lie_densely_over_the_whole_span() -> None:
    layout = ExtentLayout(100 * 512, (512, 1024), (128, 192))
    for index in (0, 2):
        for slot in range(layout.slot_count(index)):
            assert layout.slot_offset_bytes(index, slot) == slot * layout.slot_bytes[index]


@pytest.mark.parametrize("slots", [20, 50, 100, 500, 3000])
def test_the_extent_size_keeps_the_loss_small(slots: int) -> None:
    """Spare extent, INT4 remainder and tail together: within 17 % of a tiny slab and 2.5 % of a large one."""
    layout = ExtentLayout(slots * SMOLLM_FULL, (SMOLLM_FULL,), (SMOLLM_COLD,))
    lost = layout.extent_bytes + layout.tail_bytes + layout.remainder_bytes[COLD] * layout.extent_count
    assert layout.extent_bytes % SMOLLM_FULL == 0
    assert lost / layout.total_bytes <= (0.17 if slots < 100 else 0.06 if slots < 500 else 0.025)


def test_slots_of_a_class_do_not_overlap_and_are_aligned() -> None:
    layout = ExtentLayout(64 * 1000 + 17, (1000, 488), (130, 65))
    for index in range(layout.class_count):
        end = 0
        for slot in range(layout.slot_count(index)):
            start = layout.slot_offset_bytes(index, slot)
            assert start % 64 == 0
            assert start >= end
            assert layout.extent_of(index, slot) == start // layout.extent_bytes
            end = start + layout.raw_slot_bytes[index]
            assert (end - 1) // layout.extent_bytes == start // layout.extent_bytes
        assert end <= layout.total_bytes - layout.tail_bytes


def test_case_074_offsets_beyond_32_bits() -> None:
    layout = ExtentLayout(6 << 30, (1 << 20,), (1 << 18,))
    assert layout.slot_offset_bytes(0, 2048) == 1 << 31
    assert layout.slot_offset_bytes(0, 4096) == 1 << 32
    assert layout.slot_offset_bytes(0, 6143) == 6143 << 20


@pytest.mark.parametrize("slot", [-1, 40])
def test_a_slot_that_cannot_be_is_refused(slot: int) -> None:
    with pytest.raises(ConfigError, match="expected a slot"):
        ExtentLayout(40 * 512, (512,)).slot_offset_bytes(0, slot)


def test_layouts_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one group"):
        ExtentLayout(1000, ())
    with pytest.raises(ConfigError, match="at least 1"):
        ExtentLayout(511, (512,))
    with pytest.raises(ConfigError, match="at least 2"):
        ExtentLayout(512, (512,), (128,))
    with pytest.raises(ConfigError, match="one a group"):
        ExtentLayout(5120, (512,), (128, 128))
    with pytest.raises(ConfigError, match="larger than the full slot"):
        ExtentLayout(5120, (512,), (1024,))
    with pytest.raises(ConfigError, match="multiple of 512"):
        ExtentLayout(5120, (512,), (128,), extent_bytes=768)
    with pytest.raises(ConfigError, match=">= 0"):
        ExtentLayout(5120, (512,), (-1,))


def test_a_device_without_int4_needs_no_spare() -> None:
    layout = ExtentLayout(1024, (512,))
    assert (layout.spare_count, layout.extent_count) == (0, 2)
    assert not layout.has_class(COLD)
