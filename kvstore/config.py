"""The settings of a store: one frozen value, from keywords, TOML and the environment.

Precedence: environment over file over defaults. Every wrong value is a ConfigError that names the key, what was given
and what is expected; unknown keys are refused, so that a typing error never passes for a setting. 28 keys.

Pure values; no lock, any thread.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from allocator.errors import ConfigError

ENV_PREFIX = "KVSTORE_"
DAEMON_PREFIX = "KVSTORE_DAEMON_"
"""Variables of `kvstore serve` alone, but for one."""
_CLIENT_SOCKET = "KVSTORE_DAEMON_SOCKET"
TOML_TABLE = "kvstore"
OTHER_VARIABLES = frozenset(
    {"KVSTORE_MODEL_CACHE", "KVSTORE_KERNELS", "KVSTORE_TRACE_FILE", "KVSTORE_TRACE_SALT_FILE", "KVSTORE_TRACES"}
)
"""Variables with our prefix that are no setting of a store: where `engine_adapter` keeps converted models, which
kernels `quant` uses, what `kvstore record` asks for, and where tests find public traces."""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")

_Reader: TypeAlias = Callable[[Any], Any]


class _RefusedError(Exception):
    """A reader's refusal; becomes a ConfigError with the key's name and expectation. Its text, where it has one, says
    which part of what was given is wrong."""


def _whole(least: int, most: int) -> _Reader:
    def read(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*[+-]?[0-9]+\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise _RefusedError
        return value

    return read


def _real(least: float, most: float, *, above: bool = False) -> _Reader:
    def read(value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise _RefusedError from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _RefusedError
        if not (least < value if above else least <= value) or not value <= most:  # NaN fails both
            raise _RefusedError
        return float(value)

    return read


def _size(value: Any) -> int:
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = None if match is None else _UNITS.get(match[2].lower())
        if match is None or unit is None:
            raise _RefusedError
        value = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise _RefusedError
    return value


def _truth(value: Any) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
        return value.strip().lower() in ("1", "true", "yes", "on")
    if not isinstance(value, bool):
        raise _RefusedError
    return value


def _one_of(*names: str) -> _Reader:
    def read(value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise _RefusedError
        return value

    return read


def _path(value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or "\0" in value or "://" in value:  # a server's URL is no path
        raise _RefusedError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or any(ord(one) < 32 for one in value):
        raise _RefusedError
    return value.strip()


def _secret(value: Any) -> str:
    """Text, or `file:` and the path of a file with it: what is kept is the secret itself."""
    text = _text(value)
    if text.startswith("file:"):
        try:
            text = Path(text.removeprefix("file:")).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise _RefusedError(f"a file that cannot be read ({why})") from None
    if text and not 16 <= len(text.encode()) <= 64:
        raise _RefusedError(f"{len(text.encode())} bytes")
    return text


def _key(default: Any, expected: str, read: _Reader, *, private: bool = False) -> Any:
    """private: the value is in no repr and no message."""
    metadata = {"expected": expected, "read": read, "private": private}
    return field(default=default, metadata=metadata, repr=not private)


_BYTES = "a byte count, or text such as '512 MiB'"
_STEP = "an int in [0, 65536]"


@dataclass(frozen=True, kw_only=True)
class KVStoreConfig:
    """Settings of one store. Sizes take ints or text such as "4 GiB"."""

    # memory
    device_bytes: int = _key(256 << 20, _BYTES, _size)
    """Bytes of the device slab."""
    host_bytes: int = _key(0, _BYTES, _size)
    """Bytes of the host tier; 0: none."""
    host_prefault: bool = _key(True, "true or false", _truth)
    """Touch the host arena's pages in the background."""

    eviction_policy: str = _key("learned", "lru or learned", _one_of("lru", "learned"))
    """Which idle device block goes first: the longest unused, or what learning says, with LRU as its floor."""

    disk_path: str = _key("", "a directory's path, or '' for none", _path)
    """Directory of the disk tier; empty: none. One store a directory."""
    disk_bytes: int = _key(8 << 30, f"{_BYTES}, at least 1 MiB", _size)
    """Budget of everything in that directory."""
    disk_sync: str = _key("none", "one of none, batch, always", _one_of("none", "batch", "always"))
    """What survives a power cut: nothing for sure, all but the last transfer, every copy that was reported stored."""

    daemon_socket: str = _key("", "a path, or '' for none", _path)
    """Where `kvstore serve` listens: its cache is a tier of this store, shared with the host's other processes."""

    # remote
    redis_url: str = _key("", "a URL as in docs/how-to/redis.md, or nothing", _text, private=True)
    """Where Redis or Valkey is; empty: no remote tier."""
    redis_ttl_seconds: float = _key(86400.0, "a number in [1, 1e8]", _real(1, 1e8))
    """Life of a remote copy since its last use."""
    redis_bytes: int = _key(0, _BYTES, _size)
    """Most that this process stores there; 0: only the server's own maxmemory limits it."""
    secret: str = _key("", "16 to 64 bytes of text, or file:PATH of a file with them", _secret, private=True)
    """Signs copies in tiers that others can write to; better from the environment or a file than from TOML."""

    zstd_level: int = _key(0, "an int in [0, 19]", _whole(0, 19))
    """Pack copies on disk and remote with zstd at this level; 0: do not. For links slower than about 0.13 GB/s."""

    # cold copies
    codec: str = _key("int4", "one of int4, int8k, raw", _one_of("int4", "int8k", "raw"))
    """Codec of cold copies; raw: nothing is ever lossy."""
    error_bound: float = _key(0.15, "a number in (0, 1]", _real(0, 1, above=True))
    """A block whose relative RMS error per head is larger stays raw."""
    residual_tokens: int = _key(128, "an int in [0, 2**20]", _whole(0, 1 << 20))
    """Newest tokens of a sequence that stay in full precision."""
    cool_under_pressure: bool = _key(True, "true or false", _truth)
    """Cool earlier, coldest first, when memory is short: an answer then depends on its neighbours. Counted."""

    # bounded work of one step()
    cool_blocks_per_step: int = _key(8, _STEP, _whole(0, 65536))
    spill_blocks_per_step: int = _key(8, _STEP, _whole(0, 65536))
    spill_queue_blocks: int = _key(2048, "an int in [1, 2**20]", _whole(1, 1 << 20))
    """Longest queue of copies on their way to one tier; beyond it the coldest is dropped and counted."""
    spill_policy: str = _key("reuse", "reuse or everything", _one_of("reuse", "everything"))
    """What enters disk and remote: what will probably be read again and is worth reading, or all that is computed."""

    # load or recompute
    fetch_deadline_seconds: float = _key(1.0, "a number in (0, 3600]", _real(0, 3600, above=True))
    """A fetch that takes longer is given up and recomputed."""
    prefill_tokens_per_second: float = _key(2000.0, "a number > 0", _real(0, 1e12, above=True))
    """First estimate of prefill speed; measured from then on."""
    load_always: bool = _key(False, "true or false", _truth)
    """Fetch what is stored even where recomputing looks cheaper (for tests and comparisons)."""

    # behaviour
    io_threads: str = _key("thread", "thread or inline", _one_of("thread", "inline"))
    """Where tiers copy: a thread each, or inside the call (simulation, tests)."""
    share: bool = _key(False, "true or false", _truth)
    """Others may use what this store leaves in its tiers, and it theirs: needs known weights. Off: names of its own."""
    lease_seconds: float = _key(30.0, "a number in (0, 86400]", _real(0, 86400, above=True))
    """Life of a pin: the default, and the longest. All pins together hold half of the device's memory at most."""
    debug_poison: bool = _key(False, "true or false", _truth)
    """Fill slots with NaN before they are handed out to be written, so that a read of what was not written shows."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            object.__setattr__(self, one.name, _read(one.name, one.metadata, value))

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any], *, source: str = "settings") -> KVStoreConfig:
        """From keys and values, e.g. a parsed file."""
        _refuse_unknown(settings, source)
        return cls(**settings)

    @classmethod
    def from_toml(cls, text: str, *, source: str = "TOML text") -> KVStoreConfig:
        """From TOML: the table [kvstore], or the top level where there is none. Other tables are not ours."""
        return cls.from_mapping(_parse_toml(text, source), source=source)

    @classmethod
    def load(cls, path: str | Path | None = None, environ: Mapping[str, str] | None = None) -> KVStoreConfig:
        """From a file (None: defaults) and the environment over it (None: os.environ)."""
        settings: dict[str, Any] = {}
        if path is not None:
            try:
                text = Path(path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{path}: cannot be read ({error}); expected a TOML file in UTF-8") from error
            settings |= _parse_toml(text, str(path))
        _refuse_unknown(settings, str(path))
        return cls(**settings).with_environment(os.environ if environ is None else environ)

    def with_environment(self, environ: Mapping[str, str]) -> KVStoreConfig:
        """A copy with every KVSTORE_<KEY> of `environ` applied."""
        given: dict[str, Any] = {
            name.removeprefix(ENV_PREFIX).lower(): value
            for name, value in environ.items()
            if name.startswith(ENV_PREFIX)
            and name not in OTHER_VARIABLES
            and (name == _CLIENT_SOCKET or not name.startswith(DAEMON_PREFIX))
        }
        _refuse_unknown(given, f"environment ({ENV_PREFIX}*)")
        for name, value in given.items():
            metadata = next(one.metadata for one in fields(self) if one.name == name)
            _read(f"{ENV_PREFIX}{name.upper()}", metadata, value)
        return replace(self, **given)

    def to_mapping(self) -> dict[str, Any]:
        """Keys and values, ready for from_mapping."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def _read(name: str, metadata: Mapping[Any, Any], value: Any) -> Any:
    try:
        return metadata["read"](value)
    except (_RefusedError, OverflowError, ValueError) as error:  # also of numbers with thousands of digits
        kind = type(value).__name__
        told = str(error) if isinstance(error, _RefusedError) else ""
        given = told or (kind if metadata["private"] else f"{value!r:.120} ({kind})")
        raise ConfigError(f"{name}: got {given}; expected {metadata['expected']}") from None


def size_bytes(name: str, value: object) -> int:
    """A byte count, or text such as "4 GiB", as a setting reads it. ConfigError says what was given and expected."""
    return int(_read(name, {"expected": _BYTES, "read": _size, "private": False}, value))


def _refuse_unknown(settings: Mapping[str, Any], source: str) -> None:
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{source}: got {settings!r} ({type(settings).__name__}); expected keys and their values")
    known = [one.name for one in fields(KVStoreConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}? Expected" if near else "expected"
            raise ConfigError(f"{source}: unknown key {name!r}; {hint} one of {', '.join(known)}")


def _parse_toml(text: str, source: str) -> dict[str, Any]:
    if not isinstance(text, str):
        raise ConfigError(f"{source}: got {type(text).__name__}; expected text (a file's path goes to load)")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not TOML ({error})") from error
    table = document.get(TOML_TABLE, document)
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: key {TOML_TABLE!r} is {table!r}; expected a table")
    return table
