"""The daemon: one cache for all processes of a host.

`protocol` is what both sides say, `segments` the shared memory; `server`, `session`, `core`, `arena`, `holder`,
`lower`, `tally`, `admin`, `stats` and `settings` are the daemon's side, `http_*` what people see of it, `client` and
`link` the engine's. The wire is specified in docs/formats/protocol.md. Nothing here imports torch. Names load when
first asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.daemon.client import DaemonTier
    from kvstore.daemon.server import Daemon
    from kvstore.daemon.settings import DaemonSettings

_HOME_OF = {
    "Daemon": "kvstore.daemon.server",
    "DaemonSettings": "kvstore.daemon.settings",
    "DaemonTier": "kvstore.daemon.client",
}

__all__ = ["Daemon", "DaemonSettings", "DaemonTier"]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore.daemon' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
