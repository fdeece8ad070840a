"""Large buffers into a Unix socket without copying them: their pages are lent to the socket through a pipe (Linux).

vmsplice puts references to pages into a pipe, splice moves them to the socket; the kernel copies once, when the server
reads. Half the client's CPU of a sendmsg (on TCP it gained nothing that could be told from noise). The bytes must not
change until the server has answered: that is a tier's rule for buffers under way anyhow. If a call is given up before,
a server may store what has changed meanwhile; the frame's checksum, taken before, then does not fit, and the copy is a
miss. Only payloads are lent: commands and lengths cannot change under way.

One thread at a time. Where the system refuses any of it, `open_for` or the first `send` says so and nothing was sent.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import sys
from functools import cache

from kvstore.tier import ByteRow

LEAST_BYTES = 64 << 10  # smaller ones are copied sooner than lent
_PIPE_BYTES = 1 << 20
_QUEUE_BYTES = 1 << 20  # lent to the socket at most, as far as the system allows: each time it is full costs a wakeup
_F_SETPIPE_SZ = 1031


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@cache
def _vmsplice() -> ctypes._NamedFuncPointer | None:
    if sys.platform != "linux":
        return None
    found = getattr(ctypes.CDLL(None, use_errno=True), "vmsplice", None)
    if found is not None:
        found.argtypes = [ctypes.c_int, ctypes.POINTER(_Piece), ctypes.c_ulong, ctypes.c_uint]
        found.restype = ctypes.c_ssize_t
    return found


class PagePipe:
    """A pipe in front of one blocking Unix socket."""

    def __init__(self, sock: socket.socket) -> None:
        """OSError when the system does not give a pipe of this size."""
        self._sock = sock
        self._out, self._in = os.pipe()
        try:
            fcntl.fcntl(self._in, _F_SETPIPE_SZ, _PIPE_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
        except OSError:
            self.close()
            raise

    @classmethod
    def open_for(cls, sock: socket.socket) -> PagePipe | None:
        """None where this cannot be done."""
        if sock.family != socket.AF_UNIX or _vmsplice() is None or not hasattr(os, "splice"):
            return None
        try:
            return cls(sock)
        except OSError:
            return None

    def send(self, row: ByteRow) -> bool:
        """Send all of it. False: the system refused the first piece. An OSError later leaves the socket unusable."""
        vmsplice = _vmsplice()
        assert vmsplice is not None
        at, left = row.__array_interface__["data"][0], row.nbytes
        target = self._sock.fileno()
        while left:
            lent = vmsplice(self._in, ctypes.byref(_Piece(at, left)), 1, 0)
            if lent <= 0:
                if left == row.nbytes:
                    return False
                raise OSError(ctypes.get_errno() or errno.EIO, "vmsplice")
            at, left = at + lent, left - lent
            while lent:
                moved = os.splice(self._out, target, lent)
                if not moved:
                    raise OSError(errno.EPIPE, "splice")
                lent -= moved
        return True

    def close(self) -> None:
        for descriptor in (self._out, self._in):
            if descriptor >= 0:
                os.close(descriptor)
        self._out = self._in = -1
