"""The plan as one HTML page. Made from the document alone; no script, no network, no other file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from kvstore.charts import Bar, Part, Series, bar_chart, legend, line_chart, plain
from kvstore.page import html_page

_KINDS = {"raw": "ample", "int8k": "tight", "int4": "int4"}
_TIER_KINDS = ("full", "host", "work")  # colours of the device and of the tiers below it
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def bytes_text(count: float) -> str:
    """1536 -> "1.50 KiB"."""
    for size, unit in _UNITS:
        if count >= size:
            value = count / size
            return f"{value:,.0f} {unit}" if value >= 100 or value == int(value) else f"{value:.3g} {unit}"
    return f"{count:,.0f} B"


def seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def requests_text(count: int) -> str:
    return "1 request" if count == 1 else f"{count:,} requests"


def plan_page(document: Mapping[str, Any]) -> str:
    """The whole page."""
    model, demand, machine = document["model"], document["demand"], document["machine"]
    title = f"{model['name']}: what fits, and how fast it can be"
    body = "\n".join(
        [
            f"<h1>{escape(title)}</h1>",
            f"<p>{requests_text(demand['concurrency'])} of {demand['context_tokens']:,} tokens on {machine['gpus']} x "
            f"{escape(machine['gpu'])}: {bytes_text(machine['memory_bytes'])} of memory, of which the weights take "
            f"{bytes_text(machine['weights_bytes'])} and {bytes_text(machine['kv_bytes'])} are left for KV. Times are "
            "floors: what bandwidth and arithmetic allow at best.</p>",
            *(f"<p class='note'>{escape(note)}</p>" for note in document["notes"]),
            f"<div class='grid'>{''.join(_pictures(document))}</div>",
            f"<h2>Settings</h2>{_table(_SETTINGS, document['settings'])}",
            f"<h2>What each way to need less changes</h2>{_table(_EFFECTS, document['effects'])}",
            f"<h2>Tiers</h2>{_table(_TIERS, document['tiers'])}" if document["tiers"] else "",
            f"<h2>Your trace</h2>{_table(_TRAFFIC, document['traffic'])}" if document["traffic"] else "",
        ]
    )
    return html_page(title, body)


def _pictures(document: Mapping[str, Any]) -> list[str]:
    bars = [
        Bar(
            one["name"],
            [Part(one["codec"], _KINDS[one["codec"]], one["kv_bytes_per_request"])],
            bytes_text(one["kv_bytes_per_request"]),
        )
        for one in document["settings"]
        if not one["shared_tokens"]
    ]
    fit = _curves(document, "requests_that_fit", 1.0)
    step = _curves(document, "itl_floor_seconds", 1e3)
    concurrency = document["demand"]["concurrency"]
    hits = [
        Bar(
            one["name"],
            [
                Part(tier, kind, ratio)
                for (tier, ratio), kind in zip(one["hit_ratio_by_tier"].items(), _TIER_KINDS, strict=False)
            ],
            f"{one['block_hit_ratio']:.1%}",
        )
        for one in document["traffic"]
    ]
    return [
        _card("KV of one request", bar_chart(bars)),
        _card(
            "How many requests fit",
            line_chart("requests that fit by length of context", fit, "tokens of context", "requests", y_label=plain),
        ),
        _card(
            f"The least time of a decode step of {requests_text(concurrency)}",
            line_chart("floor of a decode step by length of context", step, "tokens of context", "milliseconds"),
        ),
        *([_card("Blocks of the trace that were hits, by tier", _hits(hits))] if hits else []),
    ]


def _hits(bars: Sequence[Bar]) -> str:
    return bar_chart(bars) + legend([(part.name, part.kind) for part in bars[-1].parts])  # the last has all tiers


def _curves(document: Mapping[str, Any], field: str, factor: float) -> list[Series]:
    return [
        Series(
            curve["codec"],
            _KINDS[curve["codec"]],
            [(point["context_tokens"], point[field] * factor) for point in curve["points"]],
        )
        for curve in document["curves"]
    ]


def _card(title: str, content: str) -> str:
    return f"<figure class='card'><h3>{escape(title)}</h3>{content}</figure>"


Column = tuple[str, Callable[[Mapping[str, Any]], str]]

_SETTINGS: tuple[Column, ...] = (
    ("setting", lambda row: row["name"]),
    ("KV a token", lambda row: bytes_text(row["kv_bytes_per_token"])),
    ("KV a request", lambda row: bytes_text(row["kv_bytes_per_request"])),
    ("requests that fit", lambda row: f"{row['requests_that_fit']:,}" + ("" if row["fits"] else " (short)")),
    ("read a decode step", lambda row: bytes_text(row["decode_step_read_bytes"])),
    ("ITL floor", lambda row: f"{seconds_text(row['itl_floor_seconds'])} ({row['itl_bound_by']})"),
    ("TTFT floor", lambda row: f"{seconds_text(row['ttft_floor_seconds'])} ({row['ttft_bound_by']})"),
)
_EFFECTS: tuple[Column, ...] = (
    ("what", lambda row: row["what"]),
    ("against", lambda row: row["base"]),
    ("unit", lambda row: row["unit"]),
    ("base", lambda row: f"{row['base_amount']:,.0f}"),
    ("with it", lambda row: f"{row['amount']:,.0f}"),
    ("times less", lambda row: f"{row['times_less']:.2f}"),
    ("fewer", lambda row: f"{row['fewer_percent']:.1f} %"),
)
_TIERS: tuple[Column, ...] = (
    ("tier", lambda row: row["name"]),
    ("codec", lambda row: row["codec"]),
    ("bytes", lambda row: bytes_text(row["capacity_bytes"])),
    ("requests held", lambda row: f"{row['requests_held']:,}"),
    ("fetch one", lambda row: seconds_text(row["fetch_seconds"])),
    ("compute it again, at best", lambda row: seconds_text(row["recompute_floor_seconds"])),
    ("cheaper", lambda row: row["cheaper"] or "not known"),
)
_TRAFFIC: tuple[Column, ...] = (
    ("setting", lambda row: row["name"]),
    ("blocks on the device", lambda row: f"{row['capacity_blocks']:,}"),
    ("hits", lambda row: f"{row['block_hit_ratio']:.2%}"),
    ("by tier", lambda row: ", ".join(f"{name} {ratio:.1%}" for name, ratio in row["hit_ratio_by_tier"].items())),
    ("token hits", lambda row: f"{row['token_hit_ratio']:.2%}"),
    ("mean TTFT", lambda row: seconds_text(row["ttft_seconds_mean"])),
    ("without a cache", lambda row: seconds_text(row["ttft_seconds_mean_without_cache"])),
    ("saved", lambda row: seconds_text(row["ttft_seconds_saved_mean"])),
)
TABLES = (
    ("Settings", "settings", _SETTINGS),
    ("Changes", "effects", _EFFECTS),
    ("Tiers", "tiers", _TIERS),
    ("Your trace", "traffic", _TRAFFIC),
)
"""(title, key of the document, columns): the console shows the same."""


_WORDS = ("what", "against", "unit", "by tier")  # columns of text, which may take several lines


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th class='{'words' if name in _WORDS else ''}'>{escape(name)}</th>" for name, _ in columns)
    opening = [(f"<td class='{'words' if name in _WORDS else ''}'>", cell) for name, cell in columns]
    lines = "".join(
        "<tr>" + "".join(f"{begin}{escape(cell(row))}</td>" for begin, cell in opening) + "</tr>" for row in rows
    )
    return f"<div class='scroll'><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>"
