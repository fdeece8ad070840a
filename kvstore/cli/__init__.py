"""The command `kvstore`: its own commands, and those that packages above register.

A package above adds a command by an entry point of the group `kvstore.commands` (name: the command; value: a function
with typer's annotations), so that nothing here imports it. Those are loaded only when the first word is none of our
own commands, which keeps these quick to start.

Exit codes: 0 done, 1 the thing asked for failed, 2 bad usage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points

COMMANDS_GROUP = "kvstore.commands"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    import typer

    from kvstore.cli.doctor import doctor
    from kvstore.cli.inspect import inspect
    from kvstore.cli.plan import plan
    from kvstore.cli.record import record
    from kvstore.cli.serve import serve
    from kvstore.cli.simulate import simulate
    from kvstore.cli.stats import stats
    from kvstore.cli.top import top

    words = list(sys.argv[1:] if arguments is None else arguments)
    app = typer.Typer(
        name="kvstore",
        help="Manage the KV cache of language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    own: dict[str, Callable[..., None]] = {
        "doctor": doctor,
        "inspect": inspect,
        "plan": plan,
        "record": record,
        "serve": serve,
        "simulate": simulate,
        "stats": stats,
        "top": top,
    }
    for name, command in own.items():
        app.command(name)(command)
    app.callback()(lambda: None)  # a group even while there is one command
    if not words or words[0] not in own:
        for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
            _add(app, entry)
    try:
        app(words, prog_name="kvstore")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    return 0


def _add(app: object, entry: EntryPoint) -> None:
    """A command of a package above. One that cannot be loaded must not take the others along."""
    try:
        command = entry.load()
    except Exception as error:  # told at once: its command is missing from the list
        print(f"kvstore: command {entry.name} left out: {type(error).__name__}: {error}", file=sys.stderr)
        return
    app.command(entry.name)(command)  # type: ignore[attr-defined]
