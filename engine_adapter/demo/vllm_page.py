"""`demo-vllm.html`: one page about a run of `python -m engine_adapter.demo.vllm`, from its JSON report alone."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from engine_adapter.demo.figures import count, seconds
from kvstore.charts import Bar, Part, bar_chart
from kvstore.page import html_page

Report = Mapping[str, Any]
_TITLE = "vLLM with and without the store below it"


def render(report: Report) -> str:
    """The whole page, HTML."""
    body = "\n".join(
        [
            _introduction(report),
            _tiles(report),
            f"<h2>In pictures</h2><div class='grid wide'>{_waits(report)}{_costs(report)}</div>",
            f"<h2>All figures</h2>{_table(report)}",
            f"<h2>How it was measured</h2>{_method(report)}",
        ]
    )
    return html_page(_TITLE, body)


def _introduction(report: Report) -> str:
    held = all(one["answers_equal"] and one["all_loaded"] for one in report["tiers"])
    verdict = "and the answers are the same tokens" if held else "<b>but not all did, or answers differ: see below</b>"
    return (
        f"<h1>{_TITLE}</h1><p>vLLM {escape(report['vllm'])} reads {escape(report['model'])} prompts that share their "
        f"first {count(report['prefix_tokens'])} tokens. The first time it computes them (<b>cold</b>). When its own "
        "prefix cache has dropped them, or in another process, it would compute them again; with the connector they "
        f"come back from a tier (<b>warm</b>), {verdict}.</p>"
    )


def _tiles(report: Report) -> str:
    shown = "".join(
        f'<div class="card tile"><b>{1 / one["warm_over_cold"]:.0f} times sooner</b><span>first token from '
        f"{escape(one['tier'])} ({one['warm_over_cold']:.3f} of cold, asked for: {one['bar']:.2f})</span></div>"
        for one in report["tiers"]
    )
    return f'<div class="tiles">{shown}</div>'


def _waits(report: Report) -> str:
    bars = [Bar("cold, without the connector", [Part("cold", "work", _cold(report))], seconds(_cold(report)))]
    for one in report["tiers"]:
        warm = one["warm_ttft_seconds"]
        bars.append(Bar(f"warm from {one['tier']}", [Part("warm", "int4", warm)], seconds(warm)))
    own = min(one["own_cache_ttft_seconds"] for one in report["tiers"])
    bars.append(Bar("still in vLLM's own cache", [Part("own", "full", own)], seconds(own)))
    return _card(
        "Waiting for the first token (TTFT)",
        bar_chart(bars),
        "Medians; every warm figure was taken in turn with its own cold one, of which the table has each.",
    )


def _costs(report: Report) -> str:
    bars = []
    for one in report["tiers"]:
        cold, storing = one["cold_ttft_seconds"], one["storing_ttft_seconds"]
        bars.append(Bar(f"{one['tier']}: without", [Part("without", "ample", cold)], seconds(cold)))
        bars.append(Bar(f"{one['tier']}: with", [Part("with", "tight", storing)], seconds(storing)))
    return _card(
        "What storing costs a cold prompt (TTFT)",
        bar_chart(bars),
        "The same prompt without the connector and with it, in turn: looked for, computed, copied out of vLLM's "
        "pages and written behind that.",
    )


def _cold(report: Report) -> float:
    return float(min(one["cold_ttft_seconds"] for one in report["tiers"]))


def _card(title: str, chart: str, meaning: str) -> str:
    return f'<figure class="card"><h3>{escape(title)}</h3>{chart}<figcaption>{escape(meaning)}</figcaption></figure>'


def _table(report: Report) -> str:
    is_missed = any(one["miss_ttft_seconds"] for one in report["tiers"])  # measured with --misses only
    first = {"cold": "cold", "storing": "storing", "miss": "a miss", "own_cache": "own cache", "warm": "warm"}
    shown = {key: name for key, name in first.items() if key != "miss" or is_missed}
    names = ("answers", *shown.values(), "warm / cold", "asked for", "ITL without", "ITL with")
    head = "".join(f"<th>{name}</th>" for name in ("tier", *names))
    rows = []
    for one in report["tiers"]:
        cells = ["equal" if one["answers_equal"] and one["all_loaded"] else "DIFFER OR NOT LOADED"]
        cells += [seconds(one[f"{key}_ttft_seconds"]) for key in shown]
        cells += [f"{one['warm_over_cold']:.3f}", f"{one['bar']:.2f}"]
        cells += [seconds(one["itl_plain_seconds"]), seconds(one["itl_tier_seconds"])]
        rows.append(f"<tr><th>{escape(one['tier'])}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    rows += [f"<tr><th>{escape(name)}</th><td colspan='{len(names)}'>left out: {escape(problem)}</td></tr>"
             for name, problem in report["left_out"].items()]  # fmt: skip
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _method(report: Report) -> str:
    machine = report["machine"]
    rounds = max((len(one["rounds"]) for one in report["tiers"]), default=0)
    return (
        '<div class="card"><p>One engine without the connector and one with it over the tier, both alive, one at work '
        f"at a time; {rounds} prefixes a tier, each read cold by both in turn, then asked about a second time after "
        "vLLM's own prefix cache was emptied. Greedy tokens of all are compared. Float32, one request at a time.</p>"
        f'<p class="note">{escape(machine["processor"])}, {machine["cores"]} cores; Python '
        f"{escape(machine['python'])}, torch {escape(machine['torch'])}, vLLM {escape(report['vllm'])}; "
        f"{report['wall_seconds']:,.0f} s in all.</p></div>"
    )
