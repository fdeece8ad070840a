"""What of a daemon's counts says that something is wrong: damaged copies of lower tiers, an index that was begun anew,
who was refused. One list for the page, the metrics, the command line and the log. Pure, but for DamageLog.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from kvstore.frame.parsing import FrameFault

if TYPE_CHECKING:
    from kvstore.tier import Tier

_QUIET_SECONDS = 60.0
_LOG = logging.getLogger(__name__)
_FAULTS = tuple(map(str, FrameFault))
_NO_FAULT = (str(FrameFault.UNSIGNED), str(FrameFault.NO_SECRET))  # to a remote tier, which others share: a miss
DAMAGE_CAUSES = {
    "disk": (*_FAULTS, "value_gone", "read_error"),
    "remote": (*(fault for fault in _FAULTS if fault not in _NO_FAULT), "type"),
}
"""By tier: what `damaged_copies` can name."""


def damaged_copies(tier: str, counters: Mapping[str, int]) -> dict[str, int]:
    """Copies that a lower tier could not give back whole, by cause, from its own counters. Each is counted once, and
    none was served. What a reader asked for wrongly (size_mismatch) is no damage."""
    found: dict[str, int] = {}
    for name, count in counters.items():
        kind, _, cause = name.partition("_")
        if kind == "read" and tier == "disk":
            cause = "read_error"
        elif name == "value_gone":
            cause = name
        elif kind not in ("corrupt", "fault") or (tier == "remote" and cause in _NO_FAULT):
            continue
        if count:
            found[cause] = found.get(cause, 0) + count
    return found


def index_dropped(counters: Mapping[str, int]) -> dict[str, int]:
    """Why a tier began anew, empty, where there was something."""
    start = "index_dropped_"
    return {name.removeprefix(start): count for name, count in counters.items() if name.startswith(start) and count}


def refused(counts: Mapping[str, int]) -> dict[str, int]:
    """Connections and requests that were refused, delayed, slowed or failed, by cause."""
    return {
        name.removeprefix("refused_"): count
        for name, count in counts.items()
        if count and (name.startswith(("refused_", "accept")) or name == "throttled")
    }


def told(causes: Mapping[str, int]) -> str:
    """For people: what there is most of first."""
    return ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items(), key=lambda pair: -pair[1]))


class DamageLog:
    """Says in the log that a tier gives back damaged copies: at once, then at most once a minute. One thread."""

    def __init__(self, tier: Tier, clock: Callable[[], float] = time.monotonic) -> None:
        self._tier, self._clock = tier, clock
        self._is_new = False
        self._told_copies, self._quiet_until = 0, float("-inf")

    def note(self) -> None:
        """A copy came back corrupt."""
        self._is_new = True

    def tick(self) -> None:
        now = self._clock()
        if not self._is_new or now < self._quiet_until:
            return
        self._is_new = False
        found = damaged_copies(self._tier.name, self._tier.counters())
        total = sum(found.values())
        if total > self._told_copies:
            self._told_copies, self._quiet_until = total, now + _QUIET_SECONDS
            _LOG.warning(
                "kvstore: tier %s gave back damaged copies, %s so far (%s); none was served",
                self._tier.name, total, told(found),
            )  # fmt: skip
