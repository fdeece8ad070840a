"""An executor whose work waits until the test lets it run. One thread: the test's."""

from __future__ import annotations

import random
from collections.abc import Callable

from allocator.errors import UsageError


class SteppedExecutor:
    """Tasks wait; step() runs some, in order, or in an order drawn from `seed` where one is given."""

    def __init__(self, seed: int | None = None) -> None:
        self._tasks: list[Callable[[], None]] = []
        self._random = None if seed is None else random.Random(seed)
        self._closed = False

    @property
    def waiting_count(self) -> int:
        return len(self._tasks)

    def submit(self, task: Callable[[], None]) -> None:
        if self._closed:
            raise UsageError("executor: submit after close")
        self._tasks.append(task)

    def step(self, count: int = 1) -> int:
        """Run up to `count` tasks; how many ran."""
        ran = 0
        while self._tasks and ran < count:
            index = 0 if self._random is None else self._random.randrange(len(self._tasks))
            self._tasks.pop(index)()
            ran += 1
        return ran

    def run_all(self) -> int:
        """Run until nothing waits, tasks that tasks submit included."""
        ran = 0
        while self._tasks:
            ran += self.step()
        return ran

    def close(self) -> None:
        self.run_all()
        self._closed = True
