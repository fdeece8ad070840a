"""A daemon's HTTP side: started beside it, ended with it. No torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from allocator.errors import ConfigError, TierError
from kvstore.daemon.http_admin import AdminCalls
from kvstore.daemon.http_history import SAMPLE_SECONDS, History
from kvstore.http_access import is_loopback

if TYPE_CHECKING:
    from kvstore.daemon.server import Daemon


class HttpServer:
    """Serves the page, metrics, statistics and admin calls of a daemon as its settings say, until close.

    reload: reads the settings again, for the admin call. TierError when the address cannot be had.
    """

    def __init__(
        self, daemon: Daemon, reload: Callable[[], None] | None = None, sample_seconds: float = SAMPLE_SECONDS
    ) -> None:
        settings = daemon.settings
        if settings.http_address is None:
            raise ConfigError("http: got ''; expected a port or HOST:PORT")
        try:
            from kvstore.daemon.http_app import Access, make_app
            from kvstore.http_listen import ThreadServer
        except ImportError as error:
            if error.name not in ("starlette", "uvicorn"):
                raise
            raise TierError("http needs starlette and uvicorn: pip install -e '.[daemon]' in a checkout") from None
        host, port = settings.http_address
        on_loopback = is_loopback(host)
        may_admin = on_loopback or settings.http_admin
        admin_token = settings.http_token or secrets.token_urlsafe(32)
        access = Access(on_loopback, settings.http_token, admin_token if may_admin else "")
        self._token_path = ""
        self._history = History(daemon.stats, sample_seconds)
        try:
            app = make_app(daemon.stats, self._history, AdminCalls(daemon, reload), access)
            self._server = ThreadServer(app, host, port)
        except BaseException:
            self._history.close()
            raise
        self.url = self._server.url
        if not settings.http_token:
            self._token_path = settings.http_token_path
            _write_private(self._token_path, admin_token)

    def close(self) -> None:
        """Idempotent."""
        self._server.close()
        self._history.close()
        if self._token_path:
            with suppress(FileNotFoundError):
                os.unlink(self._token_path)


def _write_private(path: str, text: str) -> None:
    """Where only this user can read it, made anew. The directory is the daemon's own."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text + "\n")
