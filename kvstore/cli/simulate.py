"""`kvstore simulate`: what a capacity, a policy or a codec would bring on a trace, before it is bought."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allocator import ConfigError
from kvstore.cli import json_target
from kvstore.config import size_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.simulation import Row, Setting, Trace

_WORKLOAD_REQUESTS = 10_000
_COLUMNS = (
    "policy", "capacity", "blocks", "codec", "hosts", "hits", "device", "host", "remote", "token hits", "evictions",
    "moved GB", "TTFT", "saved h", "saved $", "tiers $",
)  # fmt: skip
_TIER_COLUMNS = (
    "policy", "blocks", "codec", "hosts", "tier", "GB", "hits", "written GB", "read GB", "evictions", "saved h",
    "cost $",
)  # fmt: skip
_KEY_COLUMNS = 5  # of both tables: what a row is about
_TIER_SIZE = re.compile(r"(host|remote)=([0-9]+)(?:@(.+))?")

_Trace = Annotated[Path | None, typer.Option(help="Requests to replay.", metavar="FILE")]
_Form = Annotated[str | None, typer.Option("--format", help="mooncake, bailian or kvstore; else told by itself.")]
_Workload = Annotated[
    str | None, typer.Option(help="Instead of a trace: system-prompt, multi-turn, rag, agent, mixture.")
]
_Requests = Annotated[
    int | None, typer.Option(help="Of a workload, 10,000 when not given; of a trace the first so many, else all.")
]
_Seed = Annotated[int, typer.Option(help="Of a workload and of random routing.")]
_BlockTokens = Annotated[int | None, typer.Option(help="Tokens of a block; else what the format has.")]
_Policy = Annotated[
    str, typer.Option(help="lru, lru-2, s3-fifo, arc, w-tinylfu, default, belady; several with commas.")
]
_CapacityPercent = Annotated[
    str | None, typer.Option(help="Of a device, in % of the unique blocks (default 1,2,5,10,25,50).")
]
_CapacityBlocks = Annotated[str | None, typer.Option(help="The same in raw blocks.")]
_Codec = Annotated[str, typer.Option(help="raw, int4: an int4 device holds more blocks in the same bytes.")]
_Hosts = Annotated[str, typer.Option(help="How many, up to 1,000; each has the capacity.")]
_Routing = Annotated[str, typer.Option(help="random, session, prefix.")]
_Tiers = Annotated[
    str | None,
    typer.Option(help="Room below, and bytes a second: host=BLOCKS@20GB,remote=BLOCKS@2GB; host is each host's."),
]
_TierDollars = Annotated[
    str | None, typer.Option(help="What a GiB of a tier costs an hour (default host=0.005,remote=0.017).")
]
_Admission = Annotated[str, typer.Option(help="What enters remote: reuse, everything (a store's spill_policy).")]
_FetchDeadline = Annotated[float, typer.Option(help="Seconds after which a fetch is given up and computed.")]
_TenantPercent = Annotated[float, typer.Option(help="Most of a device for one tenant's blocks, in %; 0: no quota.")]
_Price = Annotated[str, typer.Option(help="uniform, or cost: what losing a block costs weighs its hits.")]
_BytesPerToken = Annotated[int, typer.Option(help="Of raw KV, all layers.")]
_PrefillRate = Annotated[float, typer.Option(help="Tokens a second of a short prompt's prefill.")]
_GpuDollarsPerHour = Annotated[float, typer.Option(help="To tell what the saved time costs.")]
_Jobs = Annotated[int | None, typer.Option(help="Processes; else one a core.")]
_Html = Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with a chart and Belady's bound.")]
_JsonFile = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows; - is standard output.")]


def simulate(  # noqa: PLR0913 - the options of a command
    trace: _Trace = None,
    form: _Form = None,
    workload: _Workload = None,
    requests: _Requests = None,
    seed: _Seed = 0,
    block_tokens: _BlockTokens = None,
    policy: _Policy = "lru,default",
    capacity_percent: _CapacityPercent = None,
    capacity_blocks: _CapacityBlocks = None,
    codec: _Codec = "raw",
    hosts: _Hosts = "1",
    routing: _Routing = "random",
    tiers: _Tiers = None,
    tier_dollars: _TierDollars = None,
    admission: _Admission = "reuse",
    fetch_deadline: _FetchDeadline = 1.0,
    tenant_percent: _TenantPercent = 0.0,
    price: _Price = "cost",
    bytes_per_token: _BytesPerToken = 131_072,
    prefill_rate: _PrefillRate = 8_000.0,
    gpu_dollars_per_hour: _GpuDollarsPerHour = 2.5,
    jobs: _Jobs = None,
    html: _Html = None,
    json_file: _JsonFile = None,
) -> None:
    """Replay requests through the real block pool, and with tiers through the real store: hit ratios, bytes moved,
    time to first token saved, cost.

    Deterministic: the same trace, settings and seed give the same rows.
    """
    from kvstore.simulation import BOUND, Costs
    from kvstore.simulation.running import run

    for name, target in (("--json", json_file), ("--html", html)):
        if target is not None and (problem := json_target.cannot_write(target)):
            raise typer.BadParameter(problem, param_hint=name)
    try:
        if jobs is not None and jobs < 1:
            raise ConfigError(f"jobs: got {jobs}; expected 1 or more")
        if form is not None and trace is None:
            raise ConfigError(f"format: got {form!r} without --trace; a workload has none")
        below, speeds = _tiers(tiers)
        costs = Costs(
            bytes_per_token=bytes_per_token,
            prefill_tokens_per_second=prefill_rate,
            gpu_dollars_per_hour=gpu_dollars_per_hour,
            **speeds,
            **_prices(tier_dollars),
        )
        capacities, policies = _capacities(capacity_percent, capacity_blocks), _some("--policy", policy)
        if html is not None and BOUND not in policies and hosts == "1" and not any(below.values()):
            policies.append(BOUND)
        fixed = {
            "seed": seed,
            "price": price,
            "admission": admission,
            "fetch_deadline_seconds": fetch_deadline,
            "tenant_percent": tenant_percent,
            "costs": costs,
            **below,
        }
        codecs, routings = _some("--codec", codec), _some("--routing", routing)
        settings = _settings(fixed, codecs, _numbers("--hosts", hosts, int), routings, policies, capacities)
        replayed = _trace(trace, form, workload, requests, seed, block_tokens)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    with progress_bar(len(settings) * len(replayed)) as progress:
        rows = run(replayed, settings, jobs, progress)
    _report(replayed, rows, html, json_file)


def _settings(
    fixed: dict[str, Any],
    codecs: list[str],
    hosts: list[int],
    routings: list[str],
    policies: list[str],
    capacities: list[dict[str, Any]],
) -> list[Setting]:
    """One a combination; with one host there is nothing to route."""
    from kvstore.simulation import Setting

    return [
        Setting(policy=one, codec=form, hosts=count, routing=way, **capacity, **fixed)
        for form, count, way, one, capacity in product(codecs, hosts, routings, policies, capacities)
        if count > 1 or way == routings[0]
    ]


def _report(trace: Trace, rows: Sequence[Row], html: str | None, json_file: str | None) -> None:
    cells = [_cells(row) for row in rows]
    if html is not None:
        from kvstore.simulation.chart import page

        text = page(rows, [(_COLUMNS, cells), *_tier_tables(rows)])
        sys.stdout.write(text) if html == "-" else Path(html).write_text(text, encoding="utf-8")
    if json_file is not None:
        described = {
            "name": trace.name,
            "requests": len(trace),
            "blocks": trace.block_count,
            "unique_blocks": trace.unique_count,
            "block_tokens": trace.block_tokens,
        }
        json_target.write(json_file, {"trace": described, "rows": [asdict(row) for row in rows]})
    if "-" not in (html, json_file):
        _print(trace, rows, cells)


def _print(trace: Trace, rows: Sequence[Row], cells: Sequence[Sequence[str]]) -> None:
    typer.echo(
        f"{trace.name}: {len(trace):,} requests, {trace.block_count:,} blocks of {trace.block_tokens} tokens, "
        f"{trace.unique_count:,} of them unique"
    )
    for columns, lines in [(_COLUMNS, cells), *_tier_tables(rows)]:
        table = [columns, *lines]
        widths = [max(len(row[column]) for row in table) for column in range(len(columns))]
        room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for number, shown in enumerate(_folded(table, widths, room)):
            if number or columns is not _COLUMNS:
                typer.echo()
            for row in table:
                typer.echo("  ".join(row[column].rjust(widths[column]) for column in shown).rstrip())


def _folded(table: Sequence[Sequence[str]], widths: Sequence[int], room: int | None) -> list[list[int]]:
    """Which columns stand side by side: all of them, or as many as a terminal has room for, each part with those
    that tell its rows apart."""
    every = list(range(len(widths)))
    if room is None or sum(widths) + 2 * len(widths) - 2 <= room:
        return [every]
    keys = [at for at in every[:_KEY_COLUMNS] if at == 0 or len({row[at] for row in table[1:]}) > 1]
    parts = [list(keys)]
    for at in every:
        if at in keys:
            continue
        if sum(widths[one] + 2 for one in parts[-1]) + widths[at] > room and len(parts[-1]) > len(keys):
            parts.append(list(keys))
        parts[-1].append(at)
    return parts


def _tier_tables(rows: Sequence[Row]) -> list[tuple[Sequence[str], list[list[str]]]]:
    """A table of what each tier did, where there is more than the device."""
    lines = [
        [
            row.policy,
            f"{row.capacity_blocks:,}",
            row.codec,
            _hosts(row),
            one.tier,
            f"{one.capacity_bytes / 1e9:,.1f}",
            f"{one.block_hit_ratio:.2%}",
            f"{one.written_bytes / 1e9:,.1f}",
            f"{one.read_bytes / 1e9:,.1f}",
            f"{one.evictions:,}",
            f"{one.seconds_saved / 3600:,.2f}",
            f"{one.dollars:,.2f}",
        ]
        for row in rows
        if len(row.tiers) > 1
        for one in row.tiers
    ]
    return [(_TIER_COLUMNS, lines)] if lines else []


def _hosts(row: Row) -> str:
    return str(row.hosts) if row.hosts == 1 else f"{row.hosts} {row.routing}"


def _cells(row: Row) -> list[str]:
    return [
        row.policy,
        f"{row.capacity_percent:.3g} %",
        f"{row.capacity_blocks:,}",
        row.codec,
        _hosts(row),
        f"{row.block_hit_ratio:.2%}",
        f"{row.device_hit_ratio:.2%}",
        f"{row.host_hit_ratio:.2%}",
        f"{row.remote_hit_ratio:.2%}",
        f"{row.token_hit_ratio:.2%}",
        f"{row.evictions:,}",
        f"{(row.spilled_bytes + row.fetched_bytes) / 1e9:,.1f}",
        f"{row.ttft_seconds_mean:.2f} s",
        f"{row.prefill_seconds_saved / 3600:,.2f}",
        f"{row.gpu_dollars_saved:,.2f}",
        f"{row.tier_dollars:,.2f}",
    ]


def _trace(
    path: Path | None,
    form: str | None,
    workload: str | None,
    requests: int | None,
    seed: int,
    block_tokens: int | None,
) -> Trace:
    from kvstore.simulation import first_requests, generate, read

    if (path is None) == (workload is None):
        raise ConfigError("expected either --trace or --workload")
    if path is not None:
        trace = read(path, form, block_tokens)
        return trace if requests is None else first_requests(trace, requests)
    assert workload is not None
    count = _WORKLOAD_REQUESTS if requests is None else requests
    return generate(workload, count, seed, 512 if block_tokens is None else block_tokens)


def _capacities(percent: str | None, blocks: str | None) -> list[dict[str, Any]]:
    if percent is not None and blocks is not None:
        raise ConfigError("expected --capacity-percent or --capacity-blocks, not both")
    if blocks is not None:
        return [{"capacity_blocks": one} for one in _numbers("--capacity-blocks", blocks, int)]
    percents = "1,2,5,10,25,50" if percent is None else percent
    return [{"capacity_percent": one} for one in _numbers("--capacity-percent", percents, float)]


def _tiers(text: str | None) -> tuple[dict[str, int], dict[str, Any]]:
    """Settings of a Setting, and of its Costs."""
    found = {"host_blocks": 0, "remote_blocks": 0}
    speeds: dict[str, Any] = {}
    for word in _words(text) if text is not None else []:
        parts = _TIER_SIZE.fullmatch(word)
        if parts is None:
            raise ConfigError(f"--tiers: got {word!r}; expected host=BLOCKS or host=BLOCKS@20GB, or remote=...")
        (found[f"{parts[1]}_blocks"],) = _numbers("--tiers", parts[2], int)
        if parts[3] is not None:
            speeds[f"{parts[1]}_bytes_per_second"] = float(size_bytes(f"bandwidth of tier {parts[1]}", parts[3]))
    return found, speeds


def _prices(text: str | None) -> dict[str, Any]:
    prices: dict[str, Any] = {}
    for word in _words(text) if text is not None else []:
        name, _, value = word.partition("=")
        if name not in ("host", "remote"):
            raise ConfigError(f"--tier-dollars: got {word!r}; expected host=NUMBER,remote=NUMBER")
        (prices[f"{name}_dollars_per_gib_hour"],) = _numbers("--tier-dollars", value, float)
    return prices


def _words(text: str) -> list[str]:
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _some(name: str, text: str) -> list[str]:
    if not (found := _words(text)):
        raise ConfigError(f"{name}: got {text!r}; expected a name, or several with commas between them")
    return found


def _numbers(name: str, text: str, kind: type[Any]) -> list[Any]:
    try:
        found = [kind(word) for word in _words(text)]
    except ValueError:
        found = []
    if not found:
        raise ConfigError(f"{name}: got {text!r:.80}; expected numbers with commas between them")
    return found


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], None] | None]:
    """A bar on standard error while somebody is looking."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("replaying"), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn(),
        console=Console(stderr=True), auto_refresh=False, transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=total)
    with bar:

        def tell(done: int) -> None:
            bar.update(task, completed=done, refresh=True)

        yield tell
