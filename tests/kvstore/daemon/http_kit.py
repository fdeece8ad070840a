"""What the tests of the daemon's HTTP side share: a daemon with it, and a client that may send anything."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings
from kvstore.daemon.http_server import HttpServer

_SERIES = re.compile(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$")


@contextmanager
def served(directory: Path, *, sample_seconds: float = 0.2, reload: Any = None, **changes: Any) -> Iterator[Any]:
    """(daemon, web); changes: settings of either table."""
    names = KVStoreConfig.__dataclass_fields__
    store = {"host_bytes": 8 << 20} | {name: value for name, value in changes.items() if name in names}
    own = {name: value for name, value in changes.items() if name not in names}
    own = {"http": "0", "socket_path": str(directory / "d.sock")} | own
    daemon = Daemon(DaemonSettings(store=KVStoreConfig(**store), **own))
    try:
        daemon.start()
        server = HttpServer(daemon, reload, sample_seconds)
        try:
            yield daemon, Web(server.url, daemon.settings.http_token_path)
        finally:
            server.close()
    finally:
        daemon.stop()


class Web:
    """Asks one server."""

    def __init__(self, url: str, token_path: str = "") -> None:
        self.url, self._token_path = url, token_path

    @property
    def admin_token(self) -> str:
        return Path(self._token_path).read_text(encoding="ascii").strip()

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """A header's underscores become dashes."""
        parts = urlsplit(self.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def json(self, path: str, **headers: str) -> Any:
        status, _, body = self.ask("GET", path, **headers)
        assert status == 200, (status, body)
        return json.loads(body)

    def admin(self, call: str, /, token: str | None = None, **fields: Any) -> tuple[int, Any]:
        token = self.admin_token if token is None else token
        headers = {"Authorization": f"Bearer {token}", "Content_Type": "application/json"}
        status, _, body = self.ask("POST", f"/v1/admin/{call}", json.dumps(fields).encode(), **headers)
        return status, json.loads(body)

    def metrics(self) -> dict[str, float]:
        """Values by series, labels as written."""
        status, headers, body = self.ask("GET", "/metrics")
        assert status == 200
        assert headers["content-type"].startswith("text/plain; version=0.0.4")
        found: dict[str, float] = {}
        for line in body.decode().splitlines():
            if not line.startswith("#"):
                match = _SERIES.match(line)
                assert match, line
                found[f"{match[1]}{{{match[2]}}}" if match[2] else match[1]] = float(match[3])
        return found
