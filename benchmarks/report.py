"""Rows as a Markdown page for `docs/results/`, with charts. Pure functions: a page can be rendered again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.charts import ratio_chart, target_chart
from benchmarks.rows import Report, Row, shown
from benchmarks.targets import State, summary, target_of, targets, verdicts

_TITLE = "Measurements"


def markdown(report: Report, command: str, chart_files: Mapping[str, str] | None = None) -> str:
    """One table a suite under the machine's description; `command` is what printed the figures.

    chart_files: name of the SVG file by suite, for those that have one beside the page.
    """
    lines = [f"# {_TITLE}", "", f"Written by `{command}`; do not edit.", ""]
    lines += _described(report.environment)
    suites = report_suites(report)
    lines += _asked(report, suites)
    for suite in suites:
        rows = [row for row in report.rows if row.suite == suite]
        lines += ["", f"## {suite}", ""]
        if chart_files and suite in chart_files:
            lines += [f"![{suite}: what was reached beside what is asked for]({chart_files[suite]})", ""]
        lines += _table(rows)
        notes = list(dict.fromkeys(row.note for row in rows if row.note))
        lines += [""] + [f"- {note}" for note in notes] if notes else []
    return "\n".join(lines) + "\n"


def charts(report: Report) -> dict[str, str]:
    """An SVG by suite; suites whose rows have nothing to compare are left out."""
    environment = report.environment
    caption = (
        f"{environment.get('machine', 'unknown machine')}, commit {environment.get('commit', 'unknown')}, "
        f"{environment.get('when', 'no date')}"
    )
    found = {}
    for suite in report_suites(report):
        rows = [row for row in report.rows if row.suite == suite]
        if suite in targets():
            found[suite] = target_chart(suite, verdicts(rows, [suite]), caption)
        elif any(row.ratio is not None for row in rows):
            found[suite] = ratio_chart(suite, rows, caption)
    return found


def report_suites(report: Report) -> list[str]:
    """The suites of a report, in the order of its rows."""
    return list(dict.fromkeys(row.suite for row in report.rows))


def _asked(report: Report, suites: list[str]) -> list[str]:
    """The summary over the suites that were measured, and what is not met."""
    found = verdicts(report.rows, suites)
    if not found:
        return []
    unmet = [one for one in found if one.state is not State.MET]
    rest = [suite for suite in targets() if suite not in suites]
    lines = ["", f"**{summary(found)}**", ""]
    lines += [f"- {one.described()}" for one in unmet]
    if rest:
        lines += [f"- Not in this page: {', '.join(rest)}."]
    return lines


def _described(environment: dict[str, Any]) -> list[str]:
    shown_keys = [key for key, value in environment.items() if value not in (None, "")]
    return ["| | |", "|---|---|", *(f"| {key.replace('_', ' ')} | {environment[key]} |" for key in shown_keys)]


def _table(rows: list[Row]) -> list[str]:
    lines = [
        "| case | value | unit | baseline | its value | ratio (larger is better) | asked for | rounds | spread |",
        "|---|--:|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        beside = "" if row.baseline_value is None else shown(row.baseline_value)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        swing = "" if row.spread is None else f"{100 * row.spread:.0f} %"
        cells = [row.case, shown(row.value), row.unit, row.baseline or "", beside, ratio, _wanted(row)]
        lines.append(f"| {' | '.join([*cells, str(row.rounds), swing])} |")
    return lines


def _wanted(row: Row) -> str:
    target = target_of(row)
    if target is None:
        return ""
    met = row.ratio is not None and row.ratio >= target
    return f"{shown(target)}, {State.MET.value if met else State.SHORT.value}"
