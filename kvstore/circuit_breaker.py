"""When to leave a server alone: closed, open, and one probe at a time when the pause is over.

Any thread; the clock is injected and monotonic, so a jump of wall time neither opens nor closes anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Opens at the first failure, since each costs a timeout; a failed probe doubles the pause, up to the longest.

    The longest is what a server that came back may wait for its first call: below two seconds.
    """

    def __init__(
        self,
        *,
        first_pause_seconds: float = 0.25,
        longest_pause_seconds: float = 1.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = first_pause_seconds
        self._longest = longest_pause_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._pause = 0.0  # 0: closed
        self._until = 0.0
        self._probing = False
        self.opened_count = 0

    @property
    def is_open(self) -> bool:
        return self._pause > 0

    @property
    def is_resting(self) -> bool:
        """Open, and nobody may try now."""
        with self._lock:
            return self._pause > 0 and (self._probing or self._clock() < self._until)

    def allow(self) -> bool:
        """Whether to try now. True while open makes the caller the probe: it must end in succeeded, failed or left."""
        with self._lock:
            if not self._pause:
                return True
            if self._probing or self._clock() < self._until:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._pause, self._probing = 0.0, False

    def failed(self) -> None:
        with self._lock:
            self._pause = min(self._longest, self._pause * 2) if self._pause else self._first
            self._until = self._clock() + self._pause
            self._probing = False
            self.opened_count += 1

    def left(self) -> None:
        """A try that proved nothing (cancelled): the next may probe."""
        with self._lock:
            self._probing = False
