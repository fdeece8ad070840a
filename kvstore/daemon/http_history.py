"""The last quarter of an hour in figures, for whoever looks only when something is wrong. Bounded; any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

SAMPLE_SECONDS = 2.0
_SAMPLES = 450


class History:
    """Takes a sample of the statistics every few seconds, on a thread of its own, from construction to close."""

    def __init__(self, stats: Callable[[], dict[str, Any]], sample_seconds: float = SAMPLE_SECONDS) -> None:
        self._stats = stats
        self._sample_seconds = sample_seconds
        self._samples: deque[dict[str, Any]] = deque(maxlen=_SAMPLES)
        self._stop = threading.Event()
        self._take()
        self._thread = threading.Thread(target=self._run, name="kvstore-history", daemon=True)
        self._thread.start()

    def after(self, time_seconds: float) -> list[dict[str, Any]]:
        """Samples later than a time (of their own `time_seconds`), oldest first."""
        return [one for one in list(self._samples) if one["time_seconds"] > time_seconds]

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._sample_seconds):
            self._take()

    def _take(self) -> None:
        self._samples.append(sample(self._stats()))


def sample(stats: dict[str, Any]) -> dict[str, Any]:
    """What of the statistics is drawn over time. Counts are totals: whoever draws takes differences."""
    lookups, codecs = stats["lookups"], dict[str, int]()
    for arena in stats["arenas"].values():
        for codec, size in arena["codec_bytes"].items():
            codecs[codec] = codecs.get(codec, 0) + size
    lowers = {name: one for name, one in stats["tiers"].items() if "counts" in one}
    moved = {"stored": lookups["stored_bytes"], "read": lookups["read_bytes"]}
    for kind in ("spilled", "fetched"):
        moved[kind] = sum(one["counts"].get(f"{kind}_bytes", 0) for one in lowers.values())
    return {
        "time_seconds": stats["time_seconds"],
        "codec_bytes": codecs,
        "lower_bytes": {name: one["used_bytes"] for name, one in lowers.items()},
        "limit_bytes": stats["budget"]["limit_bytes"],
        "asked_blocks": lookups["asked_blocks"],
        "hit_blocks": lookups["hit_blocks"],
        "lookups": lookups["lookups"],
        "saved_prefill_seconds": lookups["saved_prefill_seconds"],
        "moved_bytes": moved,
        "refused": stats.get("refused", {}),
        "queues": {f"{name} {queue}": depth for name, one in lowers.items() for queue, depth in one["queues"].items()},
    }
