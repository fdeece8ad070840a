"""The settings of `kvstore serve`: one frozen value, from TOML, the environment and flags, each over the one before.

The table [kvstore] (and KVSTORE_<KEY>) says what a store's says: host_bytes, disk_path, redis_url, secret and the rest.
The table [daemon] (and KVSTORE_DAEMON_<KEY>) says what only a daemon has. Pure values; no lock, any thread.
"""

from __future__ import annotations

import difflib
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from allocator.errors import ConfigError
from kvstore.config import (
    _BYTES,
    KVStoreConfig,
    _key,
    _path,
    _read,
    _real,
    _RefusedError,
    _secret,
    _size,
    _truth,
    _whole,
)
from kvstore.config import DAEMON_PREFIX as ENV_PREFIX
from kvstore.config import ENV_PREFIX as STORE_PREFIX
from kvstore.config import TOML_TABLE as STORE_TABLE
from kvstore.daemon.segments import PAGE_BYTES
from kvstore.http_access import is_loopback, read_address
from kvstore.redis_tier.url import parse_redis_url

TOML_TABLE = "daemon"
MOST_SEGMENTS = 16384
"""So many one answer can name."""
_WANTED_SEGMENTS = 192  # chosen; each costs every client a mapping
_LEAST_SEGMENTS = 16  # wanted: fewer make changes of size and holder coarse
_SEGMENT_BYTES = 32 << 20
_HUGE_BYTES = 2 << 20
_UID_TEXT = "user ids, as a list or as text '1000, 1001'"
_LEAST_DISK_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _endpoint(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value or (value and "://" not in value):
        raise _RefusedError
    return value


def _uids(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        value = [part for part in value.split(",") if part.strip()]
    if not isinstance(value, list | tuple):
        raise _RefusedError
    return tuple(_whole(0, (1 << 32) - 2)(one) for one in value)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """A table, or what to_mapping makes of one, or the inside of an inline one (the environment)."""
    if isinstance(value, str):
        try:
            value = tomllib.loads(f"table = {{ {value} }}")["table"]
        except tomllib.TOMLDecodeError as error:
            raise _RefusedError(f"{value!r}, which is no TOML ({error})") from None
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs):
        raise _RefusedError
    return [(name, said) for name, said in pairs]


OWN_DOMAIN = "own"
"""What figures call the domain of the daemon's own user, whose name is empty."""


def _domains(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    found: dict[str, tuple[int, ...]] = {}
    domain_of: dict[int, str] = {}
    for name, uids in _pairs(value):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise _RefusedError(f"the name {name!r}, which is not 1 to 64 letters, digits and '_.-'")
        if name == OWN_DOMAIN:
            raise _RefusedError(f"the name {name!r}, which is what the daemon's own user's is called")
        with _blamed(name, uids):
            found[name] = _uids(uids)
        for uid in found[name]:
            if uid in domain_of:
                raise _RefusedError(f"user id {uid} in {domain_of[uid]!r} and in {name!r}")
            domain_of[uid] = name
    return tuple(found.items())


def _quotas(value: Any) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = {}
    for name, quota in _pairs(value):
        if not isinstance(name, str) or not (len(name) <= 64 and name.isascii() and name.isprintable()):
            raise _RefusedError(f"the name {name!r}, which is not up to 64 printable ASCII characters")
        with _blamed(name, quota):
            found[name] = _size(quota)
    return tuple(found.items())


@contextmanager
def _blamed(name: str, value: Any) -> Iterator[None]:
    """The row of a table that is refused is named."""
    try:
        yield
    except _RefusedError:
        raise _RefusedError(f"{name} = {value!r}") from None


def _http(value: Any) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or (text and read_address(text) is None):
        raise _RefusedError
    return text


def default_socket_path() -> str:
    """In the user's runtime directory, or /run for root, else in a directory below /tmp that is made here: whoever was
    there first would be taken for the daemon. ConfigError where that was somebody else."""
    base = os.environ.get("XDG_RUNTIME_DIR") or ("/run" if os.geteuid() == 0 else _own(f"/tmp/kvstore-{os.geteuid()}"))
    return os.path.join(base, "kvstore", "daemon.sock")


def _own(directory: str) -> str:
    try:
        with suppress(FileExistsError):
            os.mkdir(directory, 0o711)  # others may have to pass: what is in it decides who may connect
        found = os.lstat(directory)
    except OSError as error:
        raise ConfigError(f"socket_path: {directory} cannot be made ({error.strerror}); expected a path") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(f"socket_path: {directory} is not this user's alone; expected a path that is")
    return directory


@dataclass(frozen=True, kw_only=True)
class DaemonSettings:
    """Sizes take ints or text such as "4 GiB"."""

    store: KVStoreConfig = field(default_factory=KVStoreConfig)
    """What a store would say of its host, disk and remote tiers."""
    socket_path: str = _key("", "a path, or '' for the user's runtime directory", _path)
    """Where clients connect; its directory belongs to the daemon."""
    segment_bytes: int = _key(0, _BYTES, _size)
    """Shared memory is given out in pieces of this size, the longest that a frame may be; 0: chosen from host_bytes."""
    allowed_uids: tuple[int, ...] = _key((), _UID_TEXT, _uids)
    """Who may connect besides the daemon's own user."""
    domains: tuple[tuple[str, tuple[int, ...]], ...] = _key(
        (), "names, each with the user ids that trust each other", _domains
    )
    """Users that share an arena; every other user has one of their own. Environment: 'team = [1001, 1002]'."""
    quotas: tuple[tuple[str, int], ...] = _key((), "names of tenants, each with a byte count", _quotas)
    """Most bytes of a tenant's copies in the arena. Environment: 'alice = "4 GiB", bob = "1 GiB"'."""
    lease_seconds: float = _key(10.0, "a number in (0, 3600]", _real(0, 3600, above=True))
    """Life of a read lease; a reader that is slower finds out by the checksum."""
    write_lease_seconds: float = _key(10.0, "a number in (0, 3600]", _real(0, 3600, above=True))
    """After this long a slot that is being written is quarantined."""
    clients_limit: int = _key(256, "an int in [1, 4096]", _whole(1, 4096))
    clients_per_uid: int = _key(64, "an int in [1, 4096]", _whole(1, 4096))
    leases_per_client: int = _key(8192, "an int in [512, 2**20]", _whole(512, 1 << 20))
    """Copies under read leases, under write leases and pinned, each."""
    requests_per_second: int = _key(40000, "an int in [100, 10**7]", _whole(100, 10**7))
    """Shared by all connections; one that asks for more than its part waits."""
    spill_queue_bytes: int = _key(256 << 20, _BYTES, _size)
    """Most that waits for a lower tier, at most a quarter of host_bytes."""
    events_endpoint: str = _key(
        "", "a ZMQ endpoint to bind, such as ipc:///run/events or tcp://127.0.0.1:5557, or '' for none", _endpoint
    )
    """Where KV events of the own domain are published: docs/formats/events.md. Who reads them learns hashes."""
    events_replay_endpoint: str = _key(
        "", "a ZMQ endpoint to bind, such as ipc:///run/events or tcp://127.0.0.1:5557, or '' for none", _endpoint
    )
    """Where past events are asked for."""
    checksums: bool = _key(True, "true or false", _truth)
    """Whether copies in the own domain's arena carry a checksum that every reader checks. Without one, bytes that a
    process of the daemon's own user changes after publishing them are read by the others."""
    drain_seconds: float = _key(10.0, "a number in [0, 3600]", _real(0, 3600))
    """How long a stop waits for what is still to be written down."""

    http: str = _key("", "'' for none, a port on loopback, or HOST:PORT", _http)
    """Where the page, metrics and admin calls are served."""
    http_token: str = _key("", "16 to 64 bytes of text, or file:PATH of a file with them", _secret, private=True)
    """What HTTP clients must send; required beyond loopback. Without one admin calls take that in <socket>.token."""
    http_admin: bool = _key(False, "true or false", _truth)
    """Whether admin calls are taken beyond loopback too."""

    def __post_init__(self) -> None:
        for one in fields(self):
            if "read" in one.metadata:
                object.__setattr__(self, one.name, _read(one.name, one.metadata, getattr(self, one.name)))
        if not self.socket_path:
            object.__setattr__(self, "socket_path", default_socket_path())
        if len(self.socket_path.encode()) > 100:
            raise ConfigError(f"socket_path: got {len(self.socket_path)} characters; expected at most 100")
        if self.store.host_bytes < PAGE_BYTES:
            raise ConfigError(f"host_bytes: got {self.store.host_bytes}; expected at least {PAGE_BYTES} for a daemon")
        if self.store.disk_path and self.store.disk_bytes < _LEAST_DISK_BYTES:
            raise ConfigError(f"disk_bytes: got {self.store.disk_bytes}; expected at least {_LEAST_DISK_BYTES}")
        if self.store.redis_url:
            parse_redis_url(self.store.redis_url)
        object.__setattr__(self, "segment_bytes", self.segment_bytes or _chosen_segment(self.store.host_bytes))
        if self.segment_bytes % PAGE_BYTES or not 0 < self.segment_bytes <= self.store.host_bytes:
            raise ConfigError(
                f"segment_bytes: got {self.segment_bytes}; expected a multiple of {PAGE_BYTES} up to host_bytes "
                f"({self.store.host_bytes})"
            )
        if self.store.host_bytes // self.segment_bytes > MOST_SEGMENTS:
            raise ConfigError(
                f"segment_bytes: got {self.segment_bytes} of {self.store.host_bytes}; expected at most {MOST_SEGMENTS}"
            )
        if self.http_address is not None and not is_loopback(self.http_address[0]) and not self.http_token:
            raise ConfigError(f"http: got {self.http!r}, which is not this machine alone; expected http_token with it")

    @property
    def http_address(self) -> tuple[str, int] | None:
        return read_address(self.http) if self.http else None

    @property
    def http_token_path(self) -> str:
        """Where a running daemon keeps the token of admin calls, if none was set."""
        return f"{self.socket_path}.token"

    @property
    def tenant_quotas(self) -> dict[str, int]:
        return dict(self.quotas)

    def may_connect(self, uid: int) -> bool:
        return uid == os.geteuid() or uid in self.allowed_uids or any(uid in uids for _, uids in self.domains)

    def domain_of(self, uid: int) -> str:
        """Name of the trust domain; "" is the daemon's own user."""
        for name, uids in self.domains:
            if uid in uids:
                return name
        return "" if uid == os.geteuid() else f"uid-{uid}"

    def checks(self, domain: str) -> bool:
        """Whether copies of a trust domain are checked: always, but for the own one's where `checksums` is off."""
        return self.checksums or domain != ""

    @property
    def is_private(self) -> bool:
        """Nobody but the daemon's own user may connect, so nobody else may reach the socket."""
        return not self.allowed_uids and not self.domains

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
        flags: Mapping[str, Any] | None = None,
    ) -> DaemonSettings:
        """A file (None: defaults), the environment over it (None: os.environ), and over both the flags: keys of either
        table, those that are None left out."""
        environ = os.environ if environ is None else environ
        given = _daemon_table(path)
        store = KVStoreConfig.load(path, environ)
        named = {k.removeprefix(ENV_PREFIX).lower(): v for k, v in environ.items() if k.startswith(ENV_PREFIX)}
        given |= {name: value for name, value in named.items() if name != "socket"}  # a client's: KVSTORE_DAEMON_SOCKET
        own = {one.name for one in fields(cls)} - {"store"}
        for name, value in (flags or {}).items():
            if value is not None and name in own:
                given[name] = value
            elif value is not None:
                store = replace(store, **{name: value})
        for name in given:
            if name not in own:
                raise ConfigError(_unknown(name, own, path, named))
        try:
            return cls(store=store, **given)
        except ConfigError as error:
            raise ConfigError(_blamed_variable(str(error), environ, flags or {}, own)) from None

    def to_mapping(self) -> dict[str, Any]:
        """What is in force, without secrets."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("store", "http_token")}
        kept = (
            "host_bytes",
            "host_prefault",
            "disk_path",
            "disk_bytes",
            "disk_sync",
            "redis_ttl_seconds",
            "redis_bytes",
        )
        return own | {name: getattr(self.store, name) for name in kept} | {"redis": bool(self.store.redis_url)}


def _blamed_variable(said: str, environ: Mapping[str, str], flags: Mapping[str, Any], own: set[str]) -> str:
    """A refusal that begins with the name of a setting, with the variable instead where that is what was refused."""
    key, _, rest = said.partition(":")
    variable = f"{ENV_PREFIX if key in own else STORE_PREFIX}{key.upper()}"
    return f"{variable}:{rest}" if variable in environ and flags.get(key) is None else said


def _unknown(name: str, own: set[str], path: str | Path | None, named: Mapping[str, Any]) -> str:
    """Says where the key stands, and which one is near."""
    prefix = ENV_PREFIX if name in named else ""
    where = f"environment, {prefix}{name.upper()}" if prefix else f"{path}{_line_of(name, path)}, [{TOML_TABLE}]"
    near = difflib.get_close_matches(name, own, n=1)
    shown = f"{prefix}{near[0].upper()}" if prefix and near else repr(near[0]) if near else ""
    hint = f"did you mean {shown}? Expected" if near else "expected"
    return f"{where}: unknown key {name!r}; {hint} one of {', '.join(sorted(own))}"


def _line_of(name: str, path: str | Path | None) -> str:
    """The line as ":3", for a key of [daemon] that is written as people write it."""
    table = ""
    for number, line in enumerate(Path(path or "").read_text(encoding="utf-8").splitlines(), 1):
        if header := re.match(r"\s*\[\s*([^\]]*?)\s*\]", line):
            table = header[1]
        is_row = table == TOML_TABLE and re.match(rf"\s*[\"']?{re.escape(name)}[\"']?\s*[.=]", line)
        if is_row or table == f"{TOML_TABLE}.{name}":
            return f":{number}"
    return ""


def _chosen_segment(host_bytes: int) -> int:
    """32 MiB, more where there would be too many, fewer where the budget is small."""
    unit = _HUGE_BYTES if host_bytes >= _LEAST_SEGMENTS * _HUGE_BYTES else PAGE_BYTES
    size = max(min(_SEGMENT_BYTES, host_bytes // _LEAST_SEGMENTS), host_bytes // _WANTED_SEGMENTS)
    return max(unit, size // unit * unit)


def _refuse_unknown_tables(document: Mapping[str, Any], path: str | Path) -> None:
    """What would not be read is a typing error, never left out in silence."""
    for name, value in document.items():
        if name in (STORE_TABLE, TOML_TABLE):
            continue
        if not isinstance(value, dict):
            raise ConfigError(
                f"{path}: key {name!r} stands in no table; expected it in [{STORE_TABLE}] or [{TOML_TABLE}]"
            )
        near = difflib.get_close_matches(name, (STORE_TABLE, TOML_TABLE), n=1)
        hint = f"did you mean [{near[0]}]? Expected" if near else "expected"
        raise ConfigError(f"{path}: unknown table [{name}]; {hint} [{STORE_TABLE}] and [{TOML_TABLE}]")


def _document(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}); expected TOML in UTF-8") from error


def _daemon_table(path: str | Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    document = _document(path)
    _refuse_unknown_tables(document, path)
    if STORE_TABLE not in document:
        raise ConfigError(f"{path}: no table [kvstore]; expected it with host_bytes, and [daemon]")
    table = document.get(TOML_TABLE, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: key {TOML_TABLE!r} is {table!r}; expected a table")
    return dict(table)
