"""Seconds of work on a device: CUDA events around a run on the current stream, wall time on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Timed = Callable[[], object]
_MIN_SECONDS = 2e-3
"""A sample repeats a run until it takes about so long: a launch takes microseconds, an event resolves half of one."""


class DeviceClock:
    """Times runs on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, run: Timed, repeats: int = 1) -> float:
        """Seconds of one run, averaged over `repeats` that follow each other without waiting."""
        if self.device.type != "cuda":
            started = time.perf_counter()
            for _ in range(repeats):
                run()
            return (time.perf_counter() - started) / repeats
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        first.record()
        for _ in range(repeats):
            run()
        last.record()
        last.synchronize()
        return 1e-3 * float(first.elapsed_time(last)) / repeats

    def samples(self, sides: dict[str, Timed], rounds: int) -> dict[str, list[float]]:
        """Seconds of each side by round, sides in turn, every other round backwards. Each is warmed up first."""
        repeats = {}
        for name, run in sides.items():
            self.seconds(run, 3)
            repeats[name] = max(1, int(_MIN_SECONDS / max(self.seconds(run), 1e-7)))
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in list(sides)[:: -1 if number % 2 else 1]:
                found[name].append(self.seconds(sides[name], repeats[name]))
        return found
