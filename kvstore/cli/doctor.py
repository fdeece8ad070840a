"""`kvstore doctor`: what of this library runs on this machine, and why not more; which tiers work; why a model is slow.

The check of the kernels asks quant.dispatch; packages above offer theirs by an entry point of the group
`kvstore.doctor` whose name begins with the check's ("kernels-attention"): a function without arguments that offers
operations. Neither torch nor a package above is imported here, unless --measure makes one work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer

from allocator.errors import ConfigError
from kvstore.cli import doctor_speed, json_target
from kvstore.cli.doctor_speed import CHECKS_GROUP
from kvstore.cli.machine import HugePages, huge_pages, threads
from kvstore.diagnosis.measurements import Probes
from quant.dispatch import Speed

Report = dict[str, Any]


def doctor(  # noqa: PLR0913 - the signature is the command line
    kernels: Annotated[bool, typer.Option("--kernels", help="Which path runs each operation (the default).")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="With --kernels: a quick figure per operation.")] = False,
    install: Annotated[bool, typer.Option("--install", help="What is installed, and what is absent.")] = False,
    tiers: Annotated[bool, typer.Option("--tiers", help="Store and read blocks in every configured tier.")] = False,
    config: Annotated[Path | None, typer.Option(help="With --tiers: settings (TOML); KVSTORE_* go over it.")] = None,
    url: Annotated[str | None, typer.Option(help="Why this OpenAI-compatible endpoint is slow.")] = None,
    loop: Annotated[
        bool, typer.Option("--loop", help="The same of our own decode loop (the server is started).")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="With --url: of the models there, the first if not given. With --loop: a folder.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="With --url: file with a bearer token.")] = None,
    prompt_tokens: Annotated[str, typer.Option(help="With --url or --loop: prompt lengths to ask.")] = "128,512,2048",
    answer_tokens: Annotated[int, typer.Option(help="With --url or --loop: length of the answers.")] = 64,
    concurrency: Annotated[str, typer.Option(help="With --url or --loop: how many at once, beside one.")] = "4",
    rounds: Annotated[int, typer.Option(help="With --url or --loop: how often each length is asked.")] = 3,
    seconds: Annotated[float, typer.Option(help="With --url or --loop: begin nothing after that long.")] = 300.0,
    seed: Annotated[int | None, typer.Option(help="With --url or --loop: of the prompts; else drawn.")] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report; - is standard output.")
    ] = None,
) -> None:
    """Say what runs on this machine and why nothing better does; or why an endpoint is slow.

    Exit code 1 when something is wrong (a stale build, a failed self-test, a tier that does not work, a setting that
    cannot be met, measurements that carry no verdict), 0 when all that is there works; what is absent is listed.
    """
    _check_targets(json_file, config, tiers)
    report: Report = {}
    printers: list[Callable[[], None]] = []
    wrong = False
    if url is not None or loop:
        if url is not None and loop:
            raise typer.BadParameter("got --url and --loop; expected one of them")
        try:
            probes = Probes(
                doctor_speed.counts("--prompt-tokens", prompt_tokens),
                answer_tokens,
                doctor_speed.counts("--concurrency", concurrency),
                rounds,
                seconds,
            )
            with doctor_speed.endpoint(url, model, _token(token_file), seconds) as asked:
                report["speed"], diagnosis = doctor_speed.speed_report(asked, probes, seed)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        wrong = diagnosis.verdict.refused is not None
        printers.append(lambda: doctor_speed.print_speed(report["speed"]))
    if install:
        from kvstore.cli import doctor_install

        report["install"] = doctor_install.install_report()
        printers.append(lambda: doctor_install.print_install(report["install"]))
    if tiers:
        from kvstore.cli import doctor_tiers

        try:
            report["tiers"] = doctor_tiers.tiers_report(config)
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error  # which may be of the environment
        printers.append(lambda: doctor_tiers.print_tiers(report["tiers"]))
    if kernels or not report:
        report["kernels"] = kernel_report(measure=measure)
        printers.append(lambda: _print(report["kernels"]))
    if json_file is not None:
        json_target.write(json_file, report)
    if json_file != "-":
        for show in printers:
            show()
    wrong = wrong or any(part.get("problems") for part in report.values())
    raise typer.Exit(1 if wrong else 0)


def _check_targets(json_file: str | None, config: Path | None, tiers: bool) -> None:
    if json_file is not None and (problem := json_target.cannot_write(json_file)):
        raise typer.BadParameter(problem, param_hint="--json")
    if config is not None and not tiers:
        raise typer.BadParameter("goes with --tiers only, which is not given", param_hint="--config")


def _token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path}: cannot be read ({error})", param_hint="--token-file") from error


def kernel_report(*, measure: bool = False) -> Report:
    """What --json writes under "kernels"."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # what an import warns of is in the report
        import kvstore.operations  # noqa: F401 - offers the hash chain
        from quant import dispatch, native
        from quant.native import choice
    problems = _ask_packages_above()
    states = native.self_test_every_path()
    problems += [f"path {one.name}: {one.reason}" for one in states if one.failed]
    if native.kernels is None and not native.reason.startswith(("not built", "switched off")):
        problems.append(native.reason)
    operations = []
    for decision in dispatch.decisions():
        speed = dispatch.measured(decision.operation, decision.device) if measure else None
        operations.append(
            {
                "operation": decision.operation,
                "device": decision.device,
                "path": decision.path,
                "passed_over": [{"path": name, "reason": reason} for name, reason in decision.passed_over],
                "speed": None if speed is None else asdict(speed),
            }
        )
    return {
        "abi": choice.ABI,
        "extension": None if native.kernels is None else native.kernels.__file__,
        "reason": native.reason,
        "active": native.active_path(),
        "paths": [
            {"path": one.name, "usable": one.usable, "reason": one.reason, "self_tested": one.tested} for one in states
        ],
        "cpu_features": list(native.features()),
        "threads": threads(),
        "huge_pages": asdict(huge_pages()),
        "operations": operations,
        "problems": problems,
    }


def _ask_packages_above() -> list[str]:
    """Let them offer what they run; what went wrong."""
    problems = []
    for entry in sorted(entry_points(group=CHECKS_GROUP), key=lambda entry: entry.name):
        if entry.name.partition("-")[0] != "kernels":
            continue
        try:
            entry.load()()
        except Exception as error:  # told in the report: one package's check must not hide the others
            problems.append(f"check {entry.name}: {type(error).__name__}: {error}")
    return problems


def _print(report: Report) -> None:
    """Plain aligned text: reasons are long, and must neither wrap in a log nor be cut off."""
    rows = [("operation", "device", "path", "speed", "why nothing better")]
    for one in report["operations"]:
        speed = Speed(**one["speed"]) if one["speed"] else ""
        rows.append((one["operation"], one["device"], one["path"], str(speed), _reasons(one["passed_over"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    widths[3] = widths[3] if any(row[3] for row in rows[1:]) else 0
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width]
        typer.echo("  ".join(cells).rstrip())
    typer.echo()
    for line in _machine_lines(report):
        typer.echo(line)


def _reasons(passed_over: list[dict[str, str]]) -> str:
    """Why nothing better runs; said once where it is the same for all."""
    distinct = {one["reason"] for one in passed_over}
    if len(distinct) == 1 and len(passed_over) > 1:
        return f"{', '.join(one['path'] for one in passed_over)}: {distinct.pop()}"
    return "; ".join(f"{one['path']}: {one['reason']}" for one in passed_over)


def _machine_lines(report: Report) -> list[str]:
    pages = HugePages(**report["huge_pages"])
    cores = report["threads"]
    lines = [f"native    {report['active'] or 'none: ' + report['reason']} (ABI {report['abi']})"]
    for one in report["paths"]:
        said = one["reason"] or "runs here" + (", passed its self-test" if one["self_tested"] else "")
        lines.append(f"          {one['path']}: {said}")
    lines.append(f"CPU       {', '.join(report['cpu_features']) or 'no feature that a path uses'}")
    quota = f", {cores['cpu_quota']:g} paid for" if cores["cpu_quota"] else ""
    asked = f", OMP_NUM_THREADS={cores['omp_num_threads']}" if cores["omp_num_threads"] else ""
    lines.append(f"threads   {cores['cores']} cores{quota}{asked}; callers pass torch.get_num_threads()")
    lines.append(f"memory    transparent huge pages: {pages.setting}; {pages.meaning}")
    if not entry_points(group=CHECKS_GROUP):
        lines.append("note      no package above has registered (is kvstore-llm installed?): attention is not listed")
    lines += [f"problem   {one}" for one in report["problems"]]
    return lines
