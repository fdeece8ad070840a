"""Charts of a report as SVG files: what was reached beside what was asked for, a bar a case. No script, nothing linked.

Colours follow the reader's light or dark setting inside the file itself, so an image in a page works in both; states
are also written out, since colour alone does not reach everybody. Pure functions; all text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.rows import Row, shown
from benchmarks.targets import State, Verdict

_CAPTION_LETTERS = 120
_WIDTH, _NAMES, _TEXTS = 900, 330, 190
_TOP, _BAR, _STEP, _BOTTOM = 58, 16, 26, 30
_STYLE = """
svg { background: #ffffff; }
text { font: 13px system-ui, sans-serif; fill: #16181d; }
.title { font-weight: 600; font-size: 15px; }
.soft { fill: #5a6270; font-size: 12px; }
.grid { stroke: #d9dde3; } .asked { stroke: #16181d; stroke-width: 2; }
.met { fill: #1d5fd1; } .short { fill: #c2570c; } .plain { fill: #6b7280; }
.missing { fill: none; stroke: #c2570c; stroke-dasharray: 4 3; }
@media (prefers-color-scheme: dark) {
  svg { background: #101216; }
  text { fill: #e8eaee; } .soft { fill: #a3abb8; }
  .grid { stroke: #333943; } .asked { stroke: #e8eaee; }
  .met { fill: #6aa5ff; } .short { fill: #f0883e; } .plain { fill: #9aa3b2; }
  .missing { stroke: #f0883e; }
}
"""


@dataclass(frozen=True, slots=True)
class _Bar:
    """A bar from 0 to `value`, in units of what was asked for; None: nothing was measured."""

    name: str
    kind: str
    value: float | None
    text: str


def target_chart(suite: str, found: Sequence[Verdict], caption: str) -> str:
    """What was reached, as a multiple of what was asked for: the line at 1 is the target of every case."""
    bars = [
        _Bar(
            one.case,
            one.state.value,
            None if one.ratio is None else one.ratio / one.target,
            f"{one.state.value}: {'no row' if one.ratio is None else shown(one.ratio)}, asked {shown(one.target)}",
        )
        for one in found
    ]
    met = sum(one.state is State.MET for one in found)
    title = f"{suite}: {met} of {len(found)} cases reach what is asked for (line: the target; scale: multiples of it)"
    return _chart(title, caption, bars)


def ratio_chart(suite: str, rows: Sequence[Row], caption: str) -> str:
    """For suites of which nothing is asked here: ratios to the baseline, the line at 1 is the baseline itself."""
    bars = [
        _Bar(row.case, "plain", row.ratio, f"{shown(row.ratio)} times {row.baseline}")
        for row in rows
        if row.ratio is not None
    ]
    return _chart(f"{suite}: ratio to the baseline of each case (line: the baseline)", caption, bars)


def _chart(title: str, caption: str, bars: Sequence[_Bar]) -> str:
    height = _TOP + _STEP * len(bars) + _BOTTOM
    span = _WIDTH - _NAMES - _TEXTS
    ticks = _ticks(max([1.0, *(bar.value for bar in bars if bar.value is not None)]))

    def place(value: float) -> float:
        return _NAMES + span * min(value, ticks[-1]) / ticks[-1]

    bottom = height - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(caption)}</desc>",
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="8" y="20">{escape(title)}</text>',
        f'<text class="soft" x="8" y="38">{escape(_shortened(caption))}</text>',
    ]
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{place(tick):.1f}" x2="{place(tick):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="soft" text-anchor="middle" x="{place(tick):.1f}" y="{bottom + 16}">{tick:g}</text>')
    for number, bar in enumerate(bars):
        parts += _bar(bar, _TOP + _STEP * number + (_STEP - _BAR) / 2, place)
    parts.append(f'<line class="asked" x1="{place(1):.1f}" x2="{place(1):.1f}" y1="{_TOP - 6}" y2="{bottom}"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _shortened(caption: str) -> str:
    """As much as fits on a line; all of it is in the description."""
    return caption if len(caption) <= _CAPTION_LETTERS else caption[: _CAPTION_LETTERS - 1].rstrip() + "…"


def _bar(bar: _Bar, top: float, place: Callable[[float], float]) -> list[str]:
    kind = "missing" if bar.value is None else bar.kind
    end = place(1.0 if bar.value is None else bar.value)
    base = top + _BAR - 4
    return [
        f'<text text-anchor="end" x="{_NAMES - 8}" y="{base:.1f}">{escape(bar.name)}</text>',
        f'<rect class="{kind}" x="{_NAMES}" y="{top:.1f}" width="{max(1.0, end - _NAMES):.1f}" height="{_BAR}"/>',
        f'<text class="soft" x="{_WIDTH - _TEXTS + 10}" y="{base:.1f}">{escape(bar.text)}</text>',
    ]


def _ticks(largest: float) -> list[float]:
    """Round numbers from 0 to at least `largest`; values beyond ten times the target are cut at ten."""
    largest = min(largest, 10.0)
    step = next(one for one in (0.25, 0.5, 1.0, 2.0) if largest / one <= 6 or one == 2.0)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]
