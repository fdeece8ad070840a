"""`kvstore record`: run a command whose engine then writes a privacy-safe trace of its requests.

The format is docs/formats/trace.md.
The engine of this library looks for the recorder's variables when it is made; nothing else of the command changes.
Exit code: the command's own; 1 when it wrote no trace; 2 for bad usage.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from allocator.errors import ConfigError
from kvstore.cli import json_target
from kvstore.trace_recorder import FILE_VARIABLE, SALT_VARIABLE, read_salt


def record(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="What to run, after --.")],
    out: Annotated[Path, typer.Option(help="File of the trace; must not exist yet.")],
    salt_file: Annotated[
        Path | None, typer.Option(help="64 hex digits: traces with one salt can be joined. Drawn when not given.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write what was recorded; - is standard output.")
    ] = None,
) -> None:
    """Run a command and record a trace of its requests: lengths, times, salted hashes; no tokens."""
    if out.exists() or not out.absolute().parent.is_dir():
        raise typer.BadParameter(f"got {out}; expected a new file in an existing folder", param_hint="--out")
    if json_file is not None and (problem := json_target.cannot_write(json_file)):
        raise typer.BadParameter(problem, param_hint="--json")
    environment = os.environ | {FILE_VARIABLE: str(out.absolute())}
    environment.pop(SALT_VARIABLE, None)
    if salt_file is not None:
        try:
            read_salt(salt_file)
        except ConfigError as error:
            raise typer.BadParameter(str(error), param_hint="--salt-file") from error
        environment[SALT_VARIABLE] = str(salt_file.absolute())
    try:
        process = subprocess.Popen(command, env=environment)
    except OSError as error:
        raise typer.BadParameter(f"{command[0]}: {error.strerror}", param_hint="COMMAND") from error
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:  # the command got it too and ends in its own time
            continue
    if not out.exists():
        typer.echo(f"kvstore record: {command[0]} made no engine that records; there is no {out}", err=True)
        raise typer.Exit(code or 1)
    summary = summarize(out)
    if json_file is not None:
        json_target.write(json_file, summary)
    typer.echo(
        f"{summary['requests']} requests, {summary['input_tokens']} prompt tokens in {summary['blocks']} blocks, "
        f"{summary['distinct_blocks']} distinct; {out}",
        err=True,
    )
    raise typer.Exit(code if code >= 0 else 128 - code)


def summarize(path: Path) -> dict[str, int]:
    """Counts of a trace that this process has just seen written."""
    requests = tokens = blocks = 0
    distinct: set[int] = set()
    with path.open(encoding="utf-8") as lines:
        next(lines, None)
        for line in lines:
            one = json.loads(line)
            requests += 1
            tokens += one["input_length"]
            blocks += len(one["hash_ids"])
            distinct.update(one["hash_ids"])
    return {"requests": requests, "input_tokens": tokens, "blocks": blocks, "distinct_blocks": len(distinct)}
