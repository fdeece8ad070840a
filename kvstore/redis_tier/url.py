"""Where the remote tier's servers are: one URL setting, parsed. Specified in docs/how-to/redis.md.

Pure values; imports no client. Nothing here ever prints a password.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import parse_qsl, unquote, urlsplit

from allocator.errors import ConfigError

DEFAULT_NAMESPACE = "kv1"
_PORTS = {"sentinel": 26379}
_NAMESPACE = re.compile(r"[A-Za-z0-9_.-]{1,32}")
_OPTIONS = ("namespace", "db", "tls_ca", "tls_cert", "tls_key", "tls_verify", "sentinel_user", "sentinel_password")
_EXPECTED = (
    "redis://[user:password@]host:port[/db], rediss:// (TLS), unix://[user:password@]/path.sock, "
    "redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port"
)


class Topology(StrEnum):
    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. hosts are (host, port), empty for a Unix socket; passwords are in no repr."""

    topology: Topology
    hosts: tuple[tuple[str, int], ...] = ()
    path: str | None = None
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    database: int = 0
    service: str | None = None
    namespace: str = DEFAULT_NAMESPACE
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_verify: bool = True
    sentinel_user: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        """For logs: what is reached, no credentials."""
        where = self.path or ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.topology} {where}{' TLS' if self.tls else ''}"


def redacted(url: str) -> str:
    """The URL without what stands before its last @, and without its options: for messages."""
    scheme, separator, rest = url.partition("://")
    return f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}" if separator else "(no URL)"


def parse_redis_url(url: str) -> RedisAddress:
    """ConfigError says what is wrong, and never shows credentials."""

    def wrong(what: str) -> ConfigError:
        return ConfigError(f"redis_url: got {redacted(url)!r}: {what}; expected {_EXPECTED}")

    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise wrong("it does not parse") from None
    scheme, _, suffix = parts.scheme.partition("+")
    if (scheme, suffix) not in {
        ("unix", ""),
        *((s, t) for s in ("redis", "rediss") for t in ("", "sentinel", "cluster")),
    }:
        raise wrong(f"scheme {parts.scheme!r}")
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise wrong(f"unknown options {', '.join(unknown)} (known: {', '.join(_OPTIONS)})")
    credentials, _, hosts = parts.netloc.rpartition("@")
    user, _, password = credentials.partition(":")
    topology = Topology(suffix) if suffix else Topology.SINGLE
    tail = unquote(parts.path).strip("/")
    path = unquote(parts.path) if scheme == "unix" else None
    service = tail if topology is Topology.SENTINEL else None
    database = options.get("db", tail if topology is Topology.SINGLE and scheme != "unix" else "") or "0"
    namespace = options.get("namespace", DEFAULT_NAMESPACE)
    if scheme == "unix" and (hosts or not tail):
        raise wrong("a Unix socket needs a path and no host")
    if topology is Topology.SENTINEL and not service:
        raise wrong("Sentinel needs the service's name as path")
    if not database.isdecimal() or (topology is Topology.CLUSTER and (tail or int(database))):
        raise wrong("the database")
    if not _NAMESPACE.fullmatch(namespace):
        raise wrong("the namespace (1 to 32 of A-Z a-z 0-9 _ . -)")
    if options.get("tls_verify", "yes") not in ("yes", "no"):
        raise wrong("tls_verify (yes or no)")
    return RedisAddress(
        topology=topology,
        hosts=() if scheme == "unix" else _hosts(hosts, _PORTS.get(suffix, 6379), wrong("a host or port")),
        path=path,
        tls=scheme == "rediss",
        username=unquote(user) or None,
        password=unquote(password) or None,
        database=int(database),
        service=service,
        namespace=namespace,
        tls_ca=options.get("tls_ca"),
        tls_cert=options.get("tls_cert"),
        tls_key=options.get("tls_key"),
        tls_verify=options.get("tls_verify", "yes") == "yes",
        sentinel_user=options.get("sentinel_user"),
        sentinel_password=options.get("sentinel_password"),
    )


def _hosts(text: str, default_port: int, refusal: ConfigError) -> tuple[tuple[str, int], ...]:
    found = []
    for one in text.split(","):
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", one)
        if match is None or not 0 < int(match[2] or default_port) < 65536:
            raise refusal
        found.append((match[1].strip("[]"), int(match[2] or default_port)))
    return tuple(found)
