"""What one sequence needs of a device that holds nothing else: blocks, extents, and the device_bytes that would do.

Pure functions of a geometry and a layout; any thread.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from allocator import COLD, FULL, ConfigError, GroupKind, KVError
from allocator.extents import ExtentLayout

if TYPE_CHECKING:
    from allocator import KVGeometry

_MOST_TOKENS = 1 << 24


def held_blocks(geometry: KVGeometry, group: int, token_count: int, *, ahead_tokens: int = 0) -> int:
    """Blocks that a group holds of so many tokens; ahead_tokens: beyond a window, while a prompt is computed."""
    one = geometry.groups[group]
    if one.kind is GroupKind.SLIDING and one.window_tokens is not None:
        token_count = min(token_count, one.window_tokens + ahead_tokens)
    return -(-token_count // geometry.block_tokens)


def prompt_blocks(geometry: KVGeometry, group: int, token_count: int) -> int:
    """Blocks, in full precision, that admitting a prompt takes at once."""
    return held_blocks(geometry, group, token_count, ahead_tokens=2 * geometry.block_tokens)


def full_blocks_ever(layout: ExtentLayout, group: int) -> int:
    """Blocks of a group in full precision that the device holds, if it holds nothing else."""
    return (layout.extent_count - layout.spare_count) * layout.per_extent[2 * group + FULL]


def least_extents(
    geometry: KVGeometry, layout: ExtentLayout, token_count: int, *, cools: bool, ahead_tokens: int = 0
) -> int:
    """Extents under a sequence of so many tokens, at least. cools: all but its last block may be cold. ahead_tokens: as
    for `held_blocks`.
    """
    extents = 0
    for group in range(len(geometry.groups)):
        blocks = held_blocks(geometry, group, token_count, ahead_tokens=ahead_tokens)
        per_cold = layout.per_extent[2 * group + COLD]
        full = min(blocks, 1) if cools and per_cold else blocks
        extents += -(-full // layout.per_extent[2 * group + FULL])
        if blocks > full:
            extents += -(-(blocks - full) // per_cold)
    return extents


def most_tokens(geometry: KVGeometry, layout: ExtentLayout, *, cools: bool) -> int:
    """The longest sequence that the device can hold, at most."""
    fits = range(1, _MOST_TOKENS)
    return bisect_right(
        fits, layout.extent_count, key=lambda count: least_extents(geometry, layout, count, cools=cools)
    )


def bytes_for(geometry: KVGeometry, layout: ExtentLayout, prompt_tokens: int, token_count: int, *, cools: bool) -> int:
    """device_bytes with which a prompt can be admitted and its sequence grow to `token_count` tokens, wherever in a
    block a window begins. cools: at least so many, since some blocks stay whole by the settings.
    """
    ahead_tokens = geometry.block_tokens - 1
    full, cold = layout.raw_slot_bytes[::2], layout.raw_slot_bytes[1::2]
    total = layout.total_bytes
    while True:
        try:
            larger = ExtentLayout(total, full, cold if any(cold) else ())
        except ConfigError:
            total += total // 16 + 1
            continue
        groups = range(len(geometry.groups))
        if (
            all(prompt_blocks(geometry, one, prompt_tokens) <= full_blocks_ever(larger, one) for one in groups)
            and least_extents(geometry, larger, token_count, cools=cools, ahead_tokens=ahead_tokens)
            <= larger.extent_count - larger.spare_count
        ):
            return total
        total += total // 16 + 1


def outgrown(geometry: KVGeometry, layout: ExtentLayout, sizes: tuple[int, int, int], error: Exception) -> KVError:
    """What to tell of a sequence that has the device alone and no room left. sizes: tokens of the prompt, of the
    answer that was asked for, and computed so far.
    """
    prompt, answer, computed = sizes
    enough = bytes_for(geometry, layout, prompt, prompt + answer, cools=False)
    return KVError(
        f"no room beyond {computed} tokens of {prompt} prompt tokens and {answer} new ones, with nothing else in "
        f"device_bytes of {layout.total_bytes} ({error}); {enough} would do, or fewer new tokens"
    )
