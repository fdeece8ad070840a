"""`kvstore plan`: what a model's KV needs, what fits, and how fast prompts and decode steps can be at best.

Reads a config and does arithmetic (kvstore.planning); imports no torch. Exit code 2 when the model or a setting cannot
be; 1 when the requests asked for do not fit with any setting.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from allocator import ConfigError
from kvstore.cli import json_target
from kvstore.cli.simulate import progress_bar
from kvstore.config import size_bytes
from kvstore.planning.builtin_shapes import find_shape
from kvstore.planning.capacity import Demand
from kvstore.planning.cards import CARDS, Card, find_card
from kvstore.planning.plan_page import TABLES, bytes_text, plan_page
from kvstore.planning.record_sizes import CODECS
from kvstore.planning.report import Cards, Document, TierSize, plan_document
from kvstore.planning.traffic import Traffic
from kvstore.simulation import POLICIES, read

_WIDTH = 140


def plan(  # noqa: PLR0913 - the signature is the command line
    model: Annotated[str, typer.Option(help="A built-in name such as llama-3.1-70b, or the path of a config.json.")],
    context: Annotated[int, typer.Option(help="Tokens of a request, its answer included.")] = 8192,
    concurrency: Annotated[int, typer.Option(help="Requests that decode together.")] = 1,
    shared_prefix: Annotated[int, typer.Option(help="Leading tokens that all requests have in common.")] = 0,
    block_tokens: Annotated[int, typer.Option(help="Tokens of a block.")] = 16,
    dtype: Annotated[str | None, typer.Option(help="Of the KV; the config's when not given.")] = None,
    codec: Annotated[str, typer.Option(help="Codecs of cold blocks, with commas.")] = ",".join(CODECS),
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(CARDS)}.")] = "h100",
    gpus: Annotated[int | None, typer.Option(help="How many; when not given, as few as hold one request.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Of one card, instead of --gpu's: '80 GiB'.")] = None,
    gpu_bandwidth: Annotated[str | None, typer.Option(help="Bytes a second of one card: '3.3 TB'.")] = None,
    gpu_flops: Annotated[float | None, typer.Option(help="Dense 16-bit operations a second of one card.")] = None,
    weights_bytes: Annotated[str | None, typer.Option(help="Of all weights; 2 a parameter when not given.")] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help="host=64GiB@20GB: a tier below, its size, bytes a second. Repeatable.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Requests to replay on that machine, as simulate does.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Of eviction, for --trace.")] = "default",
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Write a page with charts.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the plan; - is standard output.")
    ] = None,
) -> None:
    """Say what a model's KV cache needs, how many requests fit, and the floors of ITL and TTFT."""
    for name, target in (("--json", json_file), ("--html", html)):
        if target is not None and (problem := json_target.cannot_write(target)):
            raise typer.BadParameter(problem, param_hint=name)
    if html == "-":
        raise typer.BadParameter("expected a file; only --json may go to standard output", param_hint="--html")
    try:
        shape = find_shape(model)
        demand = Demand(
            context_tokens=_count("context", context),
            concurrency=_count("concurrency", concurrency),
            shared_tokens=_count("shared-prefix", shared_prefix, least=0, most=context),
            block_tokens=block_tokens,
            dtype=dtype or shape.dtype,
        )
        card = _card(gpu, gpu_memory, gpu_bandwidth, gpu_flops)
        cards = Cards(gpu if card == CARDS.get(gpu.lower()) else "card as given", card, gpus)
        if gpus is not None:
            _count("gpus", gpus, most=1 << 16)
        weights = 2 * shape.parameters if weights_bytes is None else size_bytes("weights-bytes", weights_bytes)
        if not weights:
            raise ConfigError(f"weights-bytes: got {weights_bytes!r}; expected a size above 0")
        tiers = _tiers(tier or ())
        if policy not in POLICIES:
            raise ConfigError(f"policy: got {policy!r}; expected one of {', '.join(POLICIES)}")
        codecs = _codecs(codec)
        replayed = None if trace is None else read(trace)
        settings_count = len(codecs) * (1 + len(tiers))
        with progress_bar(settings_count * len(replayed or ())) as progress:
            traffic = None if replayed is None else Traffic(replayed, policy, progress)
            document = plan_document(shape, demand, codecs, cards, weights, tiers, traffic)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    if json_file is not None:
        json_target.write(json_file, document)
    if html is not None:
        Path(html).write_text(plan_page(document), encoding="utf-8")
    if json_file != "-":
        _print(document)
    raise typer.Exit(0 if any(one["fits"] for one in document["settings"]) else 1)


def _count(name: str, value: int, least: int = 1, most: int = 1 << 30) -> int:
    if not least <= value <= most:
        raise ConfigError(f"{name}: got {value}; expected a count in [{least}, {most}]")
    return value


def _codecs(text: str) -> list[str]:
    names = [one.strip() for one in text.split(",") if one.strip()]
    if not names or set(names) - set(CODECS):
        raise ConfigError(f"codec: got {text!r}; expected some of {', '.join(CODECS)}")
    return list(dict.fromkeys(names))


def _card(gpu: str, memory: str | None, bandwidth: str | None, flops: float | None) -> Card:
    given = (memory, bandwidth, flops)
    known = None if all(one is not None for one in given) else find_card(gpu)
    card = Card(
        known.memory_bytes if memory is None and known else size_bytes("gpu-memory", memory),
        known.bytes_per_second if bandwidth is None and known else size_bytes("gpu-bandwidth", bandwidth),
        known.flops_per_second if flops is None and known else 0.0 if flops is None else flops,
    )
    for name, given_text, value in (
        ("gpu-memory", memory, card.memory_bytes),
        ("gpu-bandwidth", bandwidth, card.bytes_per_second),
        ("gpu-flops", flops, card.flops_per_second),
    ):
        if not 0 < value < float("inf"):
            raise ConfigError(f"{name}: got {given_text!r}; expected a number above 0")
    return card


def _tiers(texts: list[str] | tuple[str, ...]) -> list[TierSize]:
    tiers = [_tier(text) for text in texts]
    names = [one.name for one in tiers]
    if len(set(names)) < len(names):
        raise ConfigError(f"tier: got {', '.join(texts)}; expected each name once")
    return tiers


def _tier(text: str) -> TierSize:
    found = re.fullmatch(r"([a-z]+)=([^@=]+)(?:@([^@=]+))?", text)
    if found is None:
        raise ConfigError(f"tier: got {text!r}; expected name=size or name=size@bandwidth, as host=64GiB@20GB")
    speed = None if found[3] is None else float(size_bytes(f"bandwidth of tier {found[1]}", found[3]))
    if speed == 0:
        raise ConfigError(f"tier: got {text!r}; expected a bandwidth above 0")
    size = size_bytes(f"size of tier {found[1]}", found[2])
    if size == 0:
        raise ConfigError(f"tier: got {text!r}; expected a size above 0")
    return TierSize(found[1], size, speed)


def _print(document: Document) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False)
    model, demand, machine = document["model"], document["demand"], document["machine"]
    chosen = " (as few as hold the weights and one request)" if machine["gpus_chosen"] else ""
    console.print(
        f"[bold]{model['name']}[/bold]  {model['parameters'] / 1e9:.1f} B parameters, {model['layers']} layers; "
        f"{demand['concurrency']} x {demand['context_tokens']:,} tokens, blocks of {demand['block_tokens']}, "
        f"{demand['dtype']}"
    )
    console.print(
        f"{machine['gpus']} x {machine['gpu']}{chosen}: {bytes_text(machine['memory_bytes'])}, "
        f"{bytes_text(machine['weights_bytes'])} of weights, {bytes_text(machine['kv_bytes'])} for KV"
    )
    for title, key, columns in TABLES:
        if not document[key]:
            continue
        table = Table(
            title=title,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, int(console.width >= _WIDTH)),
        )
        for number, (name, _) in enumerate(columns):
            is_text = number == 0 or name in ("against", "unit", "codec")
            table.add_column(  # on a narrow terminal words are folded, nothing is cut off, and counts stay whole
                name, justify="left" if is_text else "right", overflow="fold", no_wrap=name in ("base", "with it")
            )
        for row in document[key]:
            table.add_row(*(cell(row) for _, cell in columns))
        console.print(table)
    for note in document["notes"]:
        console.print(f"note: {note}")
    console.print("Floors are what bandwidth and arithmetic allow at best; a real step takes longer.")
