"""Do the page copies of the path in use copy what they should? Asked at import; see quant.native.selftest.

A few odd sizes and places, against slices. No torch, no numpy; some tens of microseconds.
"""

from __future__ import annotations

from array import array
from typing import Any

_SIZES = (0, 1, 63, 64, 255, 256, 257, 700, 1291)
_GAP_BYTES = 37
_CACHED, _STREAMING = 1, 2


def check(extension: Any) -> str:
    """What is wrong, "" when all is well."""
    source = bytes(range(256)) * 12 + bytes(range(251))
    starts, goals, at = [], [], 5
    for number, size in enumerate(_SIZES):
        starts.append(number * 211)
        goals.append(at)
        at += size + _GAP_BYTES
    expected = bytearray(at)
    for start, goal, size in zip(starts, goals, _SIZES, strict=True):
        expected[goal : goal + size] = source[start : start + size]
    for stores in (_CACHED, _STREAMING):
        target = bytearray(at)
        extension.page_copy(source, array("q", starts), target, array("q", goals), array("q", _SIZES), stores, 1)
        if target != expected:
            return f"bytes differ after a copy of pieces of {_SIZES} bytes (stores {stores})"
    return ""
