"""Which figures the demo shows, how each is written, and what it means to somebody who sees the project first.

One list for console and page, so that both say the same. Pure functions over reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_adapter.demo.measure import SettingReport

NONE = "\u2013"
BELOW = ("disk", "remote")
"""Tiers that outlive the process."""
MEGA = 1_000_000


@dataclass(frozen=True, slots=True)
class Figure:
    """A row of the table: a short name, how to read it from a report, one sentence about it."""

    name: str
    text: Callable[[SettingReport], str]
    meaning: str


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def megabytes(value: float | None) -> str:
    return NONE if value is None else f"{value / MEGA:.1f} MB"


def percent(value: float | None, digits: int = 1) -> str:
    return NONE if value is None else f"{value:.{digits}%}"


def small(value: float | None) -> str:
    return NONE if value is None else f"{value:.4f}"


FIGURES = (
    Figure("requests", lambda r: count(r.requests), "Prompts answered."),
    Figure(
        "memory limit",
        lambda r: megabytes(r.device_bytes_limit),
        "Bytes that the device may use for keys and values (KV), the model's memory of the text so far. ample has more "
        "than it needs.",
    ),
    Figure(
        "peak on the device",
        lambda r: megabytes(r.peak_device_bytes),
        "Most device bytes of all blocks; the limit of the tight settings is a quarter of ample's.",
    ),
    Figure(
        "prefill computed",
        lambda r: count(r.prefill_tokens_computed),
        "Prompt tokens that the model had to read; the fewer, the less work.",
    ),
    Figure(
        "  of these again",
        lambda r: count(r.prefill_tokens_recomputed),
        "Tokens of interrupted requests that were read a second time because their KV was lost.",
    ),
    Figure(
        "reused from device",
        lambda r: count(r.prefill_tokens_reused.get("device", 0)),
        "Prompt tokens that were not read because their KV still lay on the device.",
    ),
    Figure(
        "reused from host",
        lambda r: count(r.prefill_tokens_reused.get("host", 0)),
        "Prompt tokens whose KV came back from the host's memory.",
    ),
    Figure(
        "tokens resident, peak",
        lambda r: count(r.tokens_resident_peak),
        "Most tokens whose KV lay on the device at one time.",
    ),
    Figure("peak full precision", lambda r: megabytes(r.peak_bytes["full"]), "Most device bytes of unsqueezed blocks."),
    Figure("peak INT4", lambda r: megabytes(r.peak_bytes["int4"]), "Most device bytes of blocks squeezed to 4 bits."),
    Figure("peak host", lambda r: megabytes(r.peak_bytes["host"]), "Most bytes of copies in the host's memory."),
    Figure(
        "TTFT p50",
        lambda r: seconds(r.ttft_seconds["p50"]),
        "Time to first token: half of the requests waited no longer for their answer to begin.",
    ),
    Figure("TTFT p95", lambda r: seconds(r.ttft_seconds["p95"]), "95 of 100 requests waited no longer than this."),
    Figure("ITL p50", lambda r: seconds(r.itl_seconds["p50"]), "Time between two tokens of an answer, the usual case."),
    Figure("ITL p95", lambda r: seconds(r.itl_seconds["p95"]), "Time between two tokens, the slow case."),
    Figure(
        "preemptions",
        lambda r: count(r.preemptions),
        "How often a running request had to give up its memory for an older one.",
    ),
    Figure("evictions", lambda r: count(r.evictions), "Blocks of 16 tokens dropped from the device to make room."),
    Figure("waste", lambda r: percent(r.waste_fraction, 2), "Share of the memory in use that holds nothing useful."),
    Figure(
        "agreement",
        lambda r: percent(r.agreement),
        "Share of output tokens where the model's first choice is the reference's.",
    ),
    Figure(
        "mean KL",
        lambda r: small(r.mean_kl),
        "How far the predictions are from those of ample, in nats; 0 is no difference.",
    ),
    Figure(
        "tokens a second",
        lambda r: f"{r.output_tokens_per_second:.1f}",
        "Output tokens over the time of the whole setting, reading of prompts included.",
    ),
    Figure("time", lambda r: seconds(r.wall_seconds), "Wall time of the whole setting."),
)

_BELOW = (
    Figure("reused from disk", lambda r: count(r.prefill_tokens_reused.get("disk")), "Prompt tokens whose KV came from "
           "the directory, from this start or one before."),
    Figure("reused from remote", lambda r: count(r.prefill_tokens_reused.get("remote")), "Prompt tokens whose KV came "
           "from the server, from this start or one before."),
)  # fmt: skip


def figures_for(reused: Iterable[Mapping[str, int]]) -> tuple[Figure, ...]:
    """The rows for reports with these tokens reused by tier: tiers below only where some report has them."""
    tiers = {tier for one in reused for tier in one}
    shown = [figure for figure in _BELOW if figure.name.rpartition(" ")[2] in tiers]
    place = 1 + next(place for place, figure in enumerate(FIGURES) if figure.name == "reused from host")
    return (*FIGURES[:place], *shown, *FIGURES[place:])
