"""The bytes of the host tier: one private anonymous mapping, asked for in huge pages, prefaulted in the background.

Used by HostTier only. `memory` may be written by any thread that owns a slot of it; prefaulting populates pages without
changing them, so it may run beside writers.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import numpy as np

from allocator.errors import CapacityError
from kvstore.tier import ByteRow

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_CHUNK_BYTES = 2 << 20  # the call holds the interpreter's lock, so in small steps


class HostArena:
    """capacity_bytes of memory. CapacityError when the system refuses the mapping."""

    def __init__(self, capacity_bytes: int, *, prefault: bool) -> None:
        self.capacity_bytes = capacity_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        try:
            self._map = mmap.mmap(-1, capacity_bytes, flags=flags)
        except (OSError, ValueError, OverflowError, MemoryError) as error:
            raise CapacityError(capacity_bytes, 0, "bytes") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                self.huge_pages = False
            else:
                self.huge_pages = True
        self.memory: ByteRow = np.frombuffer(self._map, dtype=np.uint8)
        self.prefaulted_bytes = 0
        self.prefault_supported = True
        self._stop = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        if prefault:
            self._thread = threading.Thread(target=self._prefault, name="kvstore-prefault", daemon=True)
            self._thread.start()
        else:
            self._ended.set()

    def wait_prefaulted(self, timeout_seconds: float) -> bool:
        return self._ended.wait(timeout_seconds)

    def close(self) -> None:
        """Stop prefaulting and give the memory back. Idempotent."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if not self._map.closed:
            self.memory = np.empty(0, dtype=np.uint8)
            with contextlib.suppress(BufferError):  # a view is still out: the memory goes with it
                self._map.close()

    def _prefault(self) -> None:
        try:
            while self.prefaulted_bytes < self.capacity_bytes and not self._stop.is_set():
                size = min(_CHUNK_BYTES, self.capacity_bytes - self.prefaulted_bytes)
                self._map.madvise(_POPULATE_WRITE, self.prefaulted_bytes, size)
                self.prefaulted_bytes += size
                self._stop.wait(0.0002)
        except OSError:  # an older kernel, or memory is short: pages come with their first write
            self.prefault_supported = False
        finally:
            self._ended.set()
