"""`kvstore inspect`: what a disk directory or a Redis namespace holds, and whether it is whole.

Looks and changes nothing unless told to delete. The secret for signed copies comes from KVSTORE_SECRET. Progress goes
to standard error, the table to standard output.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allocator.errors import ConfigError, TierError
from kvstore.cli import json_target
from kvstore.config import KVStoreConfig

if TYPE_CHECKING:
    from kvstore.inspection import Advance, Findings, Selection


def inspect(  # noqa: PLR0913 - one argument an option
    target: Annotated[
        str,
        typer.Argument(
            metavar="[DIR|URL]", help="A disk tier's directory or a URL as in docs/how-to/redis.md; else what is set."
        ),
    ] = "",
    verify: Annotated[bool, typer.Option(help="Read every byte of every copy.")] = True,
    root: Annotated[str, typer.Option(metavar="HEX", help="Only roots that begin so.")] = "",
    model: Annotated[str, typer.Option(help="Only roots described as of this model (Redis).")] = "",
    tenant: Annotated[str, typer.Option(help="Only roots described as of this tenant (Redis).")] = "",
    codec: Annotated[str, typer.Option(help="Only copies by this codec.")] = "",
    delete: Annotated[bool, typer.Option("--delete", help="Delete what is selected.")] = False,
    delete_corrupt: Annotated[bool, typer.Option("--delete-corrupt", help="Delete what is corrupt.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the findings; - is standard output.")
    ] = None,
) -> None:
    """List and verify a disk directory or a Redis or Valkey namespace.

    Exit code 0: all is well; 1: something is corrupt, unreachable, or in use and not to be deleted from; 2: bad usage.
    """
    from kvstore.cli import inspect_report  # what checks frames is loaded only here: other commands stay quick
    from kvstore.inspection import Selection
    from quant.codec import codec_names

    if json_file is not None and (problem := json_target.cannot_write(json_file)):
        raise typer.BadParameter(problem, param_hint="--json")
    try:
        settings = KVStoreConfig.load()
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="environment") from None
    place = target or _only_place(settings)
    if root and not re.fullmatch("[0-9a-fA-F]{1,64}", root):
        raise typer.BadParameter(f"root: got {root!r:.80}; expected up to 64 hex digits", param_hint="--root")
    if codec and codec not in codec_names():
        raise typer.BadParameter(
            f"codec: got {codec!r:.80}; expected one of {', '.join(codec_names())}", param_hint="--codec"
        )
    selection = Selection(root.lower(), codec, {word: said for word, said in _words(model, tenant) if said})
    action = _action(delete, delete_corrupt, verify, selection)
    if selection.words and "://" not in place:
        raise typer.BadParameter("a directory names roots only; use --root", param_hint="--model, --tenant")
    if action != "none" and not yes:
        _confirm(action, place)
    try:
        findings = _look(place, settings.secret.encode() or None, verify, selection, action)
    except ConfigError as error:
        raise typer.BadParameter(str(error), param_hint="DIR|URL") from None
    except TierError as error:
        typer.echo(f"kvstore inspect: {error}", err=True)
        raise typer.Exit(1) from None
    if json_file is not None:
        json_target.write(json_file, findings.to_json())
    if json_file != "-":
        for line in inspect_report.lines(findings):
            typer.echo(line)
    raise typer.Exit(1 if findings.failed else 0)


def _words(model: str, tenant: str) -> list[tuple[str, str]]:
    return [("model", model), ("tenant", tenant)]


def _only_place(settings: KVStoreConfig) -> str:
    places = [place for place in (settings.disk_path, settings.redis_url) if place]
    if len(places) != 1:
        raise typer.BadParameter(
            f"{'neither' if not places else 'both'} of KVSTORE_DISK_PATH and KVSTORE_REDIS_URL set; name one",
            param_hint="DIR|URL",
        )
    return places[0]


def _action(delete: bool, delete_corrupt: bool, verify: bool, selection: Selection) -> str:
    if delete and delete_corrupt:
        raise typer.BadParameter("one of them at a time", param_hint="--delete, --delete-corrupt")
    if delete and selection.is_empty:
        raise typer.BadParameter("say what: --root, --model, --tenant or --codec", param_hint="--delete")
    if delete_corrupt and not verify:
        raise typer.BadParameter("needs --verify", param_hint="--delete-corrupt")
    return "selected" if delete else "corrupt" if delete_corrupt else "none"


def _confirm(action: str, place: str) -> None:
    from kvstore.redis_tier.url import redacted

    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody to ask here; add --yes", param_hint="--delete, --delete-corrupt")
    shown = redacted(place) if "://" in place else place
    typer.confirm(f"Delete what is {action} from {shown}?", abort=True, err=True)


def _look(place: str, secret: bytes | None, verify: bool, selection: Selection, action: str) -> Findings:
    with _progress(verify) as advance:
        if "://" in place:
            from kvstore.redis_tier.inspection import NamespaceInspector
            from kvstore.redis_tier.url import parse_redis_url

            inspector = NamespaceInspector(parse_redis_url(place), secret=secret)
            try:
                return inspector.inspect(verify=verify, selection=selection, delete=action, advance=advance)
            finally:
                inspector.close()
        from kvstore.disk_tier.inspection import delete_from_directory, inspect_directory

        directory = Path(place)
        if action == "none":
            return inspect_directory(directory, verify=verify, secret=secret, selection=selection, advance=advance)
        return delete_from_directory(
            directory, corrupt_only=action == "corrupt", secret=secret, selection=selection, advance=advance
        )


@contextmanager
def _progress(verify: bool) -> Iterator[Advance]:
    """A bar on a terminal's standard error; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verifying" if verify else "counting", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=max(done, total) or None)

        yield advance
