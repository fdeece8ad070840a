"""The page of a simulation: hit ratio against capacity, a line a policy, with Belady's bound; and all rows as a table.

One HTML file with its drawing inside, no script, nothing linked; colours follow the reader's light or dark setting, and
lines are named at their ends, since colour alone does not reach everybody. Pure functions; all text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from kvstore.simulation.policies import BOUND
from kvstore.simulation.setting import Row

_WIDTH, _HEIGHT = 860, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 170, 24, 48
_LABEL_STEP = 15
_STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #16181d; --soft: #5a6270; --grid: #d9dde3;
  --c0: #1d5fd1; --c1: #c2570c; --c2: #0f7b4d; --c3: #8a3ab9; --c4: #b3261e; --c5: #6b7280; --c6: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --back: #101216; --text: #e8eaee; --soft: #a3abb8; --grid: #333943;
  --c0: #6aa5ff; --c1: #f0883e; --c2: #4cc38a; --c3: #c792ea; --c4: #ff8078; --c5: #9aa3b2; --c6: #5cc8d7; } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; margin: 24px auto;
  max-width: 900px; padding: 0 16px; }
h1 { font-size: 20px; } p { color: var(--soft); }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--soft); }
.grid { stroke: var(--grid); } .line { fill: none; stroke-width: 2; } .bound { stroke-dasharray: 5 4; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
"""


def page(rows: Sequence[Row], columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """The whole HTML. `columns` and `cells`: the table below the drawing."""
    trace = escape(rows[0].trace)
    head = "".join(f'<th scope="col">{escape(one)}</th>' for one in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in cells)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Hit ratio against capacity: {trace}</title><style>{_STYLE}</style></head><body>
<h1>Hit ratio against capacity: {trace}</h1>
<p>{rows[0].requests:,} requests, {rows[0].blocks:,} blocks. Share of all blocks presented that were resident, by
device capacity in percent of the unique blocks. The dashed line is Belady's bound: no policy can do better.</p>
{_drawing(rows)}
<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>
{body}
</tbody></table></div></body></html>
"""


def _drawing(rows: Sequence[Row]) -> str:
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(_name(row, rows), []).append(row)
    percents = [row.capacity_percent for row in rows]
    low, high = math.log(min(percents)), math.log(max(percents))
    top = max(0.05, max(row.block_hit_ratio for row in rows) * 1.05)

    def x(percent: float) -> float:
        share = (math.log(percent) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(ratio: float) -> float:
        return _HEIGHT - _BOTTOM - ratio / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [_axes(sorted(set(percents)), top, x, y)]
    ends = []
    for number, (name, own) in enumerate(lines.items()):
        own.sort(key=lambda row: row.capacity_percent)
        points = " ".join(f"{x(row.capacity_percent):.1f},{y(row.block_hit_ratio):.1f}" for row in own)
        bound = " bound" if own[0].policy == BOUND else ""
        colour = f"var(--c{number % 7})"
        parts.append(f'<polyline class="line{bound}" stroke="{colour}" points="{points}"/>')
        parts += [
            f'<circle r="3" fill="{colour}" cx="{x(row.capacity_percent):.1f}" cy="{y(row.block_hit_ratio):.1f}">'
            f"<title>{escape(name)}, {row.capacity_percent:g} %: {row.block_hit_ratio:.2%}</title></circle>"
            for row in own
        ]
        ends.append((y(own[-1].block_hit_ratio), f"{name} {own[-1].block_hit_ratio:.1%}", colour))
    parts += _labels(ends)
    described = "; ".join(f"{name}: {own[-1].block_hit_ratio:.1%} at most" for name, own in lines.items())
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(described)}">'
        + "\n".join(parts)
        + "</svg>"
    )


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The policy, and whatever else differs between rows."""
    words = [row.policy]
    for field in ("codec", "hosts", "routing"):
        if len({getattr(one, field) for one in rows}) > 1:
            words.append(f"{getattr(row, field)} hosts" if field == "hosts" else str(getattr(row, field)))
    return ", ".join(words)


def _axes(percents: Sequence[float], top: float, x: object, y: object) -> str:
    assert callable(x)
    assert callable(y)
    step = next(one for one in (0.01, 0.02, 0.05, 0.1, 0.2) if top / one <= 7)
    parts = []
    for count in range(int(top / step) + 1):
        height = y(count * step)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{height:.1f}" y2="{height:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{height + 4:.1f}" text-anchor="end">{count * step:.0%}</text>')
    for percent in percents:
        parts.append(
            f'<text x="{x(percent):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{percent:g} %</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">capacity, of the unique blocks</text>')
    return "\n".join(parts)


def _labels(ends: list[tuple[float, str, str]]) -> list[str]:
    """Names at the ends of the lines, moved apart where they would lie on each other."""
    parts = []
    lowest = -math.inf
    for height, text, colour in sorted(ends):
        lowest = max(height, lowest + _LABEL_STEP)
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 10}" y="{lowest + 4:.1f}" style="fill:{colour}">{escape(text)}</text>'
        )
    return parts
