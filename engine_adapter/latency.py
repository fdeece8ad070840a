"""Time to first token and time between tokens, as a user of the engine would feel them.

One recorder per loop, fed by the loop's thread with readings of its injected clock; readers on other threads should
take a `snapshot`. Queue time (submitted to first scheduled) is kept apart, since it says how full the engine was, not
how fast.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 95, 99)


@dataclass(slots=True)
class RequestLatency:
    """Readings of one request: seconds on the loop's clock. A step that puts out m tokens counts m equal intervals."""

    submitted_seconds: float
    admitted_seconds: float | None = None
    first_token_seconds: float | None = None
    last_token_seconds: dict[int, float] = field(default_factory=dict)
    itl_seconds: list[float] = field(default_factory=list)

    @property
    def queue_seconds(self) -> float | None:
        return None if self.admitted_seconds is None else self.admitted_seconds - self.submitted_seconds

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_seconds is None else self.first_token_seconds - self.submitted_seconds


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that at least `percent` of the values do not exceed; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100.0 * len(ordered)) - 1)]


def summarize(values: Iterable[float]) -> dict[str, float | int | None]:
    """count, mean and p50/p95/p99 of some seconds."""
    kept = list(values)
    summary: dict[str, float | int | None] = {"count": len(kept), "mean": sum(kept) / len(kept) if kept else None}
    for percent in PERCENTILES:
        summary[f"p{percent}"] = percentile(kept, percent)
    return summary


class LatencyRecorder:
    """Collects `RequestLatency` per running request id and summarises over these and the newest finished ones."""

    def __init__(self, *, keep_requests: int = 10_000) -> None:
        """keep_requests: how many finished requests, the newest, the percentiles run over."""
        self._requests: dict[str, RequestLatency] = {}
        self._finished: deque[RequestLatency] = deque(maxlen=keep_requests)

    def submitted(self, request_id: str, now_seconds: float) -> None:
        self._requests[request_id] = RequestLatency(now_seconds)

    def admitted(self, request_id: str, now_seconds: float) -> None:
        """First time that the request left the queue; later admissions (after a preemption) change nothing."""
        entry = self._requests[request_id]
        if entry.admitted_seconds is None:
            entry.admitted_seconds = now_seconds

    def tokens(self, request_id: str, branch: int, count: int, now_seconds: float) -> None:
        """`count` tokens of a branch came out together at `now_seconds`."""
        if count < 1:
            return
        entry = self._requests[request_id]
        if entry.first_token_seconds is None:
            entry.first_token_seconds = now_seconds
        previous = entry.last_token_seconds.get(branch)
        if previous is None:
            entry.itl_seconds.extend([0.0] * (count - 1))
        else:
            entry.itl_seconds.extend([(now_seconds - previous) / count] * count)
        entry.last_token_seconds[branch] = now_seconds

    def finished(self, request_id: str) -> RequestLatency:
        """Close the request's record and return it; it keeps counting in `snapshot`."""
        entry = self._requests.pop(request_id)
        self._finished.append(entry)
        return entry

    def snapshot(self) -> dict[str, dict[str, float | int | None]]:
        """{"ttft_seconds", "itl_seconds", "queue_seconds"} -> {"count", "mean", "p50", "p95", "p99"}."""
        entries = [*self._finished, *self._requests.values()]
        return {
            "ttft_seconds": summarize(e.ttft_seconds for e in entries if e.ttft_seconds is not None),
            "itl_seconds": summarize(gap for e in entries for gap in e.itl_seconds),
            "queue_seconds": summarize(e.queue_seconds for e in entries if e.queue_seconds is not None),
        }

    def to_json(self) -> str:
        return json.dumps(self.snapshot(), indent=2, sort_keys=True)
