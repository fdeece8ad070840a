"""Where the work of tiers and codecs runs: inside the call, or on one thread in order.

Made by whoever owns the store; `submit` may be called from any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from allocator.errors import UsageError

_LOG = logging.getLogger(__name__)


class Executor(Protocol):
    """Where a tier's work runs: in order, one task at a time."""

    def submit(self, task: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent."""


class InlineExecutor:
    """Runs each task before submit returns: for simulation and tests."""

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def close(self) -> None:
        return


class ThreadExecutor:
    """One thread, first in first out. A task that raises is counted and logged; the thread lives on.

    on_failed: told the type's name of what a task raised, on this thread; a store makes it its metric failed_tasks.
    """

    def __init__(self, name: str = "kvstore-io", on_failed: Callable[[str], None] | None = None) -> None:
        self.failed_count = 0
        self._on_failed = on_failed
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        if self._closed:
            raise UsageError("executor: submit after close")
        self._tasks.put(task)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # counted by cause: a lost thread would strand every later transfer
                self.failed_count += 1
                _LOG.exception("kvstore: a task on %s failed", self._thread.name)
                if self._on_failed is not None:
                    self._on_failed(type(error).__name__)
            del task


def make_executor(kind: str, name: str = "kvstore-io", on_failed: Callable[[str], None] | None = None) -> Executor:
    """The executor that the setting io_threads names: "thread" or "inline" (there a failure is the caller's)."""
    if kind == "thread":
        return ThreadExecutor(name, on_failed)
    if kind == "inline":
        return InlineExecutor()
    raise UsageError(f"executor: got {kind!r}; expected thread or inline")
