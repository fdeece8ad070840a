"""A proxy between a client and a real server that cuts, stalls or slows the server's bytes at an exact place."""

from __future__ import annotations

import contextlib
import socket
import threading
import time


class CuttingProxy:
    """Forwards both ways. `arm(n)`: of what the server sends from now on, n bytes pass, then the connection is cut, or
    (`stall`) nothing more comes until the client goes away, or (`drip_seconds`) the rest of what was sent at once comes
    a byte each so many seconds, or (`until`) nothing more comes until that event, and then all the rest. Disarmed by
    it, so the next connection works.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._left: int | None = None
        self._stalls = False
        self._drip_seconds = 0.0
        self._until: threading.Event | None = None
        self._again: list[int] = []
        self.cut_count = 0
        self.forwarded_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(
        self,
        byte_count: int,
        *,
        stall: bool = False,
        drip_seconds: float = 0.0,
        times: int = 1,
        until: threading.Event | None = None,
    ) -> None:
        """times: how many connections in turn are cut after as many bytes (of their handshake, too)."""
        with self._lock:
            self._until = until
            self._left, self._stalls, self._again = byte_count, stall, [byte_count] * (times - 1)
            self._drip_seconds = drip_seconds

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:  # closed; where the server is gone instead, whoever comes next is refused
                return
            with contextlib.suppress(OSError):  # a client may be gone again
                for one in (client, server):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for source, sink, is_reply in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._forward, args=(source, sink, is_reply), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, is_reply: bool) -> None:
        try:
            while part := source.recv(1 << 16):
                with self._lock:
                    ends = is_reply and self._left is not None and len(part) >= self._left
                    passes = part[: self._left] if ends else part
                    stalls = ends and self._stalls
                    if is_reply and self._left is not None:
                        if not ends:
                            self._left -= len(part)
                        else:
                            self._left = self._again.pop() if self._again else None
                    self.cut_count += ends
                    self.forwarded_bytes += len(passes) if is_reply else 0
                    drip_seconds = self._drip_seconds if ends else 0.0
                    until = self._until if ends else None
                sink.sendall(passes)
                if until is not None:
                    until.wait(30)
                    sink.sendall(part[len(passes) :])
                    continue
                if drip_seconds:
                    for place in range(len(passes), len(part)):
                        time.sleep(drip_seconds)
                        sink.sendall(part[place : place + 1])
                if stalls:
                    while source.recv(1 << 16):  # until the other direction closes it
                        pass
                if ends:
                    break
        except OSError:
            pass
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
