"""Registration of an existing host buffer (the arena of the host tier) with CUDA, in pieces, so it can begin small.

Numbers only: no cupy, no torch. One thread registers; `registered_bytes` may be read from any. Pinning is slow (seconds
for tens of GiB), so a background thread calls `register_next` until it returns False, and copies use what is ready.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from quant.cuda.driver import MemoryDriver
from quant.cuda.errors import CudaMemoryError

PAGE_BYTES = 4096
DEFAULT_PIECE_BYTES = 256 << 20


class RegisteredHost:
    """A writable buffer (memoryview, mmap, numpy array) that the device may read and write.

    Keeps the buffer alive; `close` gives it back, after the device has done all its work. A context manager.
    """

    def __init__(self, driver: MemoryDriver, buffer: Any, piece_bytes: int = DEFAULT_PIECE_BYTES) -> None:
        if piece_bytes < PAGE_BYTES or piece_bytes % PAGE_BYTES:
            raise CudaMemoryError(f"pieces must be multiples of {PAGE_BYTES} bytes, got {piece_bytes}")
        view = memoryview(buffer)
        if view.readonly or not view.contiguous:
            raise CudaMemoryError("expected a writable, contiguous buffer")
        self._array = np.frombuffer(view.cast("B"), np.uint8)
        self.address = int(self._array.ctypes.data)
        self.size_bytes = self._array.nbytes
        if self.address % PAGE_BYTES:
            raise CudaMemoryError(f"the buffer must begin on a {PAGE_BYTES}-byte page, got {self.address:#x}")
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._pieces: list[int] = []
        self.device_address = 0
        self.registered_bytes = 0

    def register_next(self) -> bool:
        """Registers one more piece; False when all was registered before. CudaMemoryError when the driver refuses."""
        if self.registered_bytes >= self.size_bytes:
            return False
        start = self.address + self.registered_bytes
        size = min(self._piece_bytes, self.size_bytes - self.registered_bytes)
        seen = self._driver.register_host(start, size)
        if not self._pieces:
            self.device_address = seen
        elif seen != self.device_address + self.registered_bytes:
            self._driver.unregister_host(start)
            raise CudaMemoryError("this device maps pieces of host memory apart: register the buffer in one piece")
        self._pieces.append(start)
        self.registered_bytes += size
        return True

    def register_all(self) -> None:
        """Registers the rest, piece by piece."""
        while self.register_next():
            pass

    def close(self) -> None:
        """Waits for the device and unregisters. May be called twice."""
        if self._pieces:
            self._driver.synchronize()
        while self._pieces:
            self._driver.unregister_host(self._pieces.pop())
        self.registered_bytes = 0

    def __enter__(self) -> RegisteredHost:
        self.register_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
