"""Copies of pages on a stream of their own, and the fences that say when they are done.

For whoever moves blocks: slab slots to a pinned host arena or to another device and back, or slots to slots. Numbers
and owners only: no cupy, no torch. A PageCopier has one lock, held while work is enqueued, never while it runs.

Lifetimes: an asynchronous copy reads its source, its target and its table of offsets when it runs, not when it is
submitted. So the offsets are snapshot at submission, and the copier itself (not the fence that it returns) references
tables and owners until the stream has passed the copy. Nobody else may write a source, or read or write a target,
before the fence is done: blocks in flight are sealed and fenced by the pool.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from quant.cuda.driver import Driver, Event
from quant.cuda.errors import CudaError
from quant.cuda.launches import UNIT_BYTES, RecordPlace, copy_launch


@dataclass(frozen=True, slots=True)
class PageSet:
    """Pages inside one region that the device can address.

    address, size_bytes: the region. offsets: int64 [count], bytes from its start, multiples of 16, any order.
    owner: what keeps the memory alive (a tensor, a RegisteredHost, an OpenedMemory).
    """

    address: int
    size_bytes: int
    offsets: npt.NDArray[np.int64]
    owner: object

    @classmethod
    def contiguous(cls, address: int, page_bytes: int, count: int, owner: object) -> PageSet:
        """`count` pages one after another."""
        return cls(address, page_bytes * count, np.arange(count, dtype=np.int64) * page_bytes, owner)

    @classmethod
    def of_tensor(cls, tensor: Any, offsets: Sequence[int] | npt.NDArray[np.int64]) -> PageSet:
        """Pages of a contiguous torch tensor (a slab, a pinned buffer), zero copy."""
        if not tensor.is_contiguous():
            raise CudaError(f"expected a contiguous tensor, got strides {tuple(tensor.stride())}")
        return cls(tensor.data_ptr(), tensor.nbytes, np.asarray(offsets, np.int64), tensor)

    def check(self, name: str, page_bytes: int) -> None:
        """CudaError for pages that are not inside the region or not on 16-byte boundaries."""
        offsets = self.offsets
        if offsets.ndim != 1 or offsets.dtype != np.int64:
            raise CudaError(f"{name} offsets must be int64 [pages], got {offsets.dtype} {list(offsets.shape)}")
        if offsets.size and (int(offsets.min()) < 0 or int(offsets.max()) > self.size_bytes - page_bytes):
            raise CudaError(
                f"{name} pages of {page_bytes} bytes at {int(offsets.min())}..{int(offsets.max())} are not inside "
                f"{self.size_bytes} bytes"
            )
        if self.address % UNIT_BYTES or page_bytes % UNIT_BYTES or bool((offsets % UNIT_BYTES).any()):
            raise CudaError(f"{name} address, offsets and page bytes must be multiples of {UNIT_BYTES}")


class Fence:
    """When a copy is done. Dropping it neither stops the copy nor frees what the copy uses."""

    __slots__ = ("_driver", "_event")

    def __init__(self, driver: Driver, event: Event) -> None:
        self._driver = driver
        self._event = event

    def done(self) -> bool:
        """Has it run? Never blocks."""
        return self._event.done()

    def wait(self) -> None:
        """Blocks the calling thread until it has run."""
        self._event.wait()

    def hold(self, stream: int) -> None:
        """Later work of `stream` waits for it; the calling thread does not."""
        self._driver.wait_for(stream, self._event)


class PageCopier:
    """Gathers and scatters pages on one stream, in submission order.

    `stream` is a raw handle; `stream_owner` keeps it alive. Use `close` before the memory goes away.
    """

    def __init__(self, driver: Driver, stream: int, stream_owner: object = None) -> None:
        self._driver = driver
        self._stream = stream
        self._stream_owner = stream_owner
        self._lock = threading.Lock()
        self._in_flight: deque[tuple[Event, tuple[object, ...]]] = deque()
        self._closed = False

    def copy(self, target: PageSet, source: PageSet, page_bytes: int, after: Sequence[Fence] = ()) -> Fence:
        """Page i of `source` to page i of `target`; starts when the fences in `after` are done. Returns at once.

        Target pages must not overlap each other nor any source page. Raises CudaError for sets that do not fit.
        """
        if len(source.offsets) != len(target.offsets):
            raise CudaError(f"{len(source.offsets)} source pages, {len(target.offsets)} target pages")
        source.check("source", page_bytes)
        target.check("target", page_bytes)
        with self._lock:
            if self._closed:
                raise CudaError("this copier is closed")
            self._release()
            for fence in after:
                fence.hold(self._stream)
            kept: list[object] = [source.owner, target.owner]
            try:
                if len(source.offsets):
                    self._enqueue(target, source, page_bytes, kept)
            finally:  # whatever was enqueued before an error still runs
                event = self._driver.record(self._stream)
                self._in_flight.append((event, tuple(kept)))
            return Fence(self._driver, event)

    def _enqueue(self, target: PageSet, source: PageSet, page_bytes: int, kept: list[object]) -> None:
        tables = np.stack((target.offsets, source.offsets))
        uploaded = self._driver.upload(tables.view(np.uint8), self._stream)
        kept.append(uploaded.owner)
        places = (
            RecordPlace(target.address, page_bytes, uploaded.address),
            RecordPlace(source.address, page_bytes, uploaded.address + tables.nbytes // 2),
        )
        launch = copy_launch(*places, page_bytes, len(source.offsets))
        if launch is not None:
            self._driver.launch([launch], self._stream)

    def gather(self, pages: PageSet, address: int, page_bytes: int, owner: object) -> Fence:
        """Scattered pages into one run at `address`, in order."""
        return self.copy(PageSet.contiguous(address, page_bytes, len(pages.offsets), owner), pages, page_bytes)

    def scatter(self, address: int, pages: PageSet, page_bytes: int, owner: object) -> Fence:
        """One run at `address` into scattered pages, in order."""
        return self.copy(pages, PageSet.contiguous(address, page_bytes, len(pages.offsets), owner), page_bytes)

    def poll(self) -> int:
        """Lets go of what finished copies used; the number still in flight. Never blocks."""
        with self._lock:
            self._release()
            return len(self._in_flight)

    def close(self) -> None:
        """Waits for what is in flight; nothing may be submitted afterwards. May be called twice."""
        with self._lock:
            self._closed = True
            while self._in_flight:
                self._in_flight[0][0].wait()
                self._in_flight.popleft()

    def _release(self) -> None:
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
