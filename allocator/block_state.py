"""The life word of a block: one int32 that holds state, marks and reference count.

    bits 0-2   BlockState
    bit  3     HELD         pinned or under transfer
    bit  4     UNINDEXED    sealed, but another block is the one that the prefix index names
    bit  5     EXACT_HELD   somebody who demands full precision reads it: must not cool
    bits 6-30  references

One word a block makes the common cases one comparison (`OPEN_ONCE`, `SEALED_ONCE`) and one store, for a scalar and for
a
numpy batch alike. Plain integers, because an enum member in an inner loop costs as much as the work.
"""

from __future__ import annotations

from enum import IntEnum


class BlockState(IntEnum):
    """FREE -> OPEN -> SEALED -> IDLE -> FREE; see `block_life` for who moves a block."""

    FREE = 0
    RETIRED = 1
    OPEN = 2
    SEALED = 3
    IDLE = 4
    FENCED = 5


FREE = 0
RETIRED = 1
OPEN = 2
SEALED = 3
IDLE = 4
FENCED = 5

STATE = 7
HELD = 8
UNINDEXED = 16
EXACT_HELD = 32
ONE_REFERENCE = 64
REFERENCE_SHIFT = 6

OPEN_ONCE = OPEN | ONE_REFERENCE
SEALED_ONCE = SEALED | ONE_REFERENCE
