"""Can an index for such a budget be mapped? Its map is larger than the budget, and address space has an end.

Asked before a directory is touched: LMDB says of a map that cannot be had only that there is no memory. Any thread.
"""

from __future__ import annotations

import mmap
import sys

_LEAST_BYTES = 1 << 30
_GIB = 1 << 30


def map_bytes_for(capacity_bytes: int) -> int:
    """Sparse, and far more than the index of this budget can need."""
    return max(_LEAST_BYTES, 2 * capacity_bytes)


def why_not_mapped(capacity_bytes: int) -> str | None:
    """What was given and what is expected, in the words of the settings; None where the map can be had."""
    if _can_map(map_bytes_for(capacity_bytes)):
        return None
    low, high = 0, capacity_bytes // _GIB + 1  # budgets in GiB: the first can be mapped, the second cannot
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _can_map(map_bytes_for(middle * _GIB)) else (low, middle)
    return (
        f"disk_bytes: got {capacity_bytes}; expected at most {low * _GIB}: its index is mapped at twice that, and "
        "this process has no more address space"
    )


def _can_map(size_bytes: int) -> bool:
    """Room for a mapping; what is only read asks for no memory."""
    if size_bytes > sys.maxsize:
        return False
    try:
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ).close()
    except OSError:
        return False
    return True
