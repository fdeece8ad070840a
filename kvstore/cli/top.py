"""`kvstore top`: the daemon's page in a terminal, drawn anew every few seconds until Ctrl-C. No torch."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
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
_WIDE, _NARROW = 100, 72  # columns of the terminal
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


class _Picture:
    """As wide and high as the terminal is when it is drawn: columns that do not fit are left out, rows counted."""

    def __init__(self, stats: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        self._stats, self._samples = stats, samples

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stats, width = self._stats, options.max_width
        height = console.height if console.is_alt_screen else None
        head = _head(stats, self._samples)
        refused = _refused(stats, width)
        fixed = len(console.render_lines(head, options.update(height=None))) + len(stats["tiers"]) + 3
        fixed += refused is not None
        tables = [_pins(stats, width), _tenants(stats), _prefixes(stats, width)]
        tables = [table for table in tables if table.rows]
        room = None if height is None else height - fixed - len(tables)  # a line of heads each
        shown = _shares([len(table.rows) for table in tables], room)
        gaps = room is None or room - sum(shown) >= len(tables) + 1
        yield head
        yield _tiers(stats, width)
        if gaps:
            yield ""
        yield _classes(stats)
        yield _misses(stats)
        if refused is not None:
            yield refused
        for table, count in zip(tables, shown, strict=True):
            if gaps:
                yield ""
            yield table.drawn(count)


def drawn(stats: dict[str, Any], samples: list[dict[str, Any]]) -> RenderableType:
    """One picture. samples: oldest first, the newest at the end."""
    return _Picture(stats, samples)


def _shares(wanted: list[int], room: int | None) -> list[int]:
    """Rows for each table: at most as many as it has and _SHOWN, and together no more than there are, alike."""
    shares = [0] * len(wanted)
    left = sum(wanted) if room is None else max(0, room)
    while left > 0 and (open_ := [at for at, most in enumerate(wanted) if shares[at] < min(most, _SHOWN)]):
        for at in open_[:left]:
            shares[at] += 1
        left -= len(open_)
    return shares


def _head(stats: dict[str, Any], samples: list[dict[str, Any]]) -> RenderableType:
    lookups = stats["lookups"]
    ratios = [
        100 * (sum(new["hit_blocks"].values()) - sum(old["hit_blocks"].values())) / asked if asked > 0 else 0.0
        for old, new in pairwise(samples)
        if (asked := new["asked_blocks"] - old["asked_blocks"]) >= 0
    ]
    state = "[bold green]ready[/]" if stats["ready"] else "[bold red]not ready[/]"
    every = [stats["counts"], *(one.get("counts", {}) for one in stats["tiers"].values())]
    corrupt = sum(count for some in every for cause, count in some.items() if cause.startswith("corrupt_"))
    ratio = _ratio(sum(lookups["hit_blocks"].values()), lookups["asked_blocks"])
    hits = f"hits [bold]{ratio}[/] since start" if lookups["asked_blocks"] else "no lookups yet"
    lines = [
        f"{state}  process {stats['pid']}  up {stats['uptime_seconds']:.0f} s  {stats['connections']} clients",
        f"{hits}  [cyan]{_spark(ratios, 100)}[/]  {_rate(samples, lambda one: one['lookups']):.0f} lookups/s",
        f"read {size_text(_rate(samples, lambda one: one['moved_bytes']['read']))}/s  "
        f"stored {size_text(_rate(samples, lambda one: one['moved_bytes']['stored']))}/s  "
        f"TTFT saved {lookups['saved_prefill_seconds']:.1f} s ({lookups['reused_tokens']} tokens)",
    ]
    wrong = {"shared memory": corrupt} | {
        name: sum(one.get("damaged_copies", {}).values()) for name, one in stats["tiers"].items()
    }
    if any(wrong.values()):
        places = ", ".join(f"{escape(name)} {count}" for name, count in wrong.items() if count)
        lines.append(f"[bold red]wrong copies were caught: {places}[/]")
    for name, one in stats["tiers"].items():
        if dropped := one.get("index_dropped"):
            lines.append(f"[bold yellow]{escape(name)} began anew, empty: {escape(', '.join(dropped))}[/]")
    if stats["leases"]["quarantined_slots"]:
        lines.append(f"[bold yellow]{stats['leases']['quarantined_slots']} slots quarantined[/]")
    return Panel(Text.from_markup("\n".join(lines)), title="kvstore", title_align="left")


class _Rows:
    """A table. Its first column is for names: it gives way when all are too wide, the others are never cut."""

    def __init__(self, *heads: str) -> None:
        self.heads = heads
        self.rows: list[tuple[RenderableType, ...]] = []

    def add(self, name: str, *cells: RenderableType) -> None:
        self.rows.append((Text(name, no_wrap=True, overflow="ellipsis"), *cells))

    def drawn(self, count: int) -> Table:
        """The first rows; how many more there are is said at the head."""
        table = Table(box=None, padding=(0, 1), header_style="dim", pad_edge=True)
        more = len(self.rows) - count
        for at, head in enumerate(self.heads):
            told = f"{head} +{more}" if more and not at else head
            table.add_column(Text(told, no_wrap=True), no_wrap=at > 0, justify="right" if at else "left")
        for row in self.rows[:count]:
            table.add_row(*row)
        return table


def _tiers(stats: dict[str, Any], width: int) -> Table:
    has_bars, has_moved = width >= _WIDE, width >= _NARROW
    heads = ["tier", "health", "used", "budget", *([""] if has_bars else []), "queued ↓/↑"]
    rows = _Rows(*heads, *(["moved ↓/↑"] if has_moved else []), "dropped")
    for name, one in stats["tiers"].items():
        counts, queues, limit = one.get("counts", {}), one.get("queues", {}), one["capacity_bytes"]
        full = min(limit, one["used_bytes"])
        bar = ProgressBar(total=limit, completed=full, width=16) if limit else ""
        moved = [size_text(counts.get(f"{kind}_bytes", 0)) for kind in ("spilled", "fetched")]
        rows.add(
            name,
            "[green]up[/]" if one["state"] == "ok" else f"[bold red]{escape(one['state'])}[/]",
            size_text(one["used_bytes"]),
            size_text(limit) if limit else "-",
            *([bar] if has_bars else []),
            f"{queues['spill']}/{queues['fetch']}" if queues else "-",
            *(["/".join(moved) if queues else "-"] if has_moved else []),
            str(counts.get("spills_dropped", 0)) if queues else "-",
        )
    return rows.drawn(len(rows.rows))


def _classes(stats: dict[str, Any]) -> Text:
    sizes = sample(stats)["codec_bytes"]
    return _line("by class", [f"{name} {size_text(size)}" for name, size in sizes.items()])


def _misses(stats: dict[str, Any]) -> Text:
    causes = sorted(stats["lookups"]["missed_blocks"].items(), key=lambda pair: -pair[1])
    return _line("misses", [f"{cause} {blocks}" for cause, blocks in causes])


def _refused(stats: dict[str, Any], width: int) -> Text | None:
    """Since start, what there is most of first; what does not fit is counted."""
    causes = sorted(stats.get("refused", {}).items(), key=lambda pair: -pair[1])
    if not causes:
        return None
    words = [f"{cause} {count}" for cause, count in causes]
    line = _line("refused", words)
    while line.cell_len > width and len(words) > 1:
        words.pop()
        line = _line("refused", [*words, f"+{len(causes) - len(words)} more"])
    return line


def _line(head: str, words: list[str]) -> Text:
    return Text(f" {head:<8}  {'  '.join(words) or 'none'}", no_wrap=True, overflow="ellipsis")


def _pins(stats: dict[str, Any], width: int) -> _Rows:
    is_wide = width >= _NARROW
    rows = _Rows("pin", *(["root"] if is_wide else []), "first block", "copies", "bytes", "left")
    for one in stats["pins"]:
        where = [one["root"], one["block"]] if is_wide else [one["block"]]
        rows.add(
            one["name"], *where, str(one["copies"]), size_text(one["pinned_bytes"]), f"{one['seconds_left']:.0f} s"
        )
    return rows


def _tenants(stats: dict[str, Any]) -> _Rows:
    rows = _Rows("tenant", "used", "quota", "hits", "refused")
    for name, one in sorted(stats["tenants"].items(), key=lambda pair: -pair[1]["used_bytes"]):
        counts = one["counts"]
        hits = counts.get("hit_blocks", 0)
        rows.add(
            name or "(unnamed)",
            size_text(one["used_bytes"]),
            size_text(one["quota_bytes"]) if one["quota_bytes"] else "none",
            _ratio(hits, hits + counts.get("missed_blocks", 0)),
            str(counts.get("quota_refused", 0)),
        )
    return rows


def _prefixes(stats: dict[str, Any], width: int) -> _Rows:
    is_wide = width >= _NARROW
    rows = _Rows("prefix", *(["root"] if is_wide else []), "first block", "lookups", "blocks", "longest")
    for one in stats["prefixes"]:
        where = [one["root"], one["block"]] if is_wide else [one["block"]]
        figures = (str(one["lookups"]), str(one["hit_blocks"]), f"{one['longest_tokens']} tokens")
        rows.add(one["tenant"] or "(unnamed)", *where, *figures)
    return rows


def _ratio(hits: int, asked: int) -> str:
    return f"{100 * hits / asked:.1f} %" if asked else "-"


def _rate(samples: list[dict[str, Any]], pick: Any) -> float:
    """A second, over the newest ten samples."""
    few = samples[-10:]
    seconds = few[-1]["time_seconds"] - few[0]["time_seconds"] if few else 0
    return max(0.0, (pick(few[-1]) - pick(few[0])) / seconds) if seconds > 0 else 0.0


def _spark(values: list[float], most: float) -> str:
    return "".join(_SPARKS[min(len(_SPARKS) - 1, int(value / most * len(_SPARKS)))] for value in values[-30:])
