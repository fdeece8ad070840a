"""How fast connections are let in: all together, and those of one process. Counts by an injected time; the accepting
thread, but for `punish`.

Who is let in gets a thread and a greeting, which takes others' time; who is turned away costs a tenth of that. A
process that connects again and again, or sends what no client of ours sends, is turned away for a while.
"""

from __future__ import annotations

import threading

_UNITS_PER_SECOND = 400.0
_MOST_UNITS = 1024.0
_ENTRY_UNITS, _ATTEMPT_UNITS = 3.2, 0.8  # so 256 at once, and 100 a second from then on; 500 that are turned away
_PROCESS_ENTRIES = 32.0  # that one process may have at once
_PROCESS_ENTRIES_PER_SECOND = 4.0
_PUNISHMENT = 8.0
_MOST_PROCESSES = 1024


class Door:
    """See the module."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._units, self._filled_at = _MOST_UNITS, 0.0
        self._processes: dict[int, tuple[float, float]] = {}  # pid -> entries left, and when that was

    def delay_seconds(self, now: float) -> float:
        """Before the next connection is looked at."""
        self._units = min(_MOST_UNITS, self._units + (now - self._filled_at) * _UNITS_PER_SECOND) - _ATTEMPT_UNITS
        self._filled_at = now
        return max(0.0, -self._units / _UNITS_PER_SECOND)

    def lets_in(self, pid: int, now: float) -> bool:
        """Whether a connection of this process is one too many for now."""
        with self._lock:
            left = self._left(pid, now)
            if left < 1:
                return False
            self._keep(pid, left - 1, now)
        self._units -= _ENTRY_UNITS
        return True

    def punish(self, pid: int) -> None:
        """It was cut off for what it had sent."""
        with self._lock:
            left, at = self._processes.get(pid, (_PROCESS_ENTRIES, 0.0))
            self._keep(pid, max(0.0, left - _PUNISHMENT), at)

    def _left(self, pid: int, now: float) -> float:
        left, at = self._processes.get(pid, (_PROCESS_ENTRIES, now))
        return min(_PROCESS_ENTRIES, left + (now - at) * _PROCESS_ENTRIES_PER_SECOND)

    def _keep(self, pid: int, left: float, at: float) -> None:
        self._processes.pop(pid, None)
        while len(self._processes) >= _MOST_PROCESSES:  # the one that was not heard of for longest
            del self._processes[next(iter(self._processes))]
        self._processes[pid] = left, at
