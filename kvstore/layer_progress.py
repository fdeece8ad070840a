"""How far a get has come, layer by layer: what a tier tells, and what an engine that computes meanwhile waits for.

`LayerProgress` belongs to a transfer: the tier's thread writes it, any thread may read it and wait. `LayerRounds` is
the tier's own account of one get by layers, on the executor's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.tier import Job, ResultCode


_changed = threading.Condition(threading.Lock())
"""Of all transfers: few wait, and there are many transfers that nobody waits for."""


class LayerProgress:
    """By cache group, the place in the group below which all layers are there and verified, for all its copies.

    Grows only. `failed`: a copy does not come, and so nothing more becomes ready.
    """

    __slots__ = ("_ready", "failed")

    def __init__(self) -> None:
        self._ready: dict[int, int] = {}
        self.failed = False

    def ready(self, group: int) -> int:
        return self._ready.get(group, 0)

    def advance(self, ready: Mapping[int, int]) -> None:
        with _changed:
            if not self.failed:
                for group, place in ready.items():
                    self._ready[group] = max(place, self._ready.get(group, 0))
                _changed.notify_all()

    def fail(self) -> None:
        with _changed:
            self.failed = True
            _changed.notify_all()

    def wait(self, group: int, place: int, timeout_seconds: float) -> bool:
        """Until the group's layers below `place` are ready. False: they will not be, or are not in this time."""
        with _changed:
            _changed.wait_for(lambda: self.failed or self.ready(group) >= place, timeout_seconds)
            return not self.failed and self.ready(group) >= place


def wait_all(waits: Iterable[LayerProgress], group: int, place: int, timeout_seconds: float) -> bool:
    """`LayerProgress.wait` for several transfers, in one time."""
    end = time.monotonic() + timeout_seconds
    return all(one.wait(group, place, max(0.0, end - time.monotonic())) for one in waits)


class LayerRounds:
    """Which copies of a get go on, and how far all of them are. A copy that fails ends the progress, not the others."""

    def __init__(self, progress: LayerProgress, jobs: Sequence[Job], waker: Callable[[], None] | None) -> None:
        self._progress = progress
        self._waker = waker
        self._jobs = jobs
        self._places = [job.key.layers[0] for job in jobs]
        self.results: list[ResultCode | None] = [None] * len(jobs)

    @property
    def going(self) -> list[int]:
        return [number for number, result in enumerate(self.results) if result is None]

    def got(self, number: int, place: int) -> None:
        """The layers of a copy below `place` are there and verified."""
        self._places[number] = place

    def end(self, number: int, result: ResultCode, *, good: bool) -> None:
        self.results[number] = result
        if good:
            self._places[number] = self._jobs[number].key.layers[1]
        else:
            self._progress.fail()

    def tell(self) -> None:
        """After each round."""
        ready: dict[int, int] = {}
        for job, place in zip(self._jobs, self._places, strict=True):
            ready[job.key.group] = min(place, ready.get(job.key.group, place))
        self._progress.advance(ready)
        if self._waker is not None:
            self._waker()
