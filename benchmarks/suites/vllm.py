"""A real vLLM over each tier, beside one without the connector: `engine_adapter.demo.vllm` in vLLM's environment.

The ratios are to be read as: cold over warm, and without over with. Needs `make bench-peers` (or KVSTORE_VLLM_PYTHON).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

from benchmarks.peers import ROOT, peer_python
from benchmarks.rows import Options, Row, compared
from engine_adapter.demo.vllm import BARS
from engine_adapter.model_source import packaged_model_dir

_WARM_NOTE = (
    "warm: first token after a shared prefix of {tokens:,} tokens that comes from the tier, vLLM's own prefix cache "
    "emptied; beside the same engine family without the connector computing it, in turn. Asked for at most: "
    "{bars} of cold."
)
_MISS_NOTE = (
    "miss: an engine that looks the prompt up, finds nothing and stores nothing (kv_consumer), beside one without the "
    "connector, in turn; asked for at most 5 % more. storing: one that stores what it computes."
)
_ITL_NOTE = "itl: mean time between {new_tokens} tokens behind the prefix in vLLM's own cache; asked for within 5 %."


def rows(options: Options) -> Iterator[Row]:
    """Rows of every tier that is there. RuntimeError where an answer differs."""
    python = peer_python("KVSTORE_VLLM_PYTHON", ".venv-vllm")
    if python is None:
        options.log("vllm: no .venv-vllm here (make bench-peers): left out")
        return
    report = measured(python, options)
    if not report["passed"]:
        raise RuntimeError("vLLM over a tier answered otherwise than without, or did not load: see make demo-vllm")
    yield from report_rows(report)


def measured(python: str, options: Options) -> dict[str, Any]:
    """The demo's report, misses included."""
    command = [python, "-m", "engine_adapter.demo.vllm", "--json", "-", "--html", os.devnull, "--misses"]
    command += ["--model", str(packaged_model_dir()), "--rounds", str(1 if options.quick else min(options.rounds, 5))]
    command += ["--tokens", "512"] if options.quick else []
    # The benchmarks' own variables are no settings of a store, which refuses what it does not know.
    own = {name for name in os.environ if name.startswith("KVSTORE_") and name.endswith("_PYTHON")}
    environment = {name: value for name, value in os.environ.items() if name not in own} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.startswith("{"):
        raise RuntimeError(f"engine_adapter.demo.vllm ended with code {done.returncode}; its error is above")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def report_rows(report: dict[str, Any]) -> Iterator[Row]:
    """Rows from the demo's report."""
    bars = ", ".join(f"{name} {bar:.2f}" for name, bar in BARS.items())
    warm_note = _WARM_NOTE.format(tokens=report["prefix_tokens"], bars=bars)
    for tier in report["tiers"]:
        name, rounds = tier["tier"], tier["rounds"]

        def samples(key: str, what: str = "ttft_seconds", found: list[dict[str, Any]] = rounds) -> list[float]:
            return [one[key][what] * 1e3 for one in found if key in one and one[key][what] is not None]

        pairs = [
            (f"{name}_warm", "warm", "cold_plain", "cold", "ttft_seconds", warm_note),
            (f"{name}_miss", "cold_reader", "cold_plain", "without", "ttft_seconds", _MISS_NOTE),
            (f"{name}_storing", "cold_tier", "cold_plain", "without", "ttft_seconds", _MISS_NOTE),
            (f"{name}_itl", "itl_tier", "itl_plain", "without", "itl_seconds",
             _ITL_NOTE.format(new_tokens=report["new_tokens"])),
        ]  # fmt: skip
        for case, ours, theirs, baseline, what, note in pairs:
            values = samples(ours, what)
            if values:
                yield compared(
                    "vllm",
                    case,
                    "ms",
                    values,
                    better="smaller",
                    baseline=baseline,
                    theirs=samples(theirs, what),
                    note=note,
                )
