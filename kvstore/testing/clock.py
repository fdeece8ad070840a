"""A clock that moves when it is told to. Any thread."""

from __future__ import annotations

from allocator.errors import UsageError


class ManualClock:
    """Call it for the time in seconds, as one calls time.monotonic."""

    def __init__(self, start_seconds: float = 0.0) -> None:
        self._now = float(start_seconds)

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> float:
        """Move on and return the new time. Never backwards."""
        if not seconds >= 0:
            raise UsageError(f"advance: got {seconds!r} seconds; expected a number >= 0")
        self._now += seconds
        return self._now
