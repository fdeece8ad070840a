"""Who may ask over HTTP: addresses, tokens, and names that a browser may have been fooled with. Pure; any thread."""

from __future__ import annotations

import hmac
import ipaddress
import re
from pathlib import Path

TOKEN_CHARACTERS = (16, 512)


def is_loopback(host: str) -> bool:
    """Whether `host` reaches this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def read_address(text: str) -> tuple[str, int] | None:
    """(host, port) of "PORT" (on loopback), "HOST:PORT" or "[HOST]:PORT"; None for anything else."""
    host, _, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not re.fullmatch("[0-9]{1,5}", port) or int(port) >= 1 << 16 or (":" in host and not bracketed):
        return None
    return host.strip("[]") or "127.0.0.1", int(port)


def token_of(path: Path) -> str | None:
    """The token that a file holds, or None: 16 to 512 characters without blanks."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    fits = TOKEN_CHARACTERS[0] <= len(token) <= TOKEN_CHARACTERS[1]
    return token if fits and token.isprintable() and " " not in token else None


def why_no_token(path: Path) -> str:
    """Of a file that `token_of` finds none in: whether it is not there, or what it holds is none."""
    try:
        path.read_bytes()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror}); expected a file with a token"
    return f"{path} holds no token; expected {TOKEN_CHARACTERS[0]} to {TOKEN_CHARACTERS[1]} characters without blanks"


def has_token(authorization: str, token: str) -> bool:
    """Whether a request's Authorization header carries the token. In constant time."""
    given = authorization.encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())


def names_loopback(host_header: str) -> bool:
    """Whether a Host header names this machine, whatever the port. A page elsewhere that had its own name resolved to
    loopback (DNS rebinding) sends that name."""
    host = host_header.strip()
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return is_loopback(host)
