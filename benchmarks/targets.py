"""What is asked for: `targets.json` beside this file, and the verdict on measured rows. Pure functions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from benchmarks.rows import Row, shown

_FILE = Path(__file__).resolve().parent / "targets.json"


class State(StrEnum):
    """How a case that is asked for stands."""

    MET = "met"
    SHORT = "short"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A case that is asked for, and what was measured of it; `ratio` None where nothing was."""

    suite: str
    case: str
    target: float
    ratio: float | None

    @property
    def state(self) -> State:
        if self.ratio is None:
            return State.MISSING
        return State.MET if self.ratio >= self.target else State.SHORT

    def described(self) -> str:
        """One line for a terminal or a list."""
        found = "no row" if self.ratio is None else f"{shown(self.ratio)}"
        return f"{self.suite} {self.case}: {self.state.value}: {found}, asked for {shown(self.target)}"


@cache
def targets() -> dict[str, dict[str, float]]:
    """Smallest ratio asked for, by suite and case."""
    found: dict[str, dict[str, float]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


def target_of(row: Row) -> float | None:
    """What is asked of this row; None where nothing is."""
    return targets().get(row.suite, {}).get(row.case)


def verdicts(rows: Iterable[Row], suites: Sequence[str] | None = None) -> list[Verdict]:
    """Every case asked for of `suites` (all when None), in the order of the targets. A row without ratio is missing."""
    ratios = {(row.suite, row.case): row.ratio for row in rows}
    return [
        Verdict(suite, case, target, ratios.get((suite, case)))
        for suite, cases in targets().items()
        if suites is None or suite in suites
        for case, target in cases.items()
    ]


def summary(found: Sequence[Verdict]) -> str:
    """How many of the cases asked for are met, short and missing."""
    count = {state: sum(one.state is state for one in found) for state in State}
    return (
        f"{count[State.MET]} of {len(found)} cases asked for are met, {count[State.SHORT]} short, "
        f"{count[State.MISSING]} missing."
    )
