"""`kvstore top`: the daemon's page in a terminal, drawn anew every few seconds until Ctrl-C. No torch."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from allocator.errors import ConfigError, TierError
from kvstore.cli.daemon_http import DEFAULT_URL, DaemonHttp
from kvstore.cli.stats import TOKEN_HELP, URL_HELP, size_text
from kvstore.daemon.http_history import sample

_SPARKS = "▁▂▃▄▅▆▇█"
_SHOWN = 12
_KEPT = 60


def top(
    url: Annotated[str, typer.Option(metavar="URL", help=URL_HELP)] = DEFAULT_URL,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help=TOKEN_HELP)] = None,
    seconds: Annotated[float, typer.Option(min=0.2, max=3600, help="Between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Draw one picture and end.")] = False,
) -> None:
    """Watch a running daemon: memory, hits, misses by cause, queues, tenants, prefixes.

    Exit codes: 0 ended by Ctrl-C, 1 no daemon answers at the start, 2 bad usage.
    """
    try:
        daemon = DaemonHttp(url, token_file)
        samples = daemon.get("/v1/history")[-_KEPT:]
        picture = drawn(daemon.get("/v1/stats"), samples)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    except TierError as error:
        print(f"kvstore top: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    console = Console()
    if once:
        console.print(picture)
        return
    with Live(picture, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(seconds)
                live.update(_next_picture(daemon, samples), refresh=True)
        except KeyboardInterrupt:
            return


def _next_picture(daemon: DaemonHttp, samples: list[dict[str, Any]]) -> RenderableType:
    try:
        stats = daemon.get("/v1/stats")
    except TierError as error:
        return Panel(Text(str(error), style="bold red"), title="no answer")
    if samples and stats["lookups"]["asked_blocks"] < samples[-1]["asked_blocks"]:
        samples.clear()  # another daemon: its counts begin anew
    samples.append(sample(stats))
    del samples[:-_KEPT]
    return drawn(stats, samples)


def drawn(stats: dict[str, Any], samples: list[dict[str, Any]]) -> RenderableType:
    """One picture. samples: oldest first, the newest at the end."""
    return Group(
        _head(stats, samples), _tiers(stats), _classes(stats), _misses(stats), _tenants(stats), _prefixes(stats)
    )


def _head(stats: dict[str, Any], samples: list[dict[str, Any]]) -> RenderableType:
    lookups = stats["lookups"]
    ratios = [
        100 * (sum(new["hit_blocks"].values()) - sum(old["hit_blocks"].values())) / asked if asked > 0 else 0.0
        for old, new in pairwise(samples)
        if (asked := new["asked_blocks"] - old["asked_blocks"]) >= 0
    ]
    state = "[bold green]ready[/]" if stats["ready"] else "[bold red]not ready[/]"
    corrupt = sum(count for cause, count in stats["counts"].items() if cause.startswith("corrupt_"))
    lines = [
        f"{state}  process {stats['pid']}  up {stats['uptime_seconds']:.0f} s  {stats['connections']} clients",
        f"hits [bold]{_ratio(sum(lookups['hit_blocks'].values()), lookups['asked_blocks'])}[/] since start  "
        f"[cyan]{_spark(ratios, 100)}[/]  {_rate(samples, lambda one: one['lookups']):.0f} lookups/s",
        f"read {size_text(_rate(samples, lambda one: one['moved_bytes']['read']))}/s  "
        f"stored {size_text(_rate(samples, lambda one: one['moved_bytes']['stored']))}/s  "
        f"TTFT saved {lookups['saved_prefill_seconds']:.1f} s ({lookups['reused_tokens']} tokens)",
    ]
    if corrupt:
        lines.append(f"[bold red]{corrupt} copies with wrong bytes were caught[/]")
    if stats["leases"]["quarantined_slots"]:
        lines.append(f"[bold yellow]{stats['leases']['quarantined_slots']} slots quarantined[/]")
    return Panel(Text.from_markup("\n".join(lines)), title="kvstore", title_align="left")


def _tiers(stats: dict[str, Any]) -> Table:
    table = _table("tier", "health", "used", "budget", "", "queued down/up", "moved down/up", "dropped")
    for name, one in stats["tiers"].items():
        counts, queues, limit = one.get("counts", {}), one.get("queues", {}), one["capacity_bytes"]
        ok = one["state"] == "ok"
        table.add_row(
            escape(name),
            "[green]up[/]" if ok else f"[bold red]{escape(one['state'])}[/]",
            size_text(one["used_bytes"]),
            size_text(limit) if limit else "-",
            ProgressBar(total=limit, completed=min(limit, one["used_bytes"]), width=16) if limit else "",
            f"{queues['spill']}/{queues['fetch']}" if queues else "-",
            f"{size_text(counts.get('spilled_bytes', 0))}/{size_text(counts.get('fetched_bytes', 0))}"
            if queues
            else "-",
            str(counts.get("spills_dropped", 0)) if queues else "-",
        )
    return table


def _classes(stats: dict[str, Any]) -> Text:
    sizes = sample(stats)["codec_bytes"]
    return Text(" by class   " + ("  ".join(f"{name} {size_text(size)}" for name, size in sizes.items()) or "none"))


def _misses(stats: dict[str, Any]) -> Text:
    causes = sorted(stats["lookups"]["missed_blocks"].items(), key=lambda pair: -pair[1])
    return Text(" misses     " + ("  ".join(f"{cause} {blocks}" for cause, blocks in causes) or "none"))


def _tenants(stats: dict[str, Any]) -> Table:
    table = _table("tenant", "used", "quota", "hits", "refused")
    for name, one in sorted(stats["tenants"].items(), key=lambda pair: -pair[1]["used_bytes"])[:_SHOWN]:
        counts = one["counts"]
        hits = counts.get("hit_blocks", 0)
        table.add_row(
            escape(name) or "(unnamed)",
            size_text(one["used_bytes"]),
            size_text(one["quota_bytes"]) if one["quota_bytes"] else "none",
            _ratio(hits, hits + counts.get("missed_blocks", 0)),
            str(counts.get("quota_refused", 0)),
        )
    return table


def _prefixes(stats: dict[str, Any]) -> Table:
    table = _table("root", "first block", "tenant", "lookups", "blocks reused", "longest")
    for one in stats["prefixes"][:_SHOWN]:
        words = (one["root"], one["block"], escape(one["tenant"]) or "(unnamed)")
        table.add_row(*words, str(one["lookups"]), str(one["hit_blocks"]), f"{one['longest_tokens']} tokens")
    return table


def _table(*heads: str) -> Table:
    table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


def _ratio(hits: int, asked: int) -> str:
    return f"{100 * hits / asked:.1f} %" if asked else "-"


def _rate(samples: list[dict[str, Any]], pick: Any) -> float:
    """A second, over the newest ten samples."""
    few = samples[-10:]
    seconds = few[-1]["time_seconds"] - few[0]["time_seconds"] if few else 0
    return max(0.0, (pick(few[-1]) - pick(few[0])) / seconds) if seconds > 0 else 0.0


def _spark(values: list[float], most: float) -> str:
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(value / most * len(_SPARKS)))] for value in values[-30:])
