"""The daemon's HTTP routes, as a starlette application. The one file here that imports starlette.

What is read is open on loopback, unless a token was set; beyond it a token is required. Admin calls always take one:
every user of a machine reaches its loopback, and so does every page in a browser there. A Host header that is not this
machine's is refused on loopback (DNS rebinding). The page itself holds no figures and needs no token.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from allocator.errors import KVError, TierError
from kvstore.daemon.admin_log import caller
from kvstore.daemon.http_admin import BodyError
from kvstore.daemon.http_metrics import CONTENT_TYPE, DaemonMetrics
from kvstore.daemon.http_page import content_security_policy, live_page
from kvstore.http_access import has_token, names_loopback

if TYPE_CHECKING:
    from kvstore.daemon.http_admin import AdminCalls
    from kvstore.daemon.http_history import History

BODY_BYTES_LIMIT = 64 << 10
_BODY_SECONDS = 5.0
_SNAPSHOT_SECONDS = 0.2
_NOT_CALLED = (404, 408, 413, 415)  # of an admin call: refused before it was made
_Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Access:
    """token: what readers must send, "" for nothing; admin_token: for admin calls, "" where they are off."""

    on_loopback: bool
    token: str
    admin_token: str


class Snapshots:
    """The statistics, taken at most five times a second however many ask. Any thread."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._latest: dict[str, Any] = {}
        self._until = 0.0

    def __call__(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._latest = self._stats()
                self._until = time.monotonic() + _SNAPSHOT_SECONDS
            return self._latest


class _Routes:
    def __init__(
        self, stats: Callable[[], dict[str, Any]], history: History, admin: AdminCalls, access: Access
    ) -> None:
        self._stats, self._history, self._admin, self._access = stats, history, admin, access
        self._metrics = DaemonMetrics(stats)
        self._page = live_page()

    async def page(self, _request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": content_security_policy()})

    async def health(self, _request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        is_ready = (await run_in_threadpool(self._stats))["ready"]
        return JSONResponse({"ready": is_ready}, status_code=200 if is_ready else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(await run_in_threadpool(self._metrics.text), headers={"Content-Type": CONTENT_TYPE})

    async def stats(self, _request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self._stats))

    async def history(self, request: Request) -> Response:
        try:
            after = float(request.query_params.get("after", 0))
        except ValueError:
            return refused(400, "after: expected a time in seconds")
        return JSONResponse(self._history.after(after))

    async def admin(self, request: Request) -> Response:
        host, name = request.client.host if request.client else "", request.path_params["name"]
        if not self._access.admin_token:
            self._admin.log.stranger(caller(host, ""), name, "admin calls are off")
            return refused(403, "admin calls are off here; expected http_admin in the daemon's settings")
        if not has_token(request.headers.get("authorization", ""), self._access.admin_token):
            self._admin.log.stranger(caller(host, ""), name, "not the admin token")
            return refused(401, "expected the admin token as 'Authorization: Bearer ...'")
        who = caller(host, "http_token" if self._access.token else "the token of the socket")
        answer = await self._admin_answer(request, name, who)
        if answer.status_code in _NOT_CALLED:
            self._admin.log.called(who, repr(name), None, f"refused: HTTP {answer.status_code}")
        return answer

    async def _admin_answer(self, request: Request, name: str, who: str) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            return refused(415, f"content-type: got {kind[:80]!r}; expected application/json")
        if name not in self._admin.names:
            return refused(404, f"admin call: got {name[:80]!r}; expected one of {', '.join(self._admin.names)}")
        try:
            body = await asyncio.wait_for(_body(request), _BODY_SECONDS)
        except (TimeoutError, ClientDisconnect):
            return refused(408, "the body did not come")
        if body is None:
            return refused(413, f"expected a body of at most {BODY_BYTES_LIMIT} bytes")
        try:
            return JSONResponse(await run_in_threadpool(self._admin.call, name, body, who))
        except BodyError as error:
            return refused(400, str(error))
        except TierError as error:
            return refused(502, str(error))
        except KVError as error:
            return refused(409, str(error))

    def open(self, handler: _Handler) -> _Handler:
        """A route that needs no token, but the right name."""

        async def handle(request: Request) -> Response:
            if self._access.on_loopback and not names_loopback(request.headers.get("host", "")):
                return refused(421, "this is another machine's name")
            return _plain(await handler(request))

        return handle

    def read(self, handler: _Handler) -> _Handler:
        """A route that tells what is there."""

        async def handle(request: Request) -> Response:
            token = self._access.token
            if token and not has_token(request.headers.get("authorization", ""), token):
                return refused(401, "expected the daemon's token as 'Authorization: Bearer ...'")
            return await handler(request)

        return self.open(handle)


def make_app(stats: Callable[[], dict[str, Any]], history: History, admin: AdminCalls, access: Access) -> Starlette:
    """The application. stats: gives Daemon.stats(); history and admin stay the caller's."""
    routes = _Routes(Snapshots(stats), history, admin, access)
    return Starlette(
        routes=[
            Route("/", routes.open(routes.page)),
            Route("/healthz", routes.open(routes.health)),
            Route("/readyz", routes.open(routes.ready)),
            Route("/metrics", routes.read(routes.metrics)),
            Route("/v1/stats", routes.read(routes.stats)),
            Route("/v1/history", routes.read(routes.history)),
            Route("/v1/admin/{name}", routes.open(routes.admin), methods=["POST"]),
        ],
        exception_handlers={HTTPException: _no_route},
    )


def _no_route(request: Request, error: Exception) -> Response:
    """A path that is none, or not for this method."""
    assert isinstance(error, HTTPException)
    asked, allowed = f"{request.method} {request.url.path[:80]}", (error.headers or {}).get("Allow")
    message = "no such path" if allowed is None else f"expected {allowed}"
    answer = refused(error.status_code, f"{asked}: {message}; docs/how-to/daemon.md has all")
    answer.headers.update(error.headers or {})
    return answer


async def _body(request: Request) -> bytes | None:
    """None: too long."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > BODY_BYTES_LIMIT:
            return None
    return bytes(body)


def refused(status: int, message: str) -> Response:
    answer = JSONResponse({"error": message}, status_code=status)
    if status == 401:
        answer.headers["WWW-Authenticate"] = "Bearer"
    if status in (408, 413):
        answer.headers["Connection"] = "close"
    return _plain(answer)


def _plain(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "no-store"
    answer.headers["X-Content-Type-Options"] = "nosniff"
    answer.headers["X-Frame-Options"] = "DENY"
    return answer
