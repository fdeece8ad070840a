"""A driver that runs nothing until it is told to, and reads sources only then, as an asynchronous copy does."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from quant.cuda.driver import Bytes, DeviceBuffer, Event
from quant.cuda.launches import Launch
from tests.quant.cuda.shim import ShimDevice


class LateEvent:
    """Done when the driver has come past it."""

    def __init__(self, driver: LateDriver) -> None:
        self._driver = driver
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        while not self.passed:
            self._driver.run_one()


class Memory:
    """Something that can be watched: an array that a weak reference can name."""

    def __init__(self, array: Bytes) -> None:
        self.array = array

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


def aligned(size_bytes: int) -> Memory:
    """Zeroed memory at a multiple of 256, as CUDA's is."""
    whole = np.zeros(size_bytes + 256, np.uint8)
    start = -whole.ctypes.data % 256
    return Memory(whole[start : start + size_bytes])


class LateDriver:
    """quant.cuda.driver.Driver: one queue for all streams. `lost`: owners that were gone when their memory was used."""

    def __init__(self, shim: ShimDevice) -> None:
        self._shim = shim
        self._queue: list[Callable[[], None]] = []
        self.lost = 0
        self.waited_for: list[Event] = []

    def run_one(self) -> None:
        self._queue.pop(0)()

    def run_all(self) -> None:
        while self._queue:
            self.run_one()

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        self._queue.append(lambda: self._shim.run(launches))

    def record(self, stream: int) -> LateEvent:
        event = LateEvent(self)
        self._queue.append(lambda: setattr(event, "passed", True))
        return event

    def wait_for(self, stream: int, event: Event) -> None:
        self.waited_for.append(event)

    def upload(self, content: Bytes, stream: int) -> DeviceBuffer:
        pinned, target = Memory(content.reshape(-1).view(np.uint8).copy()), aligned(content.nbytes)
        watched = weakref.ref(pinned), weakref.ref(target)

        def copy() -> None:
            source, place = watched[0](), watched[1]()
            if source is None or place is None:
                self.lost += 1
                return
            place.array[:] = source.array

        self._queue.append(copy)
        return DeviceBuffer(target.address, content.nbytes, (pinned, target))

    def download(self, buffer: DeviceBuffer, stream: int) -> Bytes:
        self.run_all()
        return np.frombuffer(ctypes.string_at(buffer.address, buffer.size_bytes), np.uint8).copy()
