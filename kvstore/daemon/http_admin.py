"""Admin calls as they come over HTTP: bodies of a fixed form, roots and blocks that may be named by their beginning.

Any thread; a call may wait for a lower tier.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta, Struct

from allocator.errors import KVError, TierError, UsageError
from kvstore.daemon.admin_log import AdminLog, listed

if TYPE_CHECKING:
    from kvstore.copy_key import CopyKey
    from kvstore.daemon.server import Daemon

_Hex = Annotated[str, Meta(min_length=8, max_length=64, pattern="^([0-9a-f]{2})+$")]
_Name = Annotated[str, Meta(max_length=64, pattern=r"^[\x20-\x7e]*$")]
_Given = Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[\x20-\x7e]+$")]
_Bytes = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_MOST_PINNED = 1 << 20
_EXPECTED = {
    "root": "8 to 64 hex digits, an even number of them, as the page shows them, or for flush 'all'",
    "block": "8 to 64 hex digits, an even number of them, as the page shows them",
    "seconds": "a number above 0, up to 2592000 (30 days)",
    "budget_bytes": "an int of bytes, at least 0",
    "quota_bytes": "an int of bytes, at least 0 (0: none)",
    "name": "1 to 64 printable ASCII characters",
    "domain": "a trust domain's name, '' for the daemon's own user's",
    "tenant": "up to 64 printable ASCII characters",
    "tier": "the name of a tier below shared memory",
}

_KINDS = {list: "array", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


class BodyError(Exception):
    """A body that is not of its call's form; says what was given and what is expected. Nothing was done."""


class Flush(Struct, frozen=True):
    """root: of a namespace, or its first bytes where they are unique in shared memory; "all": everything."""

    root: Annotated[str, Meta(pattern="^(all|([0-9a-f]{2}){4,32})$")]
    domain: _Name = ""


class Pin(Struct, frozen=True):
    """A block, and what was stored behind it, for so long and as much as fits."""

    root: _Hex
    block: _Hex
    seconds: Annotated[float, Meta(gt=0, le=30 * 86400)]
    budget_bytes: _Bytes
    name: _Given
    domain: _Name = ""


class Unpin(Struct, frozen=True):
    name: _Given


class Quota(Struct, frozen=True):
    tenant: _Name
    quota_bytes: _Bytes


class DropTier(Struct, frozen=True):
    tier: _Name


class Reload(Struct, frozen=True):
    pass


class AdminCalls:
    """See the module. reload: reads the settings file again; None where there is none."""

    def __init__(self, daemon: Daemon, reload: Callable[[], None] | None) -> None:
        self.log = AdminLog()
        self._daemon = daemon
        self._reload_settings = reload
        self._calls: dict[str, tuple[type[Struct], Callable[[Any], dict[str, Any]]]] = {
            "flush": (Flush, self._flush),
            "pin": (Pin, self._pin),
            "unpin": (Unpin, self._unpin),
            "quota": (Quota, self._quota),
            "drop-tier": (DropTier, self._drop_tier),
            "reload": (Reload, self._reload),
        }

    @property
    def names(self) -> list[str]:
        return list(self._calls)

    def call(self, name: str, body: bytes, who: str) -> dict[str, Any]:
        """BodyError or KVError: nothing was done, or (TierError) not everywhere. who: for the log."""
        form, work = self._calls[name]
        asked, outcome = None, "failed"
        try:
            asked = _asked(name, form, body)
            answer = work(asked)
            outcome = f"done, {listed(answer)}"
        except BodyError:
            outcome = "refused: a body that is not of its form"
            raise
        except TierError as error:
            outcome = f"not everywhere: {error}"
            raise
        except KVError as error:
            outcome = f"refused: {error}"
            raise
        finally:
            self.log.called(who, name, asked, outcome)
        return answer

    def _flush(self, asked: Flush) -> dict[str, Any]:
        if asked.root == "all":
            if asked.domain:
                raise UsageError(f"domain: got {asked.domain!r} with root 'all', which is every domain; expected none")
            return {"flushed_copies": self._daemon.admin.flush_all()}
        root = self._root(asked.root, asked.domain)
        return {"flushed_copies": self._daemon.admin.flush(root, domain=asked.domain)}

    def _pin(self, asked: Pin) -> dict[str, Any]:
        root = self._root(asked.root, asked.domain)
        keys = self._prefix(root, bytes.fromhex(asked.block), asked.domain)
        return self._daemon.admin.pin(
            keys, seconds=asked.seconds, budget_bytes=asked.budget_bytes, name=asked.name, domain=asked.domain
        )

    def _unpin(self, asked: Unpin) -> dict[str, Any]:
        if not self._daemon.admin.unpin(asked.name):
            held = ", ".join(repr(one["name"]) for one in self._daemon.admin.pins()) or "none is held"
            raise UsageError(f"name: got {asked.name!r}; expected a pin that is held: {held}")
        return {"unpinned": asked.name}

    def _quota(self, asked: Quota) -> dict[str, Any]:
        self._daemon.admin.set_quota(asked.tenant, asked.quota_bytes)
        return {"tenant": asked.tenant, "quota_bytes": asked.quota_bytes}

    def _drop_tier(self, asked: DropTier) -> dict[str, Any]:
        self._daemon.admin.drop_tier(asked.tier)
        return {"dropped": asked.tier}

    def _reload(self, _asked: Reload) -> dict[str, Any]:
        if self._reload_settings is None:
            raise UsageError("reload: this daemon was started without settings that could be read again")
        self._reload_settings()
        return {"quotas": dict(self._daemon.core.quotas)}

    def _root(self, text: str, domain: str) -> bytes:
        """The one root in shared memory that begins so; a whole one needs no copy there."""
        self._daemon.admin.check_domain(domain)
        start = bytes.fromhex(text)
        if len(start) == 32:
            return start
        arena = self._daemon.core.arenas.get(domain)
        families = [] if arena is None else list(arena.families)
        found = {root for family in families if isinstance(root := family[0], bytes) and root.startswith(start)}
        if len(found) != 1:
            raise UsageError(f"root: got {text!r}, with which {len(found)} roots in shared memory begin; expected one")
        return found.pop()

    def _prefix(self, root: bytes, start: bytes, domain: str) -> list[CopyKey]:
        core = self._daemon.core
        arena = core.arenas.get(domain)
        families = [] if arena is None else [rows for name, rows in list(arena.families.items()) if name[0] == root]
        blocks = {hash for rows in families for hash in list(rows) if hash.startswith(start)}
        if arena is None or len(blocks) != 1:
            raise UsageError(
                f"block: got {start.hex()!r}, with which {len(blocks)} blocks of that root begin; expected one"
            )
        with core.lock:
            return arena.behind(root, blocks.pop(), _MOST_PINNED)


def _asked(name: str, form: type[Struct], body: bytes) -> Any:
    """A call's body. BodyError."""
    fields = {one.name: one for one in msgspec.structs.fields(form)}
    wanted = f"a JSON object with {', '.join(fields) or 'nothing in it'}"
    try:
        given = msgspec.json.decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BodyError(f"{name}: {str(error)[:200]}; expected {wanted}") from None
    if not isinstance(given, dict):
        raise BodyError(f"{name}: got a JSON {_KINDS[type(given)]}; expected {wanted}")
    for key in given:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ";"
            raise BodyError(f"{name}: unknown key {key[:80]!r}{hint} expected {wanted}")
    for key, field in fields.items():
        if key not in given:
            if field.required:
                raise BodyError(f"{name}: {key!r} is missing; expected {_EXPECTED[key]}")
            continue
        try:
            msgspec.convert(given[key], field.type)
        except msgspec.ValidationError:
            said = msgspec.json.encode(given[key])[:80].decode("utf-8", "replace")
            raise BodyError(f"{key}: got {said}; expected {_EXPECTED[key]}") from None
    return msgspec.convert(given, form)
