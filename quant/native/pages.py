"""Copies of many pieces of bytes at once: pages gathered from their places, scattered to them, or moved.

Buffers are anything that offers its bytes without a copy (numpy arrays, memoryviews, bytearrays, mmaps; a CPU tensor
through its numpy view). Offsets are in bytes. Every piece is checked against the buffers' sizes before anything is
copied: ValueError says which one does not fit. Pieces that are written must not overlap each other or those read.

No torch. Any thread; Python's lock is released meanwhile, so buffers must not be written by others. In C where the
extension is there (quant.dispatch decides: operation "page_copy"), by numpy piece by piece elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from quant import dispatch

Buffer: TypeAlias = "bytes | bytearray | memoryview | npt.NDArray[np.generic]"
Offsets: TypeAlias = "npt.NDArray[np.int64] | Sequence[int]"
OPERATION = "page_copy"


class Stores(IntEnum):
    """BY_SIZE: past the cache for scattered targets and for much, through it else. The others are for measuring."""

    BY_SIZE = 0
    CACHED = 1
    STREAMING = 2


def gather(source: Buffer, offsets: Offsets, target: Buffer, piece_bytes: int | Offsets, *, threads: int = 1) -> None:
    """Pieces from `source`, at offsets[i] each, one behind the other into `target`.

    offsets int64[n]; piece_bytes: one size for all, or int64[n].
    """
    copy_pieces(source, offsets, target, None, piece_bytes, threads=threads)


def scatter(source: Buffer, target: Buffer, offsets: Offsets, piece_bytes: int | Offsets, *, threads: int = 1) -> None:
    """Pieces that lie one behind the other in `source` to offsets[i] of `target` each.

    offsets int64[n]; piece_bytes: one size for all, or int64[n].
    """
    copy_pieces(source, None, target, offsets, piece_bytes, threads=threads)


def copy_pieces(
    source: Buffer,
    source_offsets: Offsets | None,
    target: Buffer,
    target_offsets: Offsets | None,
    piece_bytes: int | Offsets,
    *,
    threads: int = 1,
    stores: Stores = Stores.BY_SIZE,
) -> None:
    """Piece i from source_offsets[i] of `source` to target_offsets[i] of `target`; None: one behind the other.

    ValueError, with nothing copied, for a piece that is not inside its buffer.
    """
    sizes = piece_bytes if isinstance(piece_bytes, int) else _int64(piece_bytes)
    starts, goals = _int64(source_offsets), _int64(target_offsets)
    if dispatch.implementation_of(OPERATION, "cpu") == "native":
        _native()(source, starts, target, goals, sizes, int(stores), threads)
        return
    _copy_by_numpy(_bytes_of(source), starts, _bytes_of(target), goals, sizes)


def move(source: Buffer, start: int, target: Buffer, goal: int, size_bytes: int) -> None:
    """One run of bytes from `start` of `source` to `goal` of `target`, a place that nobody reads soon.

    Stores go past the cache: into memory that is not there, that is quicker than a plain copy. ValueError
    as above.
    """
    if dispatch.implementation_of(OPERATION, "cpu") == "native":
        _native()(source, start, target, goal, size_bytes, 0, 1)
        return
    one = np.array([start]), np.array([goal])
    _copy_by_numpy(_bytes_of(source), one[0], _bytes_of(target), one[1], size_bytes)


@cache
def _native() -> Callable[..., None]:
    """The C function; only where the dispatch has found that it is there."""
    from quant import native

    function: Callable[..., None] = native.kernels.page_copy
    return function


def _int64(offsets: Offsets | None) -> npt.NDArray[np.int64] | None:
    if offsets is None:
        return None
    array = np.ascontiguousarray(offsets)
    if array.dtype != np.int64 and array.size:
        if array.dtype.kind not in "iu":
            raise ValueError(f"expected int64 offsets or sizes, got {array.dtype}")
        array = array.astype(np.int64)
    return array.astype(np.int64, copy=False).reshape(-1)


def _bytes_of(buffer: Buffer) -> npt.NDArray[np.uint8]:
    view: memoryview = memoryview(buffer)  # type: ignore[arg-type]
    return np.frombuffer(view.cast("B"), dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def _copy_by_numpy(
    source: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64] | None,
    target: npt.NDArray[np.uint8],
    goals: npt.NDArray[np.int64] | None,
    piece_bytes: int | npt.NDArray[np.int64] | None,
) -> None:
    given = [one for one in (starts, goals, piece_bytes) if isinstance(one, np.ndarray)]
    counts = {len(one) for one in given}
    if not given or piece_bytes is None:
        raise ValueError("expected piece bytes, and offsets for the source, the target or both")
    if len(counts) > 1:
        raise ValueError(f"offsets or sizes: got {sorted(counts)} of them, expected one each for the pieces")
    sizes = np.broadcast_to(np.asarray(piece_bytes, dtype=np.int64), (counts.pop(),))
    if len(sizes) and int(sizes.min()) < 0:
        raise ValueError(f"piece {int(sizes.argmin())}: got {int(sizes.min())} bytes, expected 0 or more")
    starts = _checked(starts, sizes, len(source), "source")
    goals = _checked(goals, sizes, len(target), "target")
    for start, goal, size in zip(starts.tolist(), goals.tolist(), sizes.tolist(), strict=True):
        target[goal : goal + size] = source[start : start + size]


def _checked(
    offsets: npt.NDArray[np.int64] | None, sizes: npt.NDArray[np.int64], buffer_bytes: int, name: str
) -> npt.NDArray[np.int64]:
    """The offsets, those of packed pieces for None; ValueError when a piece is not inside the buffer."""
    if offsets is None:
        total = sum(sizes.tolist())
        if total > buffer_bytes:
            raise ValueError(
                f"{name}: {len(sizes)} pieces have {total} bytes in all, expected at most its {buffer_bytes}"
            )
        return np.cumsum(sizes) - sizes
    outside = np.flatnonzero((offsets < 0) | (offsets > buffer_bytes) | (sizes > buffer_bytes - offsets))
    if len(outside):
        piece = int(outside[0])
        raise ValueError(
            f"{name}: piece {piece} has {sizes[piece]} bytes from {offsets[piece]} on, expected it inside "
            f"0..{buffer_bytes}"
        )
    return offsets
