"""`make demo-vllm`: the time to the first token in a real vLLM, cold and from each tier.

    python -m engine_adapter.demo.vllm [--tiers host,disk,redis,daemon] [--json FILE] [--html FILE]

Runs where vLLM is. One vLLM without the connector stays beside one over each tier in turn. Every round takes another
page of Python's documentation as the prefix that two questions share: both engines read it cold, in turn; the second
question is asked after vLLM's own cache was emptied, so that the prefix comes from the tier. Exit code 0: all answers
are those of the vLLM without the connector, and every shared prefix was loaded; 1: not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from engine_adapter.demo.__main__ import cannot_write, wait_without_spinning
from engine_adapter.demo.serving import MissingServerError
from engine_adapter.demo.vllm_engines import TIERS, Answered, Engine, tier_settings

BARS = {"host": 0.10, "disk": 0.12, "redis": 0.15, "daemon": 0.12}
"""What is asked for: TTFT warm over cold, at a prefix of 4,096 tokens."""
_BLOCK_TOKENS = 16
_QUESTION_TOKENS = 24
_ROOM_TOKENS = 512
_WRITE_SECONDS = 1.0  # what is written behind the first answer must not count with the second
_TRIES = 4


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.demo.vllm", description="TTFT of a real vLLM, cold and from each tier."
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of another model; default SmolLM2-135M")
    parser.add_argument("--json", default="demo-vllm.json", metavar="FILE", help="report; '-' for standard output")
    parser.add_argument("--html", default="demo-vllm.html", metavar="FILE", help="page with charts")
    parser.add_argument("--tiers", default=",".join(TIERS), metavar="NAME[,NAME]", help=f"of {', '.join(TIERS)}")
    parser.add_argument("--redis", default="", metavar="URL", help="a server that is there, instead of a fresh one")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the shared prefix (default 4096)")
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of each answer (default 16)")
    parser.add_argument("--rounds", type=int, default=3, help="prefixes for each tier (default 3)")
    parser.add_argument("--misses", action="store_true", help="also an engine that may only load, and finds nothing")
    given = parser.parse_args(arguments)
    given.tiers = [name for name in given.tiers.split(",") if name]
    unknown = sorted(set(given.tiers) - set(TIERS))
    if unknown or not given.tiers:
        parser.error(f"--tiers: got {', '.join(unknown) or 'nothing'}; expected of {', '.join(TIERS)}")
    if not 64 <= given.tokens <= 100_000 or not 1 <= given.rounds <= 1000 or not 1 <= given.new_tokens <= 10_000:
        parser.error(f"got --tokens {given.tokens} --rounds {given.rounds} --new-tokens {given.new_tokens}; expected "
                     "64..100000, 1..1000, 1..10000")  # fmt: skip
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: no model in {given.model}; expected a folder with a config.json")
    for name, path in (("--json", given.json), ("--html", given.html)):
        problem = None if path in ("-", os.devnull) else cannot_write(Path(path).absolute())
        if problem:
            parser.error(f"{name}: {problem}")
    if given.html == "-":
        parser.error("--html: expected a file; only --json may go to standard output")
    return given


# what is asked --------------------------------------------------------------------------------------------------------


def prefixes(tokenizer: Any, count: int, token_count: int) -> list[list[int]]:
    """Pieces of Python's documentation, no two alike. ValueError where it is too short for so many."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) < count * token_count:
        raise ValueError(f"{count} pieces of {token_count} tokens: this Python's documentation has {len(ids)} tokens")
    return [list(ids[number * token_count : (number + 1) * token_count]) for number in range(count)]


def questions(tokenizer: Any) -> list[list[int]]:
    texts = ("\n\nIn one sentence, what is this page about?", "\n\nWhich exceptions are named above, and why?")
    return [list(tokenizer.encode(text, add_special_tokens=False))[:_QUESTION_TOKENS] for text in texts]


# measuring ------------------------------------------------------------------------------------------------------------


def measure_round(
    number: int, sides: dict[str, Engine], prefix: list[int], asked: list[list[int]], new_tokens: int
) -> dict[str, Answered]:
    """One prefix in all engines. Cold in turn, another first each time; then warm, and where vLLM has it itself."""
    first, second = (prefix + one for one in asked)
    names = list(sides)
    turn = number % len(names)
    found = {f"cold_{name}": sides[name].answer(first, new_tokens) for name in names[turn:] + names[:turn]}
    tiered, whole = sides["tier"], len(prefix) // _BLOCK_TOKENS * _BLOCK_TOKENS
    for attempt in range(_TRIES):
        time.sleep(_WRITE_SECONDS * 2**attempt)
        tiered.forget()
        found["warm"] = tiered.answer(second, new_tokens)
        if found["warm"].cached_tokens >= whole:
            break
    pair = [("itl_plain", sides["plain"]), ("itl_tier", tiered)]
    for name, side in pair[:: 1 - 2 * (number % 2)]:  # both have it in vLLM's own cache now, but for the question
        side.answer(second, 1)
        found[name] = side.answer(second, new_tokens)
    return found


def measure_tier(
    name: str,
    given: argparse.Namespace,
    model: Path,
    plain: Engine,
    pages: list[list[int]],
    note: Callable[[str], None],
) -> dict[str, Any]:
    """All rounds over one tier, one that does not count before them."""
    size = given.tokens + _ROOM_TOKENS
    with tier_settings(name, given.redis) as settings:
        sides = {"plain": plain}
        try:
            sides["tier"] = Engine(model, settings, **engine_settings(size))
            if given.misses:
                strange = {**settings, "tenant": "a stranger"}
                if "disk_path" in strange:  # a directory has one writer
                    strange["disk_path"] += "-of-a-stranger"
                sides["reader"] = Engine(model, strange, role="kv_consumer", **engine_settings(size))
            asked = questions(plain.tokenizer)
            measure_round(0, sides, pages[-1][:256], asked, 2)
            rounds = []
            for number, prefix in enumerate(pages[: given.rounds]):
                found = measure_round(number, sides, prefix, asked, given.new_tokens)
                rounds.append({key: asdict(one) for key, one in found.items()})
                cold, warm = found["cold_plain"].ttft_seconds, found["warm"].ttft_seconds
                note(f"  {name}: cold {cold:.2f} s, warm {warm:.3f} s ({warm / cold:.3f})")
        finally:
            for side, engine in sides.items():
                if side != "plain":
                    engine.close()
    return tier_report(name, rounds, given.tokens)


def engine_settings(size: int) -> dict[str, Any]:
    """Room for two prompts and more, so that nothing is preempted; a prompt in few steps."""
    return {"max_model_len": size, "kv_cache_memory_bytes": 1 << 30, "max_num_batched_tokens": 2048}


def tier_report(name: str, rounds: list[dict[str, Any]], prefix_tokens: int) -> dict[str, Any]:
    """Medians over the rounds, and what has to be true of all of them."""

    def median(key: str, what: str = "ttft_seconds") -> float | None:
        values = [one[key][what] for one in rounds if key in one and one[key][what] is not None]
        return statistics.median(values) if values else None

    cold, warm = median("cold_plain"), median("warm")
    assert cold is not None
    assert warm is not None
    whole = prefix_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
    equal = [
        one[f"cold_{side}"]["token_ids"] == one["cold_plain"]["token_ids"]
        and one["warm"]["token_ids"] == one["itl_plain"]["token_ids"] == one["itl_tier"]["token_ids"]
        for one in rounds
        for side in ("tier", "reader")
        if f"cold_{side}" in one
    ]
    return {
        "tier": name,
        "cold_ttft_seconds": cold,
        "storing_ttft_seconds": median("cold_tier"),
        "miss_ttft_seconds": median("cold_reader"),
        "own_cache_ttft_seconds": median("itl_plain"),
        "warm_ttft_seconds": warm,
        "warm_over_cold": warm / cold,
        "bar": BARS[name],
        "itl_plain_seconds": median("itl_plain", "itl_seconds"),
        "itl_tier_seconds": median("itl_tier", "itl_seconds"),
        "answers_equal": all(equal),
        "all_loaded": all(one["warm"]["cached_tokens"] >= whole for one in rounds),
        "rounds": rounds,
    }


def run(given: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    import vllm

    from engine_adapter.demo.document import machine
    from engine_adapter.model_source import packaged_model_dir

    model = given.model or packaged_model_dir()
    started = time.perf_counter()
    note("starting vLLM without the connector")
    plain = Engine(model, None, **engine_settings(given.tokens + _ROOM_TOKENS))
    try:
        pages = prefixes(plain.tokenizer, given.rounds * len(given.tiers) + 1, given.tokens)
        tiers, missing = [], {}
        for place, name in enumerate(given.tiers):
            note(f"starting vLLM over {name}")
            ours = pages[place * given.rounds : (place + 1) * given.rounds]
            try:
                tiers.append(measure_tier(name, given, model, plain, [*ours, pages[-1]], note))
            except MissingServerError as problem:
                missing[name] = str(problem)
                note(f"{name} left out: {problem}")
    finally:
        plain.close()
    if not tiers:
        raise ValueError("no tier could be measured: " + "; ".join(missing.values()))
    return {
        "passed": all(one["answers_equal"] and one["all_loaded"] for one in tiers),
        "prefix_tokens": given.tokens,
        "new_tokens": given.new_tokens,
        "tiers": tiers,
        "left_out": missing,
        "model": model.name,
        "vllm": vllm.__version__,
        "machine": machine(len(os.sched_getaffinity(0))),
        "wall_seconds": time.perf_counter() - started,
    }


def show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"Time to the first token in vLLM, {report['prefix_tokens']:,} tokens shared (medians, ms)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("tier", "cold", "storing", "own cache", "warm", "ratio", "asked for", "answers"):
        table.add_column(name, justify="left" if name == "tier" else "right")
    for one in report["tiers"]:
        met = one["warm_over_cold"] <= one["bar"]
        table.add_row(
            one["tier"],
            *(f"{one[f'{key}_ttft_seconds'] * 1e3:,.0f}" for key in ("cold", "storing", "own_cache", "warm")),
            f"{one['warm_over_cold']:.3f}",
            f"{one['bar']:.2f}, " + ("held" if met else "[bold red]missed[/bold red]"),
            "equal" if one["answers_equal"] and one["all_loaded"] else "[bold red]WRONG[/bold red]",
        )
    console = Console(highlight=False)
    console.print(table)
    for name, problem in report["left_out"].items():
        console.print(f"{name} was left out: {problem}")


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    wait_without_spinning()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of the libraries in vLLM's processes
    from engine_adapter.demo.vllm_page import render

    try:
        report = run(given, lambda line: print(line, file=sys.stderr, flush=True))
    except (FileNotFoundError, ImportError, ValueError) as error:
        print(f"cannot run: {error}", file=sys.stderr)
        return 1
    Path(given.html).write_text(render(report), encoding="utf-8")
    text = json.dumps(report, indent=1)
    if given.json == "-":
        print(text)
    else:
        show(report)
        Path(given.json).write_text(text + "\n", encoding="utf-8")
        print(f"wrote {given.json} and {given.html}")
    return 0 if report["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
