"""Buffers for copies on their way to a slow tier, so that no device block waits for it. Under the store's lock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from kvstore.tier import ByteRow


def _new_row(size_bytes: int) -> ByteRow:
    return np.empty(size_bytes, dtype=np.uint8)


class Staging:
    """At most `limit_bytes` of buffers, handed out and kept for reuse; one larger than that is given while none is out.

    That one exception lets blocks of any size move, however small the limit. make_row: where buffers come from.
    """

    def __init__(self, limit_bytes: int, make_row: Callable[[int], ByteRow] = _new_row) -> None:
        self._make_row = make_row
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._kept_bytes = 0
        self._kept: defaultdict[int, list[ByteRow]] = defaultdict(list)

    def take(self, size_bytes: int) -> ByteRow | None:
        """uint8 [size_bytes], contents undefined; None when there is no room."""
        if self.used_bytes and self.used_bytes + size_bytes > self.limit_bytes:
            return None
        if self._kept[size_bytes]:
            self._kept_bytes -= size_bytes
            row = self._kept[size_bytes].pop()
        else:
            if self.used_bytes + size_bytes + self._kept_bytes > self.limit_bytes:
                self._drop_kept()
            row = self._make_row(size_bytes)  # may be refused, and then nothing is out
        self.used_bytes += size_bytes
        return row

    def give_back(self, row: ByteRow) -> None:
        self.used_bytes -= row.nbytes
        self._kept_bytes += row.nbytes
        self._kept[row.nbytes].append(row)
        if self._kept_bytes > self.limit_bytes:
            self._drop_kept()

    def _drop_kept(self) -> None:
        self._kept.clear()
        self._kept_bytes = 0
