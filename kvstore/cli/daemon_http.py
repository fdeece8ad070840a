"""Asks a running daemon over HTTP: what `kvstore top` and `kvstore stats` share."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from allocator.errors import ConfigError, TierError
from kvstore.http_access import read_address, token_of, why_no_token

DEFAULT_URL = "http://127.0.0.1:9473"
_SECONDS = 5.0
_LONGEST_BYTES = 16 << 20


class DaemonHttp:
    """url: of the daemon, or an address as in its setting `http`. ConfigError for one that is none."""

    def __init__(self, url: str = DEFAULT_URL, token_file: Path | None = None) -> None:
        if "://" not in url:
            address = read_address(url)
            if address is None:
                raise ConfigError(f"url: got {url!r}; expected a port, HOST:PORT or http://HOST:PORT")
            host, port = address
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: got {url!r}; expected http:// or https://")
        self.url = url.rstrip("/")
        self._token_file = token_file
        self._token = "" if token_file is None else token_of(token_file)
        if token_file is not None and self._token is None:
            raise ConfigError(f"token file: {why_no_token(token_file)}")

    def get(self, path: str) -> Any:
        """The JSON at a path. TierError says what went wrong."""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        request = urllib.request.Request(self.url + path, headers=headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a daemon is asked itself
        try:
            with opener.open(request, timeout=_SECONDS) as answer:
                return json.loads(answer.read(_LONGEST_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                given = self._token_file
                asked = "; give --token-file" if given is None else f": the token in {given} was refused"
                raise TierError(f"{self.url}: answered {error.code}{asked if error.code == 401 else ''}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or error
            raise TierError(f"{self.url}: no daemon answers there ({reason})") from None
