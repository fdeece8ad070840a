"""Descriptors that hang up the moment this process dies: before the kernel has given its memory back.

A killed process loses its memory first and its sockets last, and gigabytes take the kernel a second: so long a client
would wait for a dead daemon. Threads die at once, though, and one with a descriptor table of its own (close_range with
CLOSE_RANGE_UNSHARE) lets go of what only it holds: the write end of a pipe. Clients poll the read end. The last thread
of a process to die is the one that gives the memory back, so there are two. Where the system has no such call there are
none, and a client hears of it by its socket.

The threads stay in C: what Python closed on them it would close in the wrong table.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading

_COUNT = 2
_UNSHARE, _LAST_FD = 2, 0xFFFFFFFF


class TellTales:
    """read_fds: for clients, none or two. They hang up with `close`, too."""

    def __init__(self) -> None:
        self.read_fds: list[int] = []
        self._libc = ctypes.CDLL(None)
        self._stop_fd, self._threads = -1, list[threading.Thread]()
        if not hasattr(self._libc, "close_range"):
            return
        stopped_fd, self._stop_fd = os.pipe2(os.O_CLOEXEC)
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.read_fds = [fd for _ in range(_COUNT) if (fd := self._begin(stopped_fd)) >= 0]
        finally:
            os.close(stopped_fd)
            if was_enabled:
                gc.enable()

    def close(self) -> None:
        """Idempotent."""
        if self._stop_fd >= 0:
            os.close(self._stop_fd)
            self._stop_fd = -1
            for thread in self._threads:
                thread.join()
            for descriptor in self.read_fds:
                os.close(descriptor)
            self.read_fds = []

    def _begin(self, stopped_fd: int) -> int:
        """The read end; -1 when the thread could not get a table of its own."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        begun, outcome = threading.Event(), [-1]
        thread = threading.Thread(
            target=self._live, args=(write_fd, stopped_fd, begun, outcome), name="kvstore-tell-tale", daemon=True
        )
        thread.start()
        begun.wait()
        os.close(write_fd)  # here; the thread has its own
        if outcome[0]:
            os.close(read_fd)
            return -1
        self._threads.append(thread)
        return read_fd

    def _live(self, write_fd: int, stopped_fd: int, begun: threading.Event, outcome: list[int]) -> None:
        low, high = sorted((write_fd, stopped_fd))
        close_range, kept = self._libc.close_range, ctypes.create_string_buffer(1)
        outcome[0] = close_range(ctypes.c_uint(high + 1), ctypes.c_uint(_LAST_FD), _UNSHARE)
        if not outcome[0]:
            for first, last in ((low + 1, high - 1), (0, low - 1)):
                if first <= last:
                    close_range(ctypes.c_uint(first), ctypes.c_uint(last), 0)
        begun.set()
        if not outcome[0]:
            self._libc.read(stopped_fd, kept, ctypes.c_size_t(1))  # until close, or death
            self._libc.close(write_fd)
