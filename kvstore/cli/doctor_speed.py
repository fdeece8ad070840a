"""`kvstore doctor --url`: where an endpoint's time goes, and why. Asks, shows, and writes what was found."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

import typer

from allocator.errors import ConfigError
from kvstore.diagnosis.endpoint import Endpoint
from kvstore.diagnosis.measurements import Probes, measure
from kvstore.diagnosis.verdict import Diagnosis, diagnose

CHECKS_GROUP = "kvstore.doctor"
Report = dict[str, Any]


def speed_report(endpoint: Endpoint, probes: Probes, seed: int | None) -> tuple[Report, Diagnosis]:
    """What --json writes under "speed". ConfigError when the endpoint cannot be asked at all."""
    seed = secrets.randbits(48) if seed is None else seed
    endpoint.connect()
    found = measure(endpoint, probes, seed, on_step=_say if sys.stderr.isatty() else lambda _: None)
    diagnosis = diagnose(found)
    report = {
        "url": endpoint.url,
        "model": endpoint.model,
        "seed": seed,
        "prompt_tokens": list(probes.prompt_tokens),
        "answer_tokens": probes.answer_tokens,
        "rounds": probes.rounds,
        "requests": len(found.samples),
        **diagnosis.to_json(),
    }
    return report, diagnosis


def counts(name: str, text: str) -> tuple[int, ...]:
    """'128,512' as numbers. BadParameter for anything else."""
    try:
        return tuple(sorted({int(one) for one in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"got {text!r}; expected numbers with commas", param_hint=name) from None


def print_speed(report: Report) -> None:
    """Both phases, the shares and the verdict."""
    typer.echo(f"endpoint  {report['url']}, model {report['model']}; {report['requests']} requests")
    _print_phase("TTFT", report["ttft"], "a token")
    _print_phase("ITL", report["itl"], "a token of context")
    if report["repeated_prompt_share"] is not None:
        typer.echo(f"cache     the longest prompt again: {report['repeated_prompt_share']:.0%} of its first TTFT")
    for one in report["shares"]:
        typer.echo(
            f"{one['requests_at_once']:>3} at once  queue {one['queue_seconds']:.3f} s, prompt "
            f"{one['prompt_seconds']:.3f} s, decode {one['decode_seconds']:.3f} s, a step "
            f"{one['step_seconds'] * 1e3:.2f} ms; {one['answers_at_once']} "
            f"answer{'' if one['answers_at_once'] == 1 else 's'} at the same time"
        )
    verdict = report["verdict"]
    typer.echo()
    typer.echo(f"verdict   {'none: ' if verdict['refused'] else ''}{verdict['because']}")
    for line in verdict["evidence"]:
        typer.echo(f"          {line}")
    for line in verdict["remedies"]:
        typer.echo(f"helps     {line}")


def _short(seconds: float) -> str:
    """0.00177 -> "1.77 ms"."""
    unit, factor = next(
        (pair for pair in (("s", 1.0), ("ms", 1e3), ("us", 1e6)) if seconds * pair[1] >= 1), ("ns", 1e9)
    )
    return f"{seconds * factor:.3g} {unit}"


def _print_phase(name: str, phase: Report, growth: str) -> None:
    shown: Sequence[str] = [
        f"{one['seconds'] * 1e3:.2f} ms at {one['tokens']:,.0f} tokens (median {one['spread']:.0%} above)"
        for one in phase["points"]
    ]
    typer.echo(f"{name:<9} {', '.join(shown) or 'not measured'}")
    if (line := phase["fit"]) is not None:
        typer.echo(
            f"          = {line['fixed_seconds'] * 1e3:.2f} ms + {_short(line['token_seconds'])} {growth} "
            f"(explains {line['quality']:.0%})"
        )


def _say(step: str) -> None:
    typer.echo(f"  {step}", err=True)


@contextmanager
def endpoint(url: str | None, model: str | None, token: str | None, timeout_seconds: float) -> Iterator[Endpoint]:
    """The endpoint at `url`; without one, our own decode loop over the model in the folder `model`, while it lasts."""
    if url is not None:
        yield Endpoint(url, model=model, token=token, timeout_seconds=timeout_seconds)
        return
    found = [one for one in entry_points(group=CHECKS_GROUP) if one.name == "loop"]
    if not found:
        raise ConfigError("loop: no package above offers one (is kvstore-llm installed?)")
    with found[0].load()([] if model is None else ["--model", model]) as own_url:
        yield Endpoint(own_url, timeout_seconds=timeout_seconds)
