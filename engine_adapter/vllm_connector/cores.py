"""Where the worker's threads run. vLLM's CPU worker binds itself to cores to compute on, and what it starts, with it.

Called while the connector is made, on the worker's main thread.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def beside_the_computing() -> Iterator[None]:
    """Threads that are started meanwhile run on the cores that the parent process has and this thread does not.

    Where there are none, as in an engine that is not bound, everything stays as it is.
    """
    own = os.sched_getaffinity(0)
    beside = os.sched_getaffinity(os.getppid()) - own
    if beside:
        os.sched_setaffinity(0, beside)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
