"""The page of a simulation: hit ratio against capacity, a line a policy, with Belady's bound; what each tier brought
and took; and all rows as a table.

One HTML file with its drawing inside, no script, nothing linked; colours follow the reader's light or dark setting, and
lines are named at their ends, since colour alone does not reach everybody. Pure functions; all text is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from kvstore.charts import Bar, Part, bar_chart, legend
from kvstore.page import STYLE
from kvstore.simulation.policies import BOUND
from kvstore.simulation.setting import Row, TierRow

_WIDTH, _HEIGHT = 480, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 16, 48
_LABEL_STEP = 17
_STYLE = """
:root { --c0: #1d5fd1; --c1: #c2570c; --c2: #0f7b4d; --c3: #8a3ab9; --c4: #b3261e; --c5: #5a6270; --c6: #0b7285; }
@media (prefers-color-scheme: dark) { :root { --c0: #6aa5ff; --c1: #f0883e; --c2: #4cc38a; --c3: #c792ea; --c4: #ff8078;
  --c5: #a3abb8; --c6: #5cc8d7; } }
.hits { position: relative; max-width: 760px; padding-right: 190px; }
.hits svg { margin: 8px 0; }
.bound { stroke-dasharray: 5 4; }
.ends { list-style: none; margin: 8px 0; padding: 0; font-size: .85rem; line-height: 1.2; }
.ends li { position: absolute; left: calc(100% - 184px); width: 184px; transform: translateY(-50%); }
@media (max-width: 720px) { .hits { padding-right: 0; } .ends { display: flex; flex-wrap: wrap; gap: 4px 16px; }
  .ends li { position: static; width: auto; transform: none; }
  .ends li::before { content: ""; display: inline-block; width: 12px; height: 12px; border-radius: 3px;
    margin-right: 6px; vertical-align: -1px; background: currentColor; } }
"""
_KINDS = {"device": "full", "host": "host", "remote": "work"}
_HEADINGS = ("Settings", "Tiers")
_NOTHING = ("0.00%", "0.0", "0.00", "-")
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def page(rows: Sequence[Row], tables: Sequence[Table]) -> str:
    """The whole HTML. `tables`: (columns, cells) to be shown below the drawings."""
    title = escape(f"Hit ratio against capacity: {rows[0].trace}")
    pictures = _tier_pictures(rows) if any(len(row.tiers) > 1 for row in rows) else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{STYLE}{_STYLE}</style></head><body><main>
<h1>{title}</h1>
<p class="soft">{rows[0].requests:,} requests, {rows[0].blocks:,} blocks. Share of all blocks presented that were
resident{_where(rows)}, by device capacity in percent of the unique blocks.{_told_of_the_bound(rows)}</p>
{_drawing(rows)}
{pictures}
{"".join(f"<h2>{name}</h2>{_table(*table)}" for name, table in zip(_HEADINGS, tables, strict=False))}
</main></body></html>
"""


def _where(rows: Sequence[Row]) -> str:
    return " in any tier" if any(len(row.tiers) > 1 for row in rows) else ""


def _told_of_the_bound(rows: Sequence[Row]) -> str:
    if all(row.policy != BOUND for row in rows):
        return ""
    return " The dashed line is Belady's bound: no policy can do better."


def _table(columns: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """Without columns in which there is nothing, as those of tiers that are not there."""
    shown = [place for place in range(len(columns)) if any(row[place] not in _NOTHING for row in cells)]
    head = "".join(f'<th scope="col">{escape(columns[place])}</th>' for place in shown)
    lines = ("".join(f"<td>{escape(row[place])}</td>" for place in shown) for row in cells)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>\n'


def _tier_pictures(rows: Sequence[Row]) -> str:
    """What each tier brought and took, a bar a row."""
    amounts: tuple[tuple[str, Callable[[TierRow], float], Callable[[float], str]], ...] = (
        ("Hits, by tier", lambda one: one.block_hit_ratio, lambda total: f"{total:.1%}"),
        ("Moved to and from tiers", lambda one: one.written_bytes + one.read_bytes, lambda n: f"{n / 1e9:,.1f} GB"),
        ("Prefill saved, by tier", lambda one: max(0.0, one.seconds_saved), _hours),
        ("Cost of the tiers' memory", lambda one: 0.0 if one.tier == "device" else one.dollars, lambda n: f"${n:,.2f}"),
    )
    cards = []
    for title, amount, text in amounts:
        bars = []
        for row in rows:
            parts = [Part(one.tier, _KINDS[one.tier], amount(one)) for one in row.tiers]
            name = f"{_name(row, rows)}, {row.capacity_percent:.3g} %"
            bars.append(Bar(name, parts, text(sum(part.value for part in parts))))
        shown = {part.name for bar in bars for part in bar.parts if part.value}
        kinds = [(tier, kind) for tier, kind in _KINDS.items() if tier in shown]
        cards.append(f"<figure class='card'><h3>{title}</h3>{bar_chart(bars)}{legend(kinds)}</figure>")
    return f"<div class='grid'>{''.join(cards)}</div>"


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 360 else f"{seconds:,.1f} s"


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
            f"<title>{escape(name)}, {row.capacity_percent:.3g} %: {row.block_hit_ratio:.2%}</title></circle>"
            for row in own
        ]
        ends.append((y(own[-1].block_hit_ratio), f"{name} {own[-1].block_hit_ratio:.1%}", colour))
    described = "; ".join(f"{name}: {own[-1].block_hit_ratio:.1%} at most" for name, own in lines.items())
    return (
        f'<div class="hits"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(described)}">'
        + "\n".join(parts)
        + f'</svg>\n<ul class="ends">{"".join(_labels(ends))}</ul></div>'
    )


def _name(row: Row, rows: Sequence[Row]) -> str:
    """The policy, and whatever else differs between rows."""
    words = [row.policy]
    for field in ("codec", "hosts", "routing"):
        if len({getattr(one, field) for one in rows}) > 1:
            words.append(_hosts(row.hosts) if field == "hosts" else str(getattr(row, field)))
    return ", ".join(word for word in words if word != "-")


def _hosts(count: int) -> str:
    return "1 host" if count == 1 else f"{count} hosts"


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
            f'<text x="{x(percent):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{percent:.3g} %</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">capacity, of the unique blocks</text>')
    return "\n".join(parts)


def _labels(ends: list[tuple[float, str, str]]) -> list[str]:
    """Names beside the ends of the lines, moved apart where they would lie on each other; on a narrow page a legend."""
    parts = []
    lowest = -math.inf
    for height, text, colour in sorted(ends):
        lowest = max(height, lowest + _LABEL_STEP)
        parts.append(f'<li style="top:{100 * lowest / _HEIGHT:.1f}%;color:{colour}">{escape(text)}</li>')
    return parts
