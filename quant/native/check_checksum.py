"""Does the checksum of the path in use compute what it should? Asked at import; see quant.native.selftest.

Known digests of each way to sum: short, whole stripes, ends within a block of them, pieces, a copy. No torch, no numpy.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

_BYTES = bytes(range(251)) * 16
_KNOWN = {
    0: "99aa06d3014798d86001c324468d497f",
    2: "6a4a5274c1b0d3add6645fc3051a9457",
    7: "61ce291bc3a4357ddbb207821e6d5efe",
    16: "72950631827607e2842812cc870dcae2",
    100: "da95ef16fd9566f329b20ba5f03ec01e",
    129: "dd5e74ac6b45f54ebc30b63382b09a3b",
    240: "65b5be86da5540e7c92b68e16f83bbb6",
    241: "1da1cb61bcb8a2a102e8cd95421c6d02",
    1025: "2882ebca04ec915ce95c42288f28186e",
    2048: "a5141efedfefc1af25339063db861586",
    3700: "3f9af9ecd52349f12df887502104260c",
}
_CUTS = (0, 1, 200, 263, 1500, 1501, 2600, 3700)


def check(extension: Any) -> str:
    """What is wrong, "" when all is well."""
    for count, expected in _KNOWN.items():
        if extension.checksum(_BYTES[:count]).hex() != expected:
            return f"XXH3-128 of {count} bytes is not {expected}"
    state, target = extension.checksum_begin(), bytearray(_CUTS[-1])
    for number, (start, stop) in enumerate(pairwise(_CUTS)):
        place = memoryview(target)[start:stop]
        if number % 2:
            extension.checksum_update(state, _BYTES[start:stop])
            place[:] = _BYTES[start:stop]
        else:
            extension.checksum_copy(state, _BYTES[start:stop], place)
    if target != _BYTES[: _CUTS[-1]]:
        return "bytes differ after a copy that was summed on the way"
    if extension.checksum_digest(state).hex() != _KNOWN[_CUTS[-1]]:
        return f"XXH3-128 of {_CUTS[-1]} bytes in pieces differs from that at once"
    return ""
