"""`kvstore stats`: what a running daemon says of itself, as JSON or in a few lines. No torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from allocator.errors import ConfigError, KVError
from kvstore.cli import json_target
from kvstore.cli.daemon_http import DEFAULT_URL, DaemonHttp

URL_HELP = "The daemon's page: its setting http, as a port, HOST:PORT or http://HOST:PORT."
TOKEN_HELP = "File with its token, where it wants one."


def stats(
    url: Annotated[str, typer.Option(metavar="URL", help=URL_HELP)] = DEFAULT_URL,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help=TOKEN_HELP)] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything; - is standard output.")
    ] = None,
) -> None:
    """Show what a running daemon says of itself.

    Exit codes: 0 shown, 1 no daemon answers, 2 bad usage.
    """
    if json_file is not None and (problem := json_target.cannot_write(json_file)):
        raise typer.BadParameter(problem, param_hint="--json")
    found = ask(url, token_file, "/v1/stats", "stats")
    if json_file is not None:
        json_target.write(json_file, found)
    if json_file != "-":
        for line in lines(found):
            typer.echo(line)


def ask(url: str, token_file: Path | None, path: str, command: str) -> Any:
    """One answer; ends the command when there is none."""
    try:
        return DaemonHttp(url, token_file).get(path)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    except KVError as error:
        print(f"kvstore {command}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def lines(found: dict[str, Any]) -> list[str]:
    """The gist, one thing a line."""
    from kvstore.daemon.troubles import told  # not above: it loads the kernels, which the doctor looks at first

    lookups = found["lookups"]
    asked, hits = lookups["asked_blocks"], sum(lookups["hit_blocks"].values())
    ratio = f"{100 * hits / asked:.1f} %" if asked else "-"
    shown = [
        f"daemon    {'ready' if found['ready'] else 'not ready'}, process {found['pid']}, "
        f"up {found['uptime_seconds']:.0f} s, {found['connections']} clients",
        f"lookups   {lookups['lookups']}, {asked} blocks, {ratio} of them hits",
        f"reused    {lookups['reused_tokens']} tokens, {lookups['saved_prefill_seconds']:.1f} s of prefill saved",
    ]
    for name, tier in found["tiers"].items():
        limit = f" of {size_text(tier['capacity_bytes'])}" if tier["capacity_bytes"] else ""
        shown.append(f"{name:<9} {tier['state']}, {size_text(tier['used_bytes'])}{limit}")
        if damaged := tier.get("damaged_copies"):
            shown.append(
                f"          {sum(damaged.values())} damaged copies came back, none was served: {told(damaged)}"
            )
        if dropped := tier.get("index_dropped"):
            shown.append(
                f"          began anew, empty, at this start: the index could not be used ({', '.join(dropped)})"
            )
    if refused := found.get("refused"):
        shown.append(f"refused   {told(refused)} since start")
    for pin in found["pins"]:
        where = f"{pin['domain']}, " if pin["domain"] else ""
        shown.append(
            f"pin       {pin['name']}: {where}root {pin['root']}, block {pin['block']}, "
            f"{pin['copies']} copies, {size_text(pin['pinned_bytes'])}, {pin['seconds_left']:.0f} s left"
        )
    return shown


def size_text(size_bytes: float) -> str:
    """For people: 3.4 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 10 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
