"""Time as a bound may be put on it: what a paused or overloaded machine takes from the process is not counted.

A thread of its own sleeps in short steps and counts them. Where the process waits, the steps go on, so that a wait
that should not be shows in full; where it cannot run, because the machine is paused or others have it, they do not.
"""

from __future__ import annotations

import threading
import time

_STEP_SECONDS = 0.002


class Stopwatch:
    """A context manager; `seconds` so far. At most the time by the wall, and about that on a quiet machine."""

    def __init__(self) -> None:
        self._steps = 0
        self._ends = False
        self._thread = threading.Thread(target=self._count, name="stopwatch", daemon=True)

    @property
    def seconds(self) -> float:
        return self._steps * _STEP_SECONDS

    def __enter__(self) -> Stopwatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    def _count(self) -> None:
        while not self._ends:
            time.sleep(_STEP_SECONDS)
            self._steps += 1
