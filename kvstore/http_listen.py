"""Runs an application with uvicorn, in the foreground or on a thread. The one file that imports it."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from allocator.errors import TierError

_CONNECTIONS = 64
_LONGEST_HEAD_BYTES = 16 << 10
_IDLE_SECONDS = 5
_HEAD_SECONDS = 5.0  # for the whole head of a request, however it drips
_ANSWER_SECONDS = 60.0  # from there to the end of its answer, however slowly that is read
_START_SECONDS = 10.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: on, no seconds


class _Announcing(uvicorn.Server):
    """Says where it listens as soon as it does, on one line that a script can wait for."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for server in self.servers:
            for one in server.sockets:
                print(f"listening on {_url(one)}", flush=True)


def serve(app: Starlette, host: str, port: int) -> None:
    """Until a signal. Open answers get a few seconds to end."""
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off"
    )
    _Announcing(config).run()


class _BoundedProtocol(H11Protocol):
    """uvicorn's, which waits without end for a request's head and for who does not read, and turns a new client away
    once so many wait. Here each has its time, and one gives way to a new one: that which has waited longest for a head,
    or has been answered longest where all are."""

    _deadline: asyncio.TimerHandle | None = None
    _waits = True  # it has sent no whole head
    _since = 0.0  # it does so, or is answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin(waits=True)
        if len(self.connections) >= _CONNECTIONS:
            others = [one for one in self.connections if isinstance(one, _BoundedProtocol) and one is not self]
            oldest = min(others, key=lambda one: (not one._waits, one._since))
            oldest.connections.discard(oldest)
            oldest._cut_off()

    def handle_events(self) -> None:
        super().handle_events()
        if self._waits and self.cycle is not None and not self.cycle.response_complete:
            self._begin(waits=False)

    def on_response_complete(self) -> None:
        super().on_response_complete()  # which begins with the next request of a pipeline
        self._begin(waits=self.cycle is None or self.cycle.response_complete)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)
        self.transport.close()  # it is a cycle until then, also where it was lost; the daemon hardly looks for cycles
        if sys.version_info < (3, 12):
            with suppress(AttributeError):  # asyncio's stayed one, until there was nothing left to mend there
                self.transport._read_ready_cb = None  # type: ignore[attr-defined]

    def _begin(self, *, waits: bool) -> None:
        """To wait for a head, or to answer: each has its time from now on."""
        self._waits, self._since = waits, time.monotonic()
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(_HEAD_SECONDS if waits else _ANSWER_SECONDS, self._cut_off)

    def _cut_off(self) -> None:
        """At once, with all that is still to be sent: the system would go on offering that to who does not read."""
        sock = self.transport.get_extra_info("socket")
        if sock is not None:
            with suppress(OSError):  # it is closed already
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()


class ThreadServer:
    """Serves on a thread of its own from construction to close. TierError when the address cannot be had."""

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self._sock = _bound(host, port)
        self.url = _url(self._sock)
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            http=_BoundedProtocol,
            ws="none",
            lifespan="off",
            limit_concurrency=_CONNECTIONS + 1,
            h11_max_incomplete_event_size=_LONGEST_HEAD_BYTES,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._sock],), name="kvstore-http", daemon=True)
        self._thread.start()
        until = time.monotonic() + _START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > until:
                self._sock.close()
                raise TierError(f"http {self.url}: the server did not start")
            time.sleep(0.005)

    def close(self) -> None:
        """Idempotent."""
        self._server.should_exit = True
        self._thread.join(5.0)
        self._sock.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock = socket.socket(*found[:3])
    except OSError as error:
        raise TierError(f"http {host}:{port}: no such address ({error.strerror})") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(found[4])
    except OSError as error:
        sock.close()
        raise TierError(f"http {host}:{port}: cannot listen there ({error.strerror})") from error
    return sock


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
