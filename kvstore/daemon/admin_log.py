"""A line in the log for each admin call that came over HTTP: who, what, outcome. No token and no whole root or hash is
in it: those open the cache. Any thread.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from kvstore.daemon.tally import SHOWN_BYTES
from kvstore.http_access import is_loopback

_QUIET_SECONDS = 60.0
_SHOWN_DIGITS = 2 * SHOWN_BYTES
_LONG_HEX = re.compile(rf"\b(?![0-9]{{1,24}}\b)([0-9a-fA-F]{{{_SHOWN_DIGITS}}})[0-9a-fA-F]+")
"""Roots and hashes. What has digits alone is a number: a hash that has is one of 10^13."""
_MOST = 400
_LOG = logging.getLogger(__name__)


class AdminLog:
    """See the module. Calls without the token are told at once, then at most once a minute: everybody can make them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._strangers, self._quiet_until = 0, float("-inf")

    def called(self, who: str, name: str, asked: Any, outcome: str) -> None:
        """asked: the call's body, None where it was not of the call's form."""
        fields = {} if asked is None else msgspec.structs.asdict(asked)
        said = listed({field: value for field, value in fields.items() if value != ""})
        _LOG.info("kvstore: admin call %s from %s: %s", f"{name} ({said})" if said else name, who, _safe(outcome))

    def stranger(self, who: str, name: str, why: str) -> None:
        with self._lock:
            self._strangers += 1
            now = time.monotonic()
            if now < self._quiet_until:
                return
            self._quiet_until = now + _QUIET_SECONDS
            count = self._strangers
        _LOG.warning("kvstore: admin call %s from %s: refused: %s (%s such so far)", _safe(repr(name)), who, why, count)


def caller(host: str, token: str) -> str:
    """host: where the connection comes from; token: which one was sent, "" for none."""
    place = f"loopback ({host})" if host and is_loopback(host) else host or "somewhere"
    return f"{place} with {token}" if token else place


def listed(values: Mapping[str, Any]) -> str:
    """Fields of a body or an answer, for the log."""
    shown = {name: f"{len(value)} in all" if isinstance(value, Mapping) else value for name, value in values.items()}
    return _safe(", ".join(f"{name} {value}" for name, value in shown.items()))


def _safe(text: str) -> str:
    """One line, not long, and nothing in it that would open the cache."""
    cut = _LONG_HEX.sub(r"\1...", text)[:_MOST]
    return "".join(one if one.isprintable() else "?" for one in cut)
