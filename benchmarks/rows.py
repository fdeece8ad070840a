"""What a measurement is: rounds of samples, a row, a report. Pure Python; imported by every suite."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

DEFAULT_ROUNDS = 7
Direction = Literal["smaller", "larger"]
"""Which way is better for a row's value: seconds are "smaller", blocks a second are "larger"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure beside its baseline. `ratio` is turned so that larger is better; None where nothing is beside it."""

    suite: str
    case: str
    unit: str
    value: float
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None
    rounds: int = 1
    spread: float | None = None
    note: str = ""

    def described(self) -> str:
        """One line for the terminal."""
        beside = ""
        if self.baseline is not None and self.baseline_value is not None:
            beside = f"   {self.baseline}: {shown(self.baseline_value)}"
            if self.ratio is not None:
                beside += f"   ratio {self.ratio:.2f}"
        return f"{self.suite:9s} {self.case:44s} {shown(self.value):>10s} {self.unit:12s}{beside}"


def shown(value: float) -> str:
    """Four significant digits, without an exponent where a person would not write one."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.3e}"


def compared(
    suite: str,
    case: str,
    unit: str,
    ours: Sequence[float],
    *,
    better: Direction,
    baseline: str | None = None,
    theirs: Sequence[float] = (),
    note: str = "",
) -> Row:
    """A row from the samples of several rounds: medians, their ratio, and the spread of ours.

    `ours`, `theirs`: one sample a round, in `unit`. The spread is half the interquartile range over the median.
    """
    value = statistics.median(ours)
    baseline_value = statistics.median(theirs) if theirs else None
    ratio = None
    if baseline_value is not None and value > 0 and baseline_value > 0:
        ratio = baseline_value / value if better == "smaller" else value / baseline_value
    return Row(
        suite=suite,
        case=case,
        unit=unit,
        value=value,
        baseline=baseline if theirs else None,
        baseline_value=baseline_value,
        ratio=ratio,
        rounds=len(ours),
        spread=spread(ours),
        note=note,
    )


def spread(samples: Sequence[float]) -> float | None:
    """Half the interquartile range over the median; None for fewer than three samples."""
    if len(samples) < 3:
        return None
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle if middle else None


def interleaved(
    ours: Callable[[int], float], theirs: Callable[[int], float] | None, rounds: int
) -> tuple[list[float], list[float]]:
    """Samples of both sides, taken in turn; every other round begins with the other side.

    A slow minute of the machine then meets both. One unrecorded round warms both up.
    """
    mine: list[float] = []
    other: list[float] = []
    for round_number in range(-1, rounds):
        turns: list[tuple[Callable[[int], float], list[float]]] = [(ours, mine)]
        if theirs is not None:
            turns.append((theirs, other))
        if round_number % 2:
            turns.reverse()
        for run, samples in turns:
            sample = run(round_number)
            if round_number >= 0:
                samples.append(sample)
    return mine, other


def rotated(
    sides: Mapping[str, Callable[[int], float]], rounds: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """`interleaved` for any number of sides: every round begins with the next one. One unrecorded round warms up."""
    names = list(sides)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-1 if warm_up else 0, rounds):
        first = round_number % len(names)
        for name in (*names[first:], *names[:first]):
            sample = sides[name](round_number)
            if round_number >= 0:
                samples[name].append(sample)
    return samples


class Stopwatch:
    """Adds up the time of the parts that count; the collector rests meanwhile, as it does in a tuned server.

    `clock`: wall time, or `time.thread_time` for work of one thread that waits for nothing: then neighbours on the
    machine do not count.
    """

    __slots__ = ("_clock", "_collects", "_started", "seconds")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._started = 0.0
        self._collects = False

    def __enter__(self) -> Stopwatch:
        self._collects = gc.isenabled()
        gc.disable()
        self._started = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds += self._clock() - self._started
        if self._collects:
            gc.enable()


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure. `quick` shortens suites for tests: the figures of a quick run prove nothing."""

    rounds: int = DEFAULT_ROUNDS
    quick: bool = False
    seed: int = 0
    models: tuple[str, ...] = ()
    log: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr, flush=True))


@dataclass(slots=True)
class Report:
    """Rows under the description of where and when they were measured."""

    environment: dict[str, Any]
    rows: list[Row]

    def to_json(self) -> str:
        """The report as it is written by `--json`."""
        return (
            json.dumps({"environment": self.environment, "rows": [asdict(row) for row in self.rows]}, indent=1) + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Report:
        """A report as `to_json` wrote it. Raises ValueError, TypeError or KeyError for anything else."""
        document = json.loads(text)
        return cls(document["environment"], [Row(**row) for row in document["rows"]])

    def joined(self, later: Report) -> Report:
        """This report with the suites of a later one, which replace suites of the same name.

        Where machine, commit or date differ, both are named: a page must not claim one for all.
        """
        mine, theirs = self.environment, later.environment
        joined = {
            key: mine.get(key) if mine.get(key) == theirs.get(key) else f"{mine.get(key)}; {theirs.get(key)}"
            for key in {**mine, **theirs}
        }
        replaced = {row.suite for row in later.rows}
        return Report(joined, [row for row in self.rows if row.suite not in replaced] + later.rows)


def environment(seed: int) -> dict[str, Any]:
    """Machine, commit, seed and versions: what a reader needs to judge a figure."""
    return {
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "machine": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "commit": _commit(),
        "seed": seed,
        "python": platform.python_version(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "transformers": _version("transformers"),
        "torch_threads": 1,
    }


def _processor() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip()
