"""Rows as a Markdown page for `docs/results/`. Pure function of the report, so a page can be rendered again."""

from __future__ import annotations

from typing import Any

from benchmarks.rows import Report, Row, shown


def markdown(report: Report, command: str) -> str:
    """One table a suite under the machine's description; `command` is what printed the figures."""
    lines = ["# Measurements", "", f"Written by `{command}`; do not edit.", ""]
    lines += _described(report.environment)
    for suite in dict.fromkeys(row.suite for row in report.rows):
        rows = [row for row in report.rows if row.suite == suite]
        lines += ["", f"## {suite}", "", *_table(rows)]
        notes = list(dict.fromkeys(row.note for row in rows if row.note))
        lines += [""] + [f"- {note}" for note in notes] if notes else []
    return "\n".join(lines) + "\n"


def _described(environment: dict[str, Any]) -> list[str]:
    shown_keys = [key for key, value in environment.items() if value not in (None, "")]
    return ["| | |", "|---|---|", *(f"| {key.replace('_', ' ')} | {environment[key]} |" for key in shown_keys)]


def _table(rows: list[Row]) -> list[str]:
    lines = [
        "| case | value | unit | baseline | its value | ratio (larger is better) | rounds | spread |",
        "|---|--:|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        beside = "" if row.baseline_value is None else shown(row.baseline_value)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        swing = "" if row.spread is None else f"{100 * row.spread:.0f} %"
        cells = [row.case, shown(row.value), row.unit, row.baseline or "", beside, ratio, str(row.rounds), swing]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
