"""The command: chooses suites, prints rows as they come, writes JSON and a page.

Exit codes: 0 measured, 1 a suite failed, 2 bad usage.
"""

from __future__ import annotations

import os

# Before torch is imported: one thread, and its tensors in huge pages, or the baselines swing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

from benchmarks.report import markdown
from benchmarks.rows import DEFAULT_ROUNDS, Options, Report, Row, environment

SUITES = ("pool", "fidelity", "loop", "decode", "attention")
Suite = Callable[[Options], Iterable[Row]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites that `arguments` name."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    names = [name for name in asked.suite.split(",") if name]
    unknown = sorted(set(names) - set(SUITES))
    if unknown or not names:
        parser.error(f"unknown suite {', '.join(unknown) or '(none)'}: choose from {', '.join(SUITES)}")
    models = {model for name in names for model in getattr(_suite(name), "MODELS", ())}
    if strange := sorted(set(asked.model) - models):
        parser.error(f"--model: unknown {', '.join(strange)}: choose from {', '.join(sorted(models)) or '(none)'}")
    if asked.rounds < 1:
        parser.error(f"--rounds: got {asked.rounds}, expected 1 or more")
    for name, target in (("--json", asked.json), ("--report", asked.report)):
        problem = None if target in (None, "-") else _cannot_write(Path(target).absolute())
        if problem:
            parser.error(f"{name}: {problem}")
    options = Options(rounds=asked.rounds, quick=asked.quick, seed=asked.seed, models=tuple(asked.model))
    report = Report(environment(asked.seed), [])
    failed = False
    for name in names:
        suite: Suite = _suite(name).rows
        try:
            for row in suite(options):
                report.rows.append(row)
                print(row.described(), file=sys.stderr, flush=True)
        except (RuntimeError, OSError) as error:
            print(f"{name}: failed: {error}", file=sys.stderr)
            failed = True
    _write(asked.json, report.to_json())
    if asked.report:
        command = f"python -m benchmarks --suite {asked.suite}"
        _write(asked.report, markdown(report, command))
    return 1 if failed else 0


def _suite(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.suites.{name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure, beside a baseline in the same run."
    )
    parser.add_argument("--suite", required=True, metavar="NAME[,NAME]", help=f"of {', '.join(SUITES)}")
    parser.add_argument("--json", required=True, metavar="FILE", help="where the rows go; - is standard output")
    parser.add_argument("--report", metavar="FILE", help="a Markdown page of the same rows")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help="interleaved rounds (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model", action="append", default=[], metavar="NAME", help="limit suites that load models; repeat"
    )
    parser.add_argument("--quick", action="store_true", help="a short run that only shows that everything works")
    return parser


def _cannot_write(path: Path) -> str | None:
    """Why no file can be written to `path`, whose folders are made; None when one can. Known before measuring."""
    if path.is_dir():
        return f"got the folder {path}, expected a file"
    if path.exists():
        return None if os.access(path, os.W_OK) else f"no permission to write {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        path.unlink()
    except OSError as error:
        return f"cannot write {path} ({error.strerror})"
    return None


def _write(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
