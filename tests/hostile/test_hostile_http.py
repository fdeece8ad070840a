"""Clients of the daemon's HTTP side that mean ill: slow heads, endless ones, pipelines, names and paths."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvstore.daemon import Daemon
from kvstore.http_listen import ThreadServer
from tests.kvstore.daemon.http_kit import Web, served
from tests.kvstore.daemon.kit import until


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[Daemon, Web]]:
    with served(tmp_path) as found:
        yield found


def connected(client: Web) -> socket.socket:
    host, _, port = client.url.removeprefix("http://").partition(":")
    sock = socket.create_connection((host, int(port)))
    sock.settimeout(60)
    return sock


def is_ended(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n"])
def test_heads_that_never_end_take_nobodys_place(web: tuple[Daemon, Web], sent: bytes) -> None:
    """Found here: 64 of them kept everybody out until they left."""
    _, client = web
    slow = [connected(client) for _ in range(200)]
    for one in slow:
        with suppress(OSError):  # it gave way already
            one.sendall(sent)
    for _ in range(20):
        assert client.ask("GET", "/healthz")[0] == 200
    until(lambda: sum(map(is_ended, slow)) >= 136, what="who has waited longest gives way")
    for one in slow:
        one.close()


def test_a_head_that_drips_has_its_time_and_no_more(web: tuple[Daemon, Web], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.http_listen._HEAD_SECONDS", 0.3)
    _, client = web
    dripping, second = connected(client), connected(client)
    second.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 " in second.recv(4096)
    second.sendall(b"GET /healthz HT")  # the head of a later request has no more
    started = time.monotonic()
    with pytest.raises(OSError):  # noqa: PT011, PT012 - until it is cut off, by whichever error
        while time.monotonic() - started < 60:
            dripping.sendall(b"x")
            time.sleep(0.02)
    assert time.monotonic() - started > 0.2
    until(lambda: is_ended(second))
    for one in (dripping, second):
        one.close()


def test_who_does_not_read_is_cut_off(web: tuple[Daemon, Web], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.http_listen._ANSWER_SECONDS", 0.5)
    _, client = web
    deaf = connected(client)
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.settimeout(0.1)
    started = time.monotonic()
    with pytest.raises((ConnectionResetError, BrokenPipeError)):  # noqa: PT012 - once it is cut off
        while time.monotonic() - started < 60:
            with suppress(TimeoutError):
                deaf.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
    deaf.close()
    assert client.ask("GET", "/healthz")[0] == 200


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_connection_leaves_no_cycle_behind(web: tuple[Daemon, Web], is_cut_off: bool) -> None:
    """The daemon looks for cycles among the youngest objects only. asyncio's transports are such, in a way of their own
    in each version of Python, so this is what says whether ours still ends it."""
    _, client = web
    gc.collect()
    gc.disable()
    try:
        if is_cut_off:
            many = [connected(client) for _ in range(80)]
            until(lambda: sum(map(is_ended, many)) >= 16)
            for one in many:
                one.close()
        for _ in range(20):
            assert client.ask("GET", "/metrics")[0] == 200
        until(lambda: not [one for one in gc.get_objects() if type(one).__name__ == "_SelectorSocketTransport"])
    finally:
        gc.enable()


def test_slow_answers_take_nobodys_place() -> None:
    """Found here: 64 that were long under way kept everybody out until the first was done, or its minute over."""

    async def slow(_: Request) -> Response:
        await asyncio.sleep(60)
        return Response("late")

    app = Starlette(routes=[Route("/slow", slow), Route("/quick", lambda _: Response("now"))])
    server = ThreadServer(app, "127.0.0.1", 0)
    client = Web(server.url)
    waiting = [connected(client) for _ in range(80)]
    for one in waiting:
        with suppress(OSError):  # it gave way already
            one.sendall(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n\r\n")
    until(lambda: sum(map(is_ended, waiting)) >= 16, what="the longest under way give way")
    for _ in range(5):
        assert client.ask("GET", "/quick")[::2] == (200, b"now")
    for one in waiting:
        one.close()
    server.close()


def test_a_pipeline_is_answered_in_order_and_one_at_a_time(web: tuple[Daemon, Web]) -> None:
    _, client = web
    sock = connected(client)
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n"
    sock.sendall(one * 200)
    said = b""
    while said.count(b"HTTP/1.1 ") < 400:
        piece = sock.recv(65536)
        assert piece
        said += piece
    statuses = [part[:3] for part in said.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404"] * 200
    sock.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 20_000,
        b"GET /" + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /v1/admin/flush HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST /v1/admin/flush HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\r\n\r\n",
    ],
)
def test_heads_that_make_no_sense_are_refused(web: tuple[Daemon, Web], head: bytes) -> None:
    _, client = web
    sock = connected(client)
    said = b""
    with suppress(ConnectionResetError, BrokenPipeError):
        sock.sendall(head)
        said = sock.recv(4096)
    assert said[:12] in (b"", b"HTTP/1.1 400"), said[:80]
    sock.close()
    assert client.ask("GET", "/healthz")[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/..%2f..%2fetc/passwd", "//etc/passwd", "/v1/admin/../stats", "/v1/admin/flush/", "/%00",
     "/v1/stats%00", "http://evil.example/v1/stats", "/v1/admin/%2e%2e/flush", "/page.js", "/V1/STATS"],
)  # fmt: skip
def test_paths_that_are_not_ours_are_not_found(web: tuple[Daemon, Web], path: str) -> None:
    _, client = web
    status, _, body = client.ask("GET", path)
    assert status in (404, 405, 400, 307), (status, body[:200])
    assert b"root:" not in body


def test_another_site_in_a_browser_gets_nothing_done(web: tuple[Daemon, Web]) -> None:
    """No cookie is ever a key, no answer may be read by another origin, and a form's content type is refused."""
    _, client = web
    evil = {"Origin": "https://evil.example", "Sec_Fetch_Site": "cross-site"}
    for path in ("/v1/stats", "/metrics", "/v1/history"):
        _, headers, _ = client.ask("GET", path, **evil)
        assert not [name for name in headers if name.startswith("access-control")]
        assert "set-cookie" not in headers
        assert headers["x-content-type-options"] == "nosniff"
    body: Any = b'{"root":"all"}'
    token = {"Authorization": f"Bearer {client.admin_token}"}
    assert client.ask("POST", "/v1/admin/flush", body, Content_Type="application/json", **evil)[0] == 401
    assert client.ask("POST", "/v1/admin/flush", body, Content_Type="text/plain", **evil, **token)[0] == 415
    for wrong in (f"bearer {client.admin_token}", f"Basic {client.admin_token}", client.admin_token, "Bearer", ""):
        got = client.ask("POST", "/v1/admin/flush", body, Content_Type="application/json", Authorization=wrong)
        assert got[0] == 401, wrong
