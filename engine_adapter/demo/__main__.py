"""Command line of the demo. Exit code 0: all promises held; 1: one did not, or the demo could not run; 2: bad usage."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allocator import ConfigError
from engine_adapter.demo.console import ConsoleDisplay
from engine_adapter.demo.settings import THREADS_MOST, Below, Options, Sizes, sizes_for
from engine_adapter.demo.workload import WorkloadError, question_limit
from kvstore.redis_tier.url import parse_redis_url


def parse(arguments: Sequence[str] | None) -> Options:
    """Options from the command line; exits with 2 and says why when they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.demo",
        description="A real language model serves many requests out of too little memory, and reports how that went.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of another Hugging Face causal model")
    parser.add_argument("--json", default="demo-report.json", metavar="FILE", help="report; '-' for standard output")
    parser.add_argument("--html", default="demo-report.html", metavar="FILE", help="page with charts")
    parser.add_argument("--requests", type=int, metavar="N", help="questions about the documents, instead of 24")
    parser.add_argument("--quick", action="store_true", help="a few small requests: shows that it runs, proves less")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default 2)")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="the tight settings keep copies there: a second start "
                        "reuses what the first one stored")  # fmt: skip
    parser.add_argument("--redis", default="", metavar="URL", help="the same on a Redis or Valkey")
    given = parser.parse_args(arguments)
    if given.requests is not None and not 1 <= given.requests <= question_limit():
        parser.error(f"--requests: got {given.requests}, expected 1..{question_limit()}")
    if not 1 <= given.threads <= THREADS_MOST:
        parser.error(f"--threads: got {given.threads}, expected 1..{THREADS_MOST}")
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: no model in {given.model}; expected a folder with a config.json")
    for name, path in (("--json", given.json), ("--html", given.html)):
        problem = None if path == "-" else cannot_write(Path(path).absolute())
        if problem:
            parser.error(f"{name}: {problem}")
    if given.disk is not None and (given.disk.exists() and not given.disk.is_dir()):
        parser.error(f"--disk: got {given.disk}, expected a directory, there or to be made")
    if given.redis:
        try:
            parse_redis_url(given.redis)
        except ConfigError as error:
            parser.error(f"--redis: {error}")
    if given.html == "-":
        parser.error("--html: expected a file; only --json may go to standard output")
    return Options(
        model=given.model,
        json_path=given.json,
        html_path=given.html,
        quick=given.quick,
        requests=given.requests,
        threads=given.threads,
        below=Below("" if given.disk is None else str(given.disk), given.redis),
    )


def cannot_write(path: Path) -> str | None:
    """Why no report can be written to `path`; None when one can. Known before the work, not minutes later."""
    if not path.parent.is_dir():
        return f"no folder {path.parent}"
    if path.is_dir():
        return f"got the folder {path}, expected a file"
    if path.exists():
        return None if os.access(path, os.W_OK) else f"no permission to write {path}"
    try:
        path.touch()
        path.unlink()
    except OSError as error:
        return f"cannot write {path} ({error.strerror})"
    return None


def wait_without_spinning() -> None:
    """Let torch's threads sleep while they wait for each other. Must come before torch is loaded.

    They spin by default, which costs nothing on an idle machine; where other programs want the cores too, a decode
    step took ten times as long.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo, write its reports, return the exit code."""
    options = parse(arguments)
    wait_without_spinning()
    from allocator import KVError
    from engine_adapter.demo.serve import ServeError

    display = ConsoleDisplay(to_stderr=options.json_path == "-")
    try:
        report = run(options, sizes_for(options), display)
    except (FileNotFoundError, KVError, ServeError, WorkloadError) as error:
        display.console.print(f"[bold red]cannot run:[/bold red] {error}")
        return 1
    write(report, options)
    if options.json_path != "-":
        display.note(f"wrote {options.json_path} and {options.html_path}")
    return 0 if report["passed"] else 1


def run(options: Options, sizes: Sizes, display: ConsoleDisplay) -> dict[str, Any]:
    """Both parts; shows table and promises. Returns the report that goes into demo-report.json."""
    import torch

    from engine_adapter.demo.document import kept_promises, report_document, unchecked_because
    from engine_adapter.demo.parts import exact_part, memory_part
    from engine_adapter.model_source import load_model

    torch.set_num_threads(options.threads)
    started, cpu_started = time.perf_counter(), time.process_time()
    display.note("loading the model in float32 (the first time it is converted, about 25 s)")
    loaded = load_model(options.model, torch.float32)
    exact = exact_part(loaded, sizes, display, options.below)
    display.note("loading the model in bfloat16")
    loaded = load_model(options.model, torch.bfloat16)
    memory = memory_part(loaded, sizes, display, options.below)
    report = report_document(
        options=options,
        sizes=sizes,
        loaded=loaded,
        exact=exact,
        memory=memory,
        wall_seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu_started,
    )
    display.table([*exact.settings, *memory.settings])
    display.promises(kept_promises(options, exact, memory), unchecked_because(options))
    return report


def write(report: dict[str, Any], options: Options) -> None:
    """Both files; JSON with '-' goes to standard output."""
    from engine_adapter.demo.page import render

    text = json.dumps(report, indent=1, ensure_ascii=False)
    if options.json_path == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(options.json_path).write_text(text + "\n", encoding="utf-8")
    Path(options.html_path).write_text(render(report), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
