"""`demo-report.html`: one page that explains the run to somebody who sees the project for the first time.

Made from the JSON report alone, so it can be made again from a kept one. No script, no network, no other file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from engine_adapter.demo.figures import BELOW, MEGA, count, figures_for, megabytes, percent, seconds, small
from engine_adapter.demo.settings import AMPLE, TIGHT, TIGHT_INT4
from kvstore.charts import Bar, Limit, Part, Series, area_chart, bar_chart, line_chart, plain
from kvstore.page import html_page

Report = Mapping[str, Any]
Setting = Mapping[str, Any]

_KINDS = {AMPLE: "ample", TIGHT: "tight", TIGHT_INT4: "int4"}
_TITLE = "A language model in a quarter of the memory"


def render(report: Report) -> str:
    """The whole page, HTML."""
    settings = {setting["name"]: setting for setting in report["settings"]}
    served = [settings[name] for name in (AMPLE, TIGHT, TIGHT_INT4)]
    body = "\n".join(
        [
            _introduction(report, settings),
            _tiles(settings),
            f"<h2>In pictures</h2><div class='grid wide'>{''.join(_timelines(served))}</div>",
            f"<div class='grid'>{''.join(_pictures(served))}</div>",
            f"<h2>What was promised, and what came out</h2>{_promises(report)}",
            f"<h2>All figures</h2>{_table(report)}",
            f"<h2>How it was measured</h2>{_method(report)}",
        ]
    )
    return html_page(_TITLE, body)


def _introduction(report: Report, settings: Mapping[str, Setting]) -> str:
    workload, ample, tight = report["workload"], settings[AMPLE], settings[TIGHT]
    shared = sum(workload["document_tokens_shared"].values())
    quick = "<p><b>This was a quick run: it shows that everything works, its figures prove little.</b></p>"
    return (
        f"<h1>{_TITLE}</h1>"
        f"<p>While a language model writes, it keeps <i>keys and values</i> (KV) of every token it has read: here "
        f"{count(workload['kv_token_bytes'])} bytes a token, so every open conversation holds memory. This page shows "
        f"{escape(report['model']['name'])} answering {count(ample['requests'])} requests of {workload['users']} users "
        f"at a time about {workload['documents']} shared documents ({count(shared)} tokens) and in longer chats, "
        f"three times: with all the memory it wants (<b>ample</b>, {megabytes(ample['peak_device_bytes'])} at the "
        f"peak), with a quarter of that (<b>tight</b>, {megabytes(tight['device_bytes_limit'])}, and "
        f"{megabytes(tight['host_bytes_limit'])} of host memory below), and with the same "
        f"quarter where blocks that have not been written to for a while are squeezed to 4 bits a number and read in "
        f"place (<b>tight-int4</b>).</p>" + (quick if report["quick"] else "") + _below(settings)
    )


def _below(settings: Mapping[str, Setting]) -> str:
    """That the tight settings had more below than the host's memory, and what was there when they began."""
    tight, int4 = settings[TIGHT], settings[TIGHT_INT4]
    if not _has_below(tight):
        return ""
    before = [count(setting["stored_tokens_before"]) for setting in (tight, int4)]
    return (
        "<p>In this run the tight settings also kept copies below the host's memory, on disk or on a server. Of their "
        f"first prompts {before[0]} tokens (tight) and {before[1]} (tight-int4) lay there when they began.</p>"
    )


def _tiles(settings: Mapping[str, Setting]) -> str:
    tight, int4 = settings[TIGHT], settings[TIGHT_INT4]
    resident = int4["tokens_resident_peak"] / tight["tokens_resident_peak"]
    tiles = (
        (f"{resident:.2f} times", "as many tokens kept in the same bytes with INT4 blocks"),
        _reading(tight, int4),
        (f"{count(tight['preemptions'])} to {count(int4['preemptions'])}", "interrupted requests, tight to tight-int4"),
        (percent(int4["agreement"]), "of the predicted words agree with ample's"),
    )
    shown = "".join(f'<div class="card tile"><b>{escape(figure)}</b><span>{escape(text)}</span></div>'
                    for figure, text in tiles)  # fmt: skip
    return f'<div class="tiles">{shown}</div>'


def _reading(tight: Setting, int4: Setting) -> tuple[str, str]:
    """What INT4 saved of the reading; where tiers below helped both settings, what came from those instead."""
    if not _has_below(tight):
        saved = 1 - int4["prefill_tokens_computed"] / tight["prefill_tokens_computed"]
        return percent(saved, 0), "of the reading saved compared with tight"
    found = [count(sum(setting["prefill_tokens_reused"].get(tier, 0) for tier in BELOW)) for setting in (tight, int4)]
    return (
        " and ".join(found),
        "prompt tokens came from below the host's memory, tight and tight-int4, so their reading is not compared",
    )


def _has_below(setting: Setting) -> bool:
    return any(tier in setting["prefill_tokens_reused"] for tier in BELOW)


def _promises(report: Report) -> str:
    marks = {True: ("yes", "held"), False: ("no", "FAILED"), None: ("skip", "not checked")}
    rows = []
    for promise in report["promises"]:
        kind, word = marks[promise["held"]]
        rows.append(
            f'<li><span class="mark {kind}">{word}</span><b>{escape(promise["name"])}.</b> {escape(promise["claim"])}'
            f'<br><span class="soft">Found: {escape(promise["found"])}</span></li>'
        )
    because = report.get("unchecked_because")
    why = f'<p class="soft">Not checked, since {escape(because)}.</p>' if because else ""
    return f'<div class="card">{why}<ul class="promises">{"".join(rows)}</ul></div>'


def _timelines(served: Sequence[Setting]) -> list[str]:
    int4 = served[2]
    timeline = int4["timeline"]
    limit = int4["device_bytes_limit"] / MEGA
    lines = [
        Series(s["name"], _KINDS[s["name"]], list(zip(s["timeline"]["seconds"], s["timeline"]["resident_tokens"],
                                                       strict=True)))
        for s in served
    ]  # fmt: skip
    areas = [
        Series(name, kind, [(x, y / MEGA) for x, y in zip(timeline["seconds"], timeline[key], strict=True)])
        for name, kind, key in (("full precision", "full", "full_bytes"), ("INT4", "int4", "int4_bytes"))
    ]
    return [
        _card(
            "Tokens whose KV is on the device",
            line_chart("Tokens resident over time", lines, "seconds", "tokens on the device"),
            "The more tokens stay, the less often a document has to be read again; tight and tight-int4 have the same "
            "number of bytes.",
        ),
        _card(
            "What fills the memory in tight-int4",
            area_chart(
                "Device bytes by precision over time in tight-int4",
                areas,
                "seconds",
                "MB on the device",
                limit=Limit(f"limit {limit:.0f} MB", limit),
            ),
            "A block is computed in full precision and squeezed to INT4 when it is 128 tokens old; attention reads "
            "both side by side.",
        ),
    ]


def _pictures(served: Sequence[Setting]) -> list[str]:
    return [
        _card(
            "Where prompt tokens came from",
            bar_chart(_prompt_bars(served), with_legend=True),
            "Computed tokens cost time; reused ones were still on the device or came back from the tier that is named.",
        ),
        _card(
            "Waiting for the first word (TTFT)",
            bar_chart(_latency_bars(served, "ttft_seconds")),
            "From sending a request to the first token of its answer: p50 is the middle request, p95 the slow end.",
        ),
        _card(
            "Waiting between words (ITL)",
            bar_chart(_latency_bars(served, "itl_seconds")),
            "Time between two tokens of an answer; the more users memory lets in at a time, the longer a step of them "
            "all takes.",
        ),
        _card(
            "Interrupted requests (preemptions)",
            bar_chart([_bar(s, s["preemptions"], count(s["preemptions"])) for s in served]),
            "When memory runs out, the newest request gives up its blocks, which are copied to the host, and goes on "
            "later.",
        ),
        _card(
            "Distance of the predictions from ample's (mean KL)",
            bar_chart([_bar(s, s["mean_kl"] or 0.0, small(s["mean_kl"])) for s in served]),
            "0 means the same probabilities for every word; tight shows what rounding in bf16 alone does, tight-int4 "
            "adds what INT4 costs.",
        ),
        _card(
            "Wasted memory",
            bar_chart([_bar(s, s["waste_fraction"], percent(s["waste_fraction"], 2)) for s in served]),
            "Share of the memory in use that holds nothing: unfilled ends of blocks and leftovers of extents.",
        ),
    ]  # fmt: skip


def _card(title: str, chart: str, meaning: str) -> str:
    return f'<figure class="card"><h3>{escape(title)}</h3>{chart}<figcaption>{escape(meaning)}</figcaption></figure>'


def _bar(setting: Setting, value: float, text: str) -> Bar:
    name = setting["name"]
    return Bar(name, [Part(name, _KINDS[name], value)], text)


def _prompt_bars(served: Sequence[Setting]) -> list[Bar]:
    kinds = {"device": "full", "host": "host", "disk": "tight", "remote": "int4"}
    tiers = [tier for tier in kinds if any(tier in setting["prefill_tokens_reused"] for setting in served)]
    bars = []
    for setting in served:
        reused, computed = setting["prefill_tokens_reused"], setting["prefill_tokens_computed"]
        parts = [Part(f"reused, {tier}", kinds[tier], reused.get(tier, 0)) for tier in tiers]
        bars.append(Bar(setting["name"], [Part("computed", "work", computed), *parts], f"{plain(computed)} computed"))
    return bars


def _latency_bars(served: Sequence[Setting], key: str) -> list[Bar]:
    return [
        Bar(f"{s['name']} {point}", [Part(point, _KINDS[s["name"]], s[key][point] or 0.0)], seconds(s[key][point]))
        for point in ("p50", "p95")
        for s in served
    ]


def _table(report: Report) -> str:
    settings = report["settings"]
    head = "".join(f"<th>{escape(s['name'])}<br><span class='soft'>{escape(s['dtype'])}</span></th>" for s in settings)
    rows = []
    for figure in figures_for(setting["prefill_tokens_reused"] for setting in settings):
        cells = "".join(f"<td>{escape(figure.text(_view(s)))}</td>" for s in settings)
        rows.append(f"<tr><th>{escape(figure.name.strip())}</th>{cells}"
                    f'<td class="meaning">{escape(figure.meaning)}</td></tr>')  # fmt: skip
    return (
        f'<div class="card scroll"><table><thead><tr><th></th>{head}<th></th></tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _method(report: Report) -> str:
    workload, machine, chat = report["workload"], report["machine"], report["multi_turn"]
    cold = report["cold_block"]
    return (
        '<div class="card">'
        "<p>The documents are pages of Python's own documentation; questions arrive in a fixed order in which the same "
        "document is often, not always, asked about again. A user sends the next request when the last one is "
        "answered. <b>exact-ample</b> and <b>exact-tight</b> run in float32 and are compared token for token with "
        "transformers' own <code>generate</code>.</p>"
        "<p><b>tight</b> and <b>tight-int4</b> are fed the tokens that <b>ample</b> put out (teacher forcing) through "
        "their own caches: all three therefore compute the same text, and their predictions can be compared at each of "
        f"the {count(workload['output_tokens_compared'])} output tokens. In bf16 a few first choices differ because "
        "the order of additions does, which is why tight does not agree everywhere either.</p>"
        f"<p>A block of 16 tokens takes {count(cold['full_bytes'])} bytes, squeezed {count(cold['cold_bytes'])} "
        f"({percent(cold['share'])}). A run of {count(chat['requests'])} turns of conversation alone, in tight-int4's "
        f"memory, wasted {percent(chat['waste_fraction'], 2)}.</p>"
        f'<p class="note">{escape(machine["processor"])}, {machine["cores"]} cores, {machine["threads"]} threads; '
        f"Python {escape(machine['python'])}, torch {escape(machine['torch'])}, transformers "
        f"{escape(machine['transformers'])}; {seconds(report['wall_seconds'])} in all, "
        f"{seconds(report['cpu_seconds'])} of processor time. Model weights SHA-256 "
        f"<code>{escape(report['model']['weights_sha256'])}</code>.</p>"
        "</div>"
    )


class _View:
    """A setting of the JSON report with the attributes of a `SettingReport`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __getattr__(self, name: str) -> Any:
        return self._setting[name]


def _view(setting: Setting) -> Any:
    return _View(setting)
