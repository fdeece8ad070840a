"""A head and rows of bytes to a file and from it, summed while they lie in the processor's cache.

What the disk tier does with a frame. The head holds sums, which are filled in here: `sums` cuts the rows, one behind
the other, into parts and says where in the head XXH3-128 of each goes; the head's last 16 bytes are that of the head
before them. A write of more than 1 MiB or so goes in pieces and leaves no head until all rows are there; a smaller one
is one call of the system. In C where the extension is there, see quant.native.checksum; elsewhere in smaller pieces.

No torch, no numpy. Any thread; Python's lock is released meanwhile. OSError comes from the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias

from quant import dispatch
from quant.native.checksum import CHECKSUM_BYTES, OPERATION, Checksum, checksum

Buffer: TypeAlias = Any
Sums: TypeAlias = tuple[tuple[int, int], ...]
"""(place in the head, bytes of the rows) of each sum, in order; together they are all of the rows."""
Write: TypeAlias = tuple[int, int, bytearray, Sums, list[Any], int]
"""What write_summed takes."""
_CHUNK_BYTES = 512 << 10  # summed and moved while it lies in cache; fewer would cost more calls
_LEAST_CHUNK_BYTES = 64 << 10
_VIEWS_MOST = 512  # a call


def write_summed(fd: int, offset: int, head: bytearray, sums: Sums, rows: list[Any], tail_bytes: int) -> None:
    """Write head, rows (list of buffers, not all empty) and tail_bytes zeros from `offset` on; the head goes last."""
    if _is_native():
        _native().segments_write(fd, offset, head, sums, rows, tail_bytes)
        return
    views, state = [memoryview(row).cast("B") for row in rows], _Sums(head, sums)
    payload_bytes = sum(view.nbytes for view in views)
    for begin, end in _chunks(len(head), payload_bytes):
        parts = _cut(views, begin, end)
        state.update(parts)
        if end == payload_bytes:
            parts.append(memoryview(bytes(tail_bytes)))
        if begin:
            _write_all(fd, parts, offset + len(head) + begin)
        elif end < payload_bytes:  # no head yet: whatever lay here is nothing from now on
            _write_all(fd, [memoryview(bytes(len(head))), *parts], offset)
        else:
            state.finish()
            _write_all(fd, [memoryview(head), *parts], offset)
            return
    state.finish()
    _write_all(fd, [memoryview(head)], offset)


def write_all_summed(writes: list[Write]) -> None:
    """write_summed of each, in order. Stops at the first that fails."""
    if _is_native():
        _native().segments_write_all(writes)
        return
    for one in writes:
        write_summed(*one)


def read_summed(fd: int, offset: int, head: bytearray, sums: Sums, rows: list[Any]) -> bytes | None:
    """Read into rows (list of writable buffers, not all empty) what write_summed wrote, and fill the sums into `head`.

    None when the file has exactly that head; else the head that it has, b"" where the file is shorter than that.
    """
    if _is_native():
        return _native().segments_read(fd, offset, head, sums, rows)  # type: ignore[no-any-return]
    views, state, found = [memoryview(row).cast("B") for row in rows], _Sums(head, sums), bytearray(len(head))
    for begin, end in _chunks(len(head), sum(view.nbytes for view in views)):
        parts = _cut(views, begin, end)
        first = [] if begin else [memoryview(found)]
        if not _read_all(fd, first + parts, offset + (len(head) + begin if begin else 0)):
            return b""
        state.update(parts)
    state.finish()
    return None if found == head else bytes(found)


def read_part(fd: int, offset: int, rows: list[Any]) -> bytes | None:
    """Read into rows (list of writable buffers) from `offset` on: XXH3-128 of what came; None: the file ends before."""
    views, state = [memoryview(row).cast("B") for row in rows], Checksum()
    for begin, end in _chunks(0, sum(view.nbytes for view in views)):
        parts = _cut(views, begin, end)
        if not _read_all(fd, list(parts), offset + begin):
            return None
        for part in parts:
            state.update(part)
    return state.digest()


class _Sums:
    """Fills sums into a head while the bytes that they are of come by."""

    def __init__(self, head: bytearray, sums: Sums) -> None:
        self._head, self._sums = head, iter(sums)
        self._at, self._left = next(self._sums)
        self._state = Checksum()

    def update(self, parts: Sequence[memoryview]) -> None:
        for part in parts:
            while part.nbytes:
                size = min(self._left, part.nbytes)
                self._state.update(part[:size])
                part, self._left = part[size:], self._left - size
                if not self._left:
                    self._head[self._at : self._at + CHECKSUM_BYTES] = self._state.digest()
                    self._at, self._left = next(self._sums, (0, 0))
                    self._state = Checksum()

    def finish(self) -> None:
        self._head[-CHECKSUM_BYTES:] = checksum(self._head[:-CHECKSUM_BYTES])


def _chunks(head_bytes: int, payload_bytes: int) -> Iterator[tuple[int, int]]:
    """Parts of a payload whose ends lie on whole pages of the file: no page is written in two calls."""
    begin, end = 0, max(1, _CHUNK_BYTES - head_bytes)
    while begin < payload_bytes:
        if payload_bytes - end < _LEAST_CHUNK_BYTES:
            end = payload_bytes
        yield begin, end
        begin, end = end, end + _CHUNK_BYTES


def _cut(views: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """Bytes [begin, end) of the views in order."""
    parts, at = [], 0
    for view in views:
        first, last = max(begin - at, 0), min(end - at, view.nbytes)
        if first < last:
            parts.append(view[first:last])
        at += view.nbytes
    return parts


def _write_all(fd: int, views: list[memoryview], offset: int) -> None:
    while views:
        done = os.pwritev(fd, views[:_VIEWS_MOST], offset)
        offset += done
        views = _rest(views, done)


def _read_all(fd: int, views: list[memoryview], offset: int) -> bool:
    """False when the file ends before the views are full."""
    while views:
        done = os.preadv(fd, views[:_VIEWS_MOST], offset)
        if done == 0:
            return False
        offset += done
        views = _rest(views, done)
    return True


def _rest(views: list[memoryview], done: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if done < view.nbytes:
            return [view[done:], *views[index + 1 :]]
        done -= view.nbytes
    return []


def _is_native() -> bool:
    return dispatch.implementation_of(OPERATION, "cpu") == "native"


@cache
def _native() -> Any:
    from quant import native

    return native.kernels
