"""Charts as self-contained markup: lines and areas as SVG, bars as plain HTML. No script, no file beside the page.

Colours come from the page's style by class name, so that light and dark both work. All text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 12, 40

Label = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points (x, y) in order of x; `kind` is the class that gives its colour."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line across a chart."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar."""

    name: str
    kind: str
    value: float


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of one or more pieces; `text` is written beside it."""

    name: str
    parts: Sequence[Part]
    text: str

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)


def ticks(largest: float, count: int = 4) -> list[float]:
    """Round numbers from 0 to at least `largest`, about `count` steps."""
    if not largest > 0 or not math.isfinite(largest):
        return [0.0, 1.0]
    raw = largest / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    return [step * number for number in range(math.ceil(largest / step - 1e-9) + 1)]


def plain(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:g}"


class _Frame:
    """Axes of a chart: from values to places in the SVG."""

    def __init__(self, x_ticks: Sequence[float], y_ticks: Sequence[float]) -> None:
        self.x_ticks, self.y_ticks = x_ticks, y_ticks

    def x(self, value: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * value / self.x_ticks[-1]

    def y(self, value: float) -> float:
        return HEIGHT - _BOTTOM - (HEIGHT - _TOP - _BOTTOM) * value / self.y_ticks[-1]

    def axes(self, x_name: str, y_name: str, y_label: Label) -> list[str]:
        base = HEIGHT - _BOTTOM
        marks = []
        for value in self.y_ticks:
            y = self.y(value)
            marks.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(y_label(value))}</text>')
        for value in self.x_ticks:
            label = plain(value)
            x = min(self.x(value), WIDTH - 4.2 * len(label))  # a long last label stays inside
            marks.append(f'<text x="{x:.1f}" y="{base + 16}" text-anchor="middle">{escape(label)}</text>')
        middle = (_TOP + base) / 2
        marks.append(f'<text class="axis" x="{(_LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 6}" text-anchor="middle">'
                     f"{escape(x_name)}</text>")  # fmt: skip
        marks.append(f'<text class="axis" x="12" y="{middle:.0f}" text-anchor="middle" '
                     f'transform="rotate(-90 12 {middle:.0f})">{escape(y_name)}</text>')  # fmt: skip
        return marks

    def limit(self, limit: Limit) -> str:
        y = self.y(limit.value)
        return (
            f'<line class="limit" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="axis" x="{WIDTH - _RIGHT}" y="{y - 5:.1f}" text-anchor="end">{escape(limit.name)}</text>'
        )


def _frame(series: Sequence[Series], limit: Limit | None, top: float) -> _Frame:
    right = max((x for one in series for x, _ in one.points), default=0.0)
    largest = max(top, limit.value * 1.08 if limit is not None else 0.0)
    x_ticks = ticks(right)
    if len(x_ticks) > 1 and x_ticks[-1] > right > 0:  # let the lines reach the right edge
        x_ticks = [*[tick for tick in x_ticks if tick < right * 0.88], right]
    return _Frame(x_ticks, ticks(largest))


def _svg(title: str, content: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(content)}</svg>"
    )


def line_chart(title: str, series: Sequence[Series], x_name: str, y_name: str, *, y_label: Label = plain) -> str:
    """Lines over a common pair of axes, with a legend."""
    frame = _frame(series, None, max((y for one in series for _, y in one.points), default=0.0))
    content = frame.axes(x_name, y_name, y_label)
    for one in series:
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in one.points)
        name = f"<title>{escape(one.name)}</title>"
        content.append(f'<polyline class="line {one.kind}" points="{path}">{name}</polyline>')
    return _svg(title, content) + legend([(one.name, one.kind) for one in series])


def area_chart(
    title: str, series: Sequence[Series], x_name: str, y_name: str, *, limit: Limit, y_label: Label = plain
) -> str:
    """Series stacked on each other, which share their x values; `limit` is drawn across."""
    sums = [0.0] * len(series[0].points)
    bands = []
    for one in series:
        below = list(sums)
        sums = [low + y for low, (_, y) in zip(sums, one.points, strict=True)]
        bands.append((one, below, list(sums)))
    frame = _frame(series, limit, max(sums, default=0.0))
    content = frame.axes(x_name, y_name, y_label)
    for one, below, above in bands:
        xs = [frame.x(x) for x, _ in one.points]
        path = [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(xs, above, strict=True)]
        path += [f"{x:.1f},{frame.y(y):.1f}" for x, y in zip(reversed(xs), reversed(below), strict=True)]
        content.append(f'<polygon class="area {one.kind}" points="{" ".join(path)}"><title>{escape(one.name)}</title>'
                       "</polygon>")  # fmt: skip
    content.append(frame.limit(limit))
    return _svg(title, content) + legend([(one.name, one.kind) for one in series])


def bar_chart(bars: Sequence[Bar], *, with_legend: bool = False) -> str:
    """Horizontal bars to one scale, each with its name above and its figure beside it."""
    largest = max((bar.total for bar in bars), default=0.0) or 1.0
    rows = []
    for bar in bars:
        pieces = "".join(
            f'<span class="piece {part.kind}" style="width:{100 * part.value / largest:.2f}%" '
            f'title="{escape(part.name, quote=True)}"></span>'
            for part in bar.parts
            if part.value > 0
        )
        names = f"<span>{escape(bar.name)}</span><span>{escape(bar.text)}</span>"
        rows.append(f'<div class="bar"><div class="bar-name">{names}</div><div class="track">{pieces}</div></div>')
    shown = "".join(rows)
    if with_legend and bars:
        shown += legend([(part.name, part.kind) for part in bars[0].parts])
    return f'<div class="bars">{shown}</div>'


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours."""
    shown = "".join(f'<li><span class="swatch {kind}"></span>{escape(name)}</li>' for name, kind in entries)
    return f'<ul class="legend">{shown}</ul>'
