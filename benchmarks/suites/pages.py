"""Pages gathered from their places in a pool and scattered to them, beside one memmove of the same bytes."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from benchmarks.rows import Options, Row, Stopwatch, compared, interleaved
from quant import dispatch
from quant.native import pages

_POOL_BYTES = 256 << 20
_MOVED_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
_QUICK = 16  # times less in a quick run
_PAGE_BYTES = {"32KiB": 32 << 10, "2KiB": 2 << 10}
_NOTE = (
    "64 MiB of pages at random places of a 256 MiB pool, from and to one buffer; every round takes other pages. The "
    "baseline is one memmove of as many bytes between two buffers. All in huge pages. CPU seconds of the one thread, "
    "wall time for two."
)

Bytes = npt.NDArray[np.uint8]
Copy = Callable[["Pages", npt.NDArray[np.int64]], None]


class Pages:
    """A pool and two buffers, uint8 each, and the places that a round takes."""

    def __init__(self, page_bytes: int, scale: int, seed: int) -> None:
        self.page_bytes = page_bytes
        self.moved_bytes = _MOVED_BYTES // scale
        self.pool = _written(_POOL_BYTES // scale)
        self.buffer = _written(self.moved_bytes)
        self.other = _written(self.moved_bytes)
        self._order = np.random.default_rng(seed).permutation(len(self.pool) // page_bytes)

    def offsets(self, turn: int) -> npt.NDArray[np.int64]:
        """Byte offsets of this turn's pages in the pool, int64[n]: distinct, and other ones than those just used."""
        count = self.moved_bytes // self.page_bytes
        return np.roll(self._order, -turn * count)[:count].astype(np.int64) * self.page_bytes

    def memmove(self) -> None:
        """The baseline."""
        ctypes.memmove(self.other.ctypes.data, self.buffer.ctypes.data, self.moved_bytes)


def _written(size: int) -> Bytes:
    """Bytes that have been touched, in whole huge pages, as an arena has them: numpy asks for them at this size."""
    room = np.empty(size + _HUGE_PAGE_BYTES, dtype=np.uint8)
    start = -room.ctypes.data % _HUGE_PAGE_BYTES
    room[start : start + size] = 1
    return room[start : start + size]


def _gather(threads: int) -> Copy:
    def run(here: Pages, offsets: npt.NDArray[np.int64]) -> None:
        pages.gather(here.pool, offsets, here.buffer, here.page_bytes, threads=threads)

    return run


def _scatter(threads: int) -> Copy:
    def run(here: Pages, offsets: npt.NDArray[np.int64]) -> None:
        pages.scatter(here.buffer, here.pool, offsets, here.page_bytes, threads=threads)

    return run


def _numpy(copy: Copy) -> Copy:
    def run(here: Pages, offsets: npt.NDArray[np.int64]) -> None:
        with dispatch.forced(pages.OPERATION, "cpu", "numpy"):
            copy(here, offsets)

    return run


def _index_select(here: Pages, offsets: npt.NDArray[np.int64]) -> None:
    import torch

    rows = torch.from_numpy(here.pool).view(-1, here.page_bytes)
    out = torch.from_numpy(here.buffer).view(-1, here.page_bytes)
    torch.index_select(rows, 0, torch.from_numpy(offsets // here.page_bytes), out=out)


def _index_put(here: Pages, offsets: npt.NDArray[np.int64]) -> None:
    import torch

    rows = torch.from_numpy(here.pool).view(-1, here.page_bytes)
    rows[torch.from_numpy(offsets // here.page_bytes)] = torch.from_numpy(here.buffer).view(-1, here.page_bytes)


_FORMS: dict[str, tuple[Copy, Copy]] = {
    "": (_gather(1), _scatter(1)),
    "_numpy": (_numpy(_gather(1)), _numpy(_scatter(1))),
    "_torch": (_index_select, _index_put),
    "_2_threads": (_gather(2), _scatter(2)),
}


def rows(options: Options) -> Iterator[Row]:
    """Gather and scatter at each page size: ours, then numpy per page, torch's indexing, and ours on two threads."""
    for form, copies in _FORMS.items():
        for size_name, page_bytes in _PAGE_BYTES.items():
            here = Pages(page_bytes, _QUICK if options.quick else 1, options.seed)
            for verb, copy in zip(("gather", "scatter"), copies, strict=True):
                yield _measured(options, f"{verb}_{size_name}{form}", here, copy, "threads" in form)


def _measured(options: Options, case: str, here: Pages, copy: Copy, wall: bool) -> Row:
    clock = time.perf_counter if wall else time.thread_time
    turns = iter(range(1 << 30))

    def ours(_: int) -> float:
        offsets = here.offsets(next(turns))
        watch = Stopwatch(clock)
        with watch:
            copy(here, offsets)
        return watch.seconds

    def theirs(_: int) -> float:
        watch = Stopwatch(clock)
        with watch:
            here.memmove()
        return watch.seconds

    mine, other = interleaved(ours, theirs, options.rounds)
    return compared(
        "pages",
        case,
        "GB/s",
        [here.moved_bytes / seconds / 1e9 for seconds in mine],
        better="larger",
        baseline="memmove",
        theirs=[here.moved_bytes / seconds / 1e9 for seconds in other],
        note=_NOTE,
    )
