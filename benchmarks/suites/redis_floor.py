"""The floor under the remote tier's figures: the same bytes over a bare socket, without client, frame or checksum.

What the system's socket costs on this machine, by the cheapest way found: SET whose payload is lent to a Unix socket
(kvstore.page_pipe) or given to sendmsg on TCP, GET whose reply goes into its place in one call. One thread.
"""

from __future__ import annotations

import socket

import numpy as np
import numpy.typing as npt

from kvstore.page_pipe import PagePipe
from kvstore.redis_tier.protocol import encode

_AHEAD = 4  # commands under way, as the tier has them at 1 MiB
_OK = b"+OK\r\n"

Bytes = npt.NDArray[np.uint8]


class BareSocket:
    """Values of payload_bytes, cut from `source`, and back into `target`."""

    def __init__(self, path: str | None, port: int, source: Bytes, target: Bytes, payload_bytes: int) -> None:
        """path: of the Unix socket; None: loopback."""
        if path is None:
            self._socket = socket.create_connection(("127.0.0.1", port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(path)
        self._pipe = PagePipe.open_for(self._socket)
        self._sources = [source[at : at + payload_bytes] for at in range(0, source.nbytes, payload_bytes)]
        self._targets = [target[at : at + payload_bytes] for at in range(0, target.nbytes, payload_bytes)]
        self._head = b"$%d\r\n" % payload_bytes
        self._names = [b"bare:%d" % number for number in range(len(self._sources))]

    def put(self) -> None:
        for at in range(0, len(self._names), _AHEAD):
            part = range(at, min(at + _AHEAD, len(self._names)))
            for number in part:
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n%b" % (
                    len(self._names[number]),
                    self._names[number],
                    self._head,
                )
                self._send(head, self._sources[number])
            self._expect(_OK * len(part))

    def get(self) -> None:
        for at in range(0, len(self._names), _AHEAD):
            part = range(at, min(at + _AHEAD, len(self._names)))
            self._socket.sendall(b"".join([encode([b"GET", self._names[number]]) for number in part]))
            for number in part:
                self._expect(self._head)
                self._fill(self._targets[number].data)
                self._expect(b"\r\n")

    def forget(self) -> None:
        """Drop what is stored, so that a put does not replace."""
        self._socket.sendall(encode([b"UNLINK", *self._names]))
        while self._socket.recv(64)[-2:] != b"\r\n":
            pass

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        self._socket.close()

    def _send(self, head: bytes, payload: Bytes) -> None:
        if self._pipe is not None:
            self._socket.sendall(head)
            if not self._pipe.send(payload):
                raise RuntimeError("the system lends no pages")
            self._socket.sendall(b"\r\n")
            return
        sent = self._socket.sendmsg([head, payload.data, b"\r\n"])
        if sent != len(head) + payload.nbytes + 2:
            raise RuntimeError("a blocking socket took less than all")

    def _expect(self, text: bytes) -> None:
        found = bytearray(len(text))
        self._fill(memoryview(found))
        if found != text:
            raise RuntimeError(f"the server said {bytes(found[:64])!r}; expected {text[:64]!r}")

    def _fill(self, view: memoryview) -> None:
        at = 0
        while at < view.nbytes:
            count = self._socket.recv_into(view[at:], 0, socket.MSG_WAITALL)
            if not count:
                raise RuntimeError("closed by the server")
            at += count
