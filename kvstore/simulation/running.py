"""Many settings at once: one process each, the trace shared by fork, progress told while they run.

Used by the command line and by planning. Where processes cannot fork, settings run one after the other.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.sharedctypes import SynchronizedArray

from kvstore.simulation.replay import replay
from kvstore.simulation.setting import Row, Setting
from kvstore.simulation.trace import Trace

_POLL_SECONDS = 0.2
Progress = Callable[[int], None]
_shared: tuple[Trace, Sequence[Setting], SynchronizedArray[int]] | None = None  # set before the fork, read after it


def run(
    trace: Trace, settings: Sequence[Setting], jobs: int | None = None, progress: Progress | None = None
) -> list[Row]:
    """One Row a Setting, in their order. `progress` is told how many requests all of them have handled so far."""
    jobs = min(len(settings), jobs or os.cpu_count() or 1)
    if jobs <= 1 or "fork" not in multiprocessing.get_all_start_methods():
        rows: list[Row] = []
        for one in settings:
            rows.append(replay(trace, one, None if progress is None else _after(progress, len(rows) * len(trace))))
        return rows
    return _run_forked(trace, settings, jobs, progress)


def _after(progress: Progress, done: int) -> Progress:
    return lambda count: progress(done + count)


def _run_forked(trace: Trace, settings: Sequence[Setting], jobs: int, progress: Progress | None) -> list[Row]:
    global _shared  # the way into a forked process that copies nothing
    context = multiprocessing.get_context("fork")
    counts: SynchronizedArray[int] = context.Array("q", len(settings))
    _shared = (trace, settings, counts)
    try:
        with ProcessPoolExecutor(jobs, mp_context=context) as executor:
            waiting: set[Future[Row]] = set()
            futures = [executor.submit(_one, number) for number in range(len(settings))]
            waiting.update(futures)
            while waiting:
                _, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
                if progress is not None:
                    progress(sum(counts[:]))
            return [one.result() for one in futures]
    finally:
        _shared = None


def _one(number: int) -> Row:
    assert _shared is not None
    trace, settings, counts = _shared

    def note(count: int) -> None:
        counts[number] = count

    row = replay(trace, settings[number], note)
    counts[number] = len(trace)
    return row
