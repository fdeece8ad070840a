"""`kvstore record`: run a command whose engine then writes a privacy-safe trace of its requests.

The format is docs/formats/trace.md.
An engine of this library, and the daemon, look for the recorder's variables when they are made; nothing else of the
command changes.
SIGTERM, SIGHUP and SIGINT go on to the command, which is waited for, and killed where it does not end.
Exit code: the command's own; 1 when it wrote no trace; 2 for bad usage.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from allocator.errors import ConfigError
from kvstore.cli import json_target
from kvstore.trace_recorder import FILE_VARIABLE, SALT_VARIABLE, read_salt

_ENDING_SECONDS = 30.0
"""What the command has to end, once it was asked."""


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
    before = set(_traces(out))  # of an earlier recording, whose first file is gone
    code = _run(command, environment)
    if not out.exists():
        why = "made no engine that records, or served no request"
        typer.echo(f"kvstore record: {command[0]} {why}; there is no {out}", err=True)
        raise typer.Exit(code or 1)
    files = [path for path in _traces(out) if path not in before]
    summary = summarize(*files)
    if json_file is not None:
        json_target.write(json_file, summary)
    typer.echo(
        f"{summary['requests']} requests, {summary['input_tokens']} prompt tokens in {summary['blocks']} blocks, "
        f"{summary['distinct_blocks']} distinct; {', '.join(map(str, files))}",
        err=True,
    )
    if len(files) > 1:  # one an engine or start of a daemon
        joined = "share a salt: they can be joined" if salt_file else "have a salt each: no block is known in two"
        typer.echo(f"kvstore record: {len(files)} files, which {joined}", err=True)
    raise typer.Exit(code)


def _traces(out: Path) -> list[Path]:
    """`out`, and the files beside it that the recorders of further engines make: X-2, X-3, ..., in that order."""
    name = re.compile(rf"{re.escape(out.stem)}-([0-9]+){re.escape(out.suffix)}")
    beside = [(int(found[1]), path) for path in out.absolute().parent.iterdir() if (found := name.fullmatch(path.name))]
    own = [out] if out.exists() else []
    return own + [out.with_name(path.name) for number, path in sorted(beside) if number > 1]


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run it to its end; its exit code as a shell gives it."""
    with _Signals() as signals:
        try:
            process = subprocess.Popen(command, env=environment)
        except OSError as error:
            raise typer.BadParameter(f"{command[0]}: {error.strerror}", param_hint="COMMAND") from error
        signals.go_to(process)
        code = process.wait()
    return code if code >= 0 else 128 - code


class _Signals:
    """While it is entered, what asks this process to end asks the command. Of the main thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._early: list[int] = []
        self._killer: threading.Timer | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup; the command inherits that
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._killer is not None:
            self._killer.cancel()

    def go_to(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self._early:
            self._on_signal(number, None)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self._process is None:
            self._early.append(number)
            return
        if number == signal.SIGINT and not self._leads_group() and _is_typed():
            return  # the command got it too, and ends in its own time or not at all
        self._send(number)
        if self._killer is None:
            self._killer = threading.Timer(_ENDING_SECONDS, self._send, (signal.SIGKILL,))
            self._killer.daemon = True
            self._killer.start()

    def _leads_group(self) -> bool:
        assert self._process is not None
        try:
            return os.getpgid(self._process.pid) == self._process.pid
        except ProcessLookupError:
            return False

    def _send(self, number: int) -> None:
        """To the process, and to its group where it made one. It is not reaped yet, so its number is its own."""
        assert self._process is not None
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                if self._leads_group():
                    os.killpg(self._process.pid, number)
                else:
                    os.kill(self._process.pid, number)


def _is_typed() -> bool:
    """Whether Ctrl-C at the terminal reaches this process, and so everybody in its group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def summarize(*paths: Path) -> dict[str, Any]:
    """Counts of traces that this process has just seen written. A last line that was cut off (by a kill, a full
    disk) is left out and told.
    """
    requests = tokens = blocks = 0
    distinct: set[int] = set()
    files = []
    for path in paths:
        before = requests
        with path.open(encoding="utf-8") as lines:
            next(lines, None)
            for number, line in enumerate(lines, 2):
                if not line.endswith("\n"):
                    typer.echo(f"kvstore record: line {number} of {path} was cut off: delete it", err=True)
                    break
                one = json.loads(line)
                requests += 1
                tokens += one["input_length"]
                blocks += len(one["hash_ids"])
                distinct.update(one["hash_ids"])
        files.append({"file": str(path), "requests": requests - before})
    totals = {"requests": requests, "input_tokens": tokens, "blocks": blocks, "distinct_blocks": len(distinct)}
    return totals | {"files": files}
