"""The command: chooses suites, prints rows as they come, writes JSON and a page.

Exit codes: 0 measured, 1 a suite failed or a checked target is not met, 2 bad usage.
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

from benchmarks.report import charts, markdown, report_suites
from benchmarks.rows import DEFAULT_ROUNDS, Options, Report, Row, environment
from benchmarks.targets import State, summary, verdicts

SUITES = (
    "pool",
    "hash",
    "codec",
    "pages",
    "packing",
    "fidelity",
    "loop",
    "decode",
    "attention",
    "tiers",
    "daemon",
    "vllm",
    "gpu",
)
ON_A_CARD = ("gpu",)
"""Suites that `--suite all` leaves out, because most machines cannot run them."""
Suite = Callable[[Options], Iterable[Row]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites that `arguments` name, or read a report; then write and check as asked."""
    parser = _parser()
    asked = parser.parse_args(arguments)
    names = _checked_names(parser, asked)
    for name, target in (("--json", asked.json), ("--report", asked.report)):
        problem = None if target in (None, "-") else _cannot_write(Path(target).absolute())
        if problem:
            parser.error(f"{name}: {problem}")
    if asked.read:
        report, failed = _read_reports(parser, asked.read.split(",")), False
        command = "python -m benchmarks --suite " + ",".join(report_suites(report))
    else:
        report, failed = _measured(names, asked)
        command = f"python -m benchmarks --suite {asked.suite}"
    if asked.json:
        _write(asked.json, report.to_json())
    if asked.report:
        _write_page(asked.report, report, command)
    return 1 if failed | (asked.check == "targets" and _check(report, names)) else 0


def _checked_names(parser: argparse.ArgumentParser, asked: argparse.Namespace) -> list[str]:
    """The suites to measure, none when a report is read. Ends the program on bad usage."""
    if asked.read:
        if asked.suite:
            parser.error("--suite measures and --from reads: give one of them")
        return []
    if not asked.json:
        parser.error("--json: give a file for the rows; - is standard output")
    if asked.suite == "all":
        return [name for name in SUITES if name not in ON_A_CARD]
    names = [name for name in (asked.suite or "").split(",") if name]
    unknown = sorted(set(names) - set(SUITES))
    if unknown or not names:
        parser.error(f"unknown suite {', '.join(unknown) or '(none)'}: choose from {', '.join(SUITES)}")
    models = {model for name in names for model in getattr(_suite(name), "MODELS", ())}
    if strange := sorted(set(asked.model) - models):
        parser.error(f"--model: unknown {', '.join(strange)}: choose from {', '.join(sorted(models)) or '(none)'}")
    if asked.rounds < 1:
        parser.error(f"--rounds: got {asked.rounds}, expected 1 or more")
    return names


def _measured(names: Sequence[str], asked: argparse.Namespace) -> tuple[Report, bool]:
    """The rows of all suites, and whether one of them failed."""
    options = Options(rounds=asked.rounds, quick=asked.quick, seed=asked.seed, models=tuple(asked.model))
    report = Report(environment(asked.seed), [])
    failed = False
    for name in names:
        report.environment |= getattr(_suite(name), "describe", dict)()
        suite: Suite = _suite(name).rows
        try:
            for row in suite(options):
                report.rows.append(row)
                print(row.described(), file=sys.stderr, flush=True)
        except (RuntimeError, OSError) as error:
            print(f"{name}: failed: {error}", file=sys.stderr)
            failed = True
    return report, failed


def _read_reports(parser: argparse.ArgumentParser, files: Sequence[str]) -> Report:
    """Reports that were written before as one; a suite's rows are those of the last file that has them."""
    found: Report | None = None
    for file in files:
        try:
            one = Report.from_json(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError, KeyError) as error:
            parser.error(f"--from: {file} is no report of this command ({error})")
        found = one if found is None else found.joined(one)
    assert found is not None
    return found


def _write_page(target: str, report: Report, command: str) -> None:
    """The page, and its charts beside it when it is a file."""
    if target == "-":
        _write(target, markdown(report, command))
        return
    page = Path(target)
    files = {}
    for suite, chart in charts(report).items():
        files[suite] = f"{page.stem}-{suite}.svg"
        _write(str(page.with_name(files[suite])), chart)
    _write(target, markdown(report, command, files))


def _check(report: Report, names: Sequence[str]) -> bool:
    """List every case asked for that is short or missing, of the suites measured or of all; True if there is one."""
    found = verdicts(report.rows, names or None)
    unmet = [one for one in found if one.state is not State.MET]
    for one in unmet:
        print(one.described(), file=sys.stderr)
    print(summary(found), file=sys.stderr)
    return bool(unmet)


def _suite(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.suites.{name}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure, beside a baseline in the same run."
    )
    parser.add_argument("--suite", metavar="NAME[,NAME]", help=f"all, or of {', '.join(SUITES)}")
    parser.add_argument("--json", metavar="FILE", help="where the rows go; - is standard output")
    parser.add_argument(
        "--from", dest="read", metavar="FILE[,FILE]", help="measure nothing: read rows that --json wrote"
    )
    parser.add_argument(
        "--check", choices=("targets",), help="exit with 1 when a case that is asked for is short or missing"
    )
    parser.add_argument("--report", metavar="FILE", help="a Markdown page of the same rows, charts beside it")
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
