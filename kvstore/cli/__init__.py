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
from typing import Any

COMMANDS_GROUP = "kvstore.commands"


def own_commands() -> dict[str, Callable[..., None]]:
    """The commands of this package by name."""
    from kvstore.cli.doctor import doctor
    from kvstore.cli.inspect import inspect
    from kvstore.cli.plan import plan
    from kvstore.cli.record import record
    from kvstore.cli.serve import serve
    from kvstore.cli.simulate import simulate
    from kvstore.cli.stats import stats
    from kvstore.cli.top import top

    return {
        "doctor": doctor,
        "inspect": inspect,
        "plan": plan,
        "record": record,
        "serve": serve,
        "simulate": simulate,
        "stats": stats,
        "top": top,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    import typer

    words = list(sys.argv[1:] if arguments is None else arguments)
    app = typer.Typer(
        name="kvstore",
        help="Manage the KV cache of language models.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    own = own_commands()
    for name, command in own.items():
        app.command(name)(command)
    app.callback()(lambda: None)  # a group even while there is one command
    if not words or words[0] not in own:
        for entry in sorted(entry_points(group=COMMANDS_GROUP), key=lambda entry: entry.name):
            _add(app, entry)
    try:
        code = app(words, prog_name="kvstore", standalone_mode=False)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(bool(ended.code))
    except typer.Abort:
        print("Aborted.", file=sys.stderr)
        return 1
    except Exception as error:
        return _refused(error, words)
    return code if isinstance(code, int) else 0


def _refused(error: Any, words: Sequence[str]) -> int:
    """Show what the command line's parser refused, with the value, which it leaves out; anything else goes on."""
    if not hasattr(error, "format_message"):
        raise error
    for option in getattr(getattr(error, "param", None), "opts", ()):
        for place, word in enumerate(words):
            name, equals, value = word.partition("=")
            if name == option and (equals or place + 1 < len(words)):
                value = value if equals else words[place + 1]
                if f"got {value}" not in error.message and f"got {value!r}" not in error.message:
                    error.message = f"got {value!r:.80}; {error.message[:1].lower()}{error.message[1:]}"
    error.show()
    return int(error.exit_code)


def _add(app: object, entry: EntryPoint) -> None:
    """A command of a package above. One that cannot be loaded must not take the others along."""
    try:
        command = entry.load()
    except Exception as error:  # told at once: its command is missing from the list
        print(f"kvstore: command {entry.name} left out: {type(error).__name__}: {error}", file=sys.stderr)
        return
    app.command(entry.name)(command)  # type: ignore[attr-defined]
