"""`make demo-daemon`: two engines, one after the other, over one `kvstore serve`: the second reuses the first's work.

    python -m engine_adapter.demo.daemon [--json FILE]

Each engine is a process of its own with its own memory and the real model in float32, and answers one question about
each document, one at a time. Shown are the times to the first token, where the prompts' tokens came from, and whether
the answers are equal. Exit code 0: they are, and the second engine took the documents from the daemon; 1: not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_adapter.demo.__main__ import cannot_write, wait_without_spinning
from engine_adapter.demo.serving import daemon_at
from engine_adapter.demo.settings import THREADS_MOST

_DOCUMENTS = 4
_DOCUMENT_TOKENS = 1000
_NEW_TOKENS = 16
_STEP_TOKENS = 256
_HOST_BYTES = "512 MiB"
_DRAIN_SECONDS = 60.0
_BLOCK_TOKENS = 16


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.demo.daemon", description="Two engine processes share one daemon."
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of another Hugging Face causal model")
    parser.add_argument("--json", default="demo-daemon.json", metavar="FILE", help="report; '-' for standard output")
    parser.add_argument("--tokens", type=int, default=_DOCUMENT_TOKENS, help="tokens of each document (default 1000)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="threads of torch (default 2)")
    parser.add_argument("--engine", metavar="SOCKET", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not 100 <= given.tokens <= 4000 or not 1 <= given.threads <= THREADS_MOST:
        parser.error(f"got --tokens {given.tokens} --threads {given.threads}; expected 100..4000 and 1..{THREADS_MOST}")
    if given.model is not None and not (given.model / "config.json").is_file():
        parser.error(f"--model: no model in {given.model}; expected a folder with a config.json")
    if given.json != "-" and (problem := cannot_write(Path(given.json).absolute())):
        parser.error(f"--json: {problem}")
    return given


# one engine -----------------------------------------------------------------------------------------------------------


def engine(given: argparse.Namespace) -> dict[str, Any]:
    """Answer the questions; by request: answer, time to the first token, where the prompt's tokens came from."""
    import torch

    from engine_adapter.decode_loop import DecodeLoop
    from engine_adapter.demo.parts import ample_bytes, eos_token_ids
    from engine_adapter.demo.serve import Server
    from engine_adapter.demo.workload import ChatFormat, Session, Workload, document_sessions
    from engine_adapter.model_source import load_model
    from engine_adapter.runner import HFRunner
    from kvstore import Identity, KVStore, KVStoreConfig

    torch.set_num_threads(given.threads)
    loaded = load_model(given.model, torch.float32)
    chat = ChatFormat(loaded.tokenizer)
    sessions = tuple(document_sessions(chat, _DOCUMENTS, given.tokens, _DOCUMENTS))
    work = Workload(sessions, 1, _NEW_TOKENS, eos_token_ids(loaded))
    warm_up = Workload((Session("warm-up", "", chat.first("Hello!")),), 1, 2, work.eos_token_ids)
    runner = HFRunner(loaded.model, block_tokens=_BLOCK_TOKENS)
    config = KVStoreConfig(
        device_bytes=2 * ample_bytes(runner.geometry, work),
        codec="raw",
        daemon_socket=given.engine,
        spill_policy="everything",
        spill_blocks_per_step=_STEP_TOKENS // _BLOCK_TOKENS,
        share=True,
    )
    identity = Identity(model=loaded.name, weights=loaded.weights, geometry=runner.geometry)
    with KVStore(runner.geometry, identity, config) as store:
        assert store.slab is not None
        runner.attach(store.slab, store.cold_codec)
        loop = DecodeLoop(runner, store, max_batch_sequences=1, step_tokens=_STEP_TOKENS)
        Server(loop, store, exact=True).run(warm_up)
        served = Server(loop, store, exact=True).run(work)
        store.close(_DRAIN_SECONDS)
    return {
        name: {
            "answer": list(result.token_ids),
            "prompt_tokens": result.prompt_tokens,
            "computed_tokens": result.computed_prefill_tokens,
            "reused_tokens": dict(result.reused_tokens),
            "ttft_seconds": result.ttft_seconds,
        }
        for name, result in served.results.items()
    }


# both -----------------------------------------------------------------------------------------------------------------


def run_engine(given: argparse.Namespace, path: Path) -> tuple[dict[str, Any], float]:
    command = [sys.executable, "-m", "engine_adapter.demo.daemon", "--engine", str(path)]
    command += ["--tokens", str(given.tokens), "--threads", str(given.threads), "--json", "-"]
    command += [] if given.model is None else ["--model", str(given.model)]
    started = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"an engine ended with exit code {done.returncode}")
    return json.loads(done.stdout), time.perf_counter() - started


def report_of(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """What is shown. Every full block of a prompt but the last token's is to be reused: what the second engine's own
    prompts have in common from its device, the rest from the daemon."""
    rows = [
        {
            "document": name,
            "prompt_tokens": cold["prompt_tokens"],
            "reused_tokens": sum(second[name]["reused_tokens"].values()),
            "from_daemon_tokens": second[name]["reused_tokens"].get("daemon", 0),
            "first_ttft_seconds": cold["ttft_seconds"],
            "second_ttft_seconds": second[name]["ttft_seconds"],
            "answers_equal": cold["answer"] == second[name]["answer"],
        }
        for name, cold in first.items()
    ]
    whole = [(row["prompt_tokens"] - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS for row in rows]
    return {
        "documents": rows,
        "first_ttft_seconds": statistics.median(row["first_ttft_seconds"] for row in rows),
        "second_ttft_seconds": statistics.median(row["second_ttft_seconds"] for row in rows),
        "outputs_equal": all(row["answers_equal"] for row in rows),
        "all_reused": all(row["reused_tokens"] == most for row, most in zip(rows, whole, strict=True)),
    }


def show(report: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Two engine processes over one daemon", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("document", "tokens", "from daemon", "first TTFT", "second TTFT", "answers"):
        table.add_column(name, justify="left" if name == "document" else "right")
    for row in report["documents"]:
        table.add_row(
            row["document"],
            f"{row['prompt_tokens']:,}",
            f"{row['from_daemon_tokens']:,}",
            f"{row['first_ttft_seconds'] * 1e3:.0f} ms",
            f"{row['second_ttft_seconds'] * 1e3:.0f} ms",
            "equal" if row["answers_equal"] else "[bold red]differ[/bold red]",
        )
    console = Console(highlight=False)
    console.print(table)
    ratio = report["first_ttft_seconds"] / report["second_ttft_seconds"]
    console.print(f"The second engine's first token comes {ratio:.1f} times sooner (medians).")


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    wait_without_spinning()
    if given.engine:
        print(json.dumps(engine(given)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder:
        path = Path(folder) / "daemon.sock"
        with daemon_at(path, _HOST_BYTES):
            first, first_seconds = run_engine(given, path)
            second, second_seconds = run_engine(given, path)
    report = report_of(first, second) | {"engine_seconds": [round(first_seconds, 1), round(second_seconds, 1)]}
    text = json.dumps(report, indent=1)
    if given.json == "-":
        print(text)
    else:
        show(report)
        Path(given.json).write_text(text + "\n", encoding="utf-8")
        print(f"wrote {given.json}")
    return 0 if report["outputs_equal"] and report["all_reused"] else 1


if __name__ == "__main__":
    sys.exit(main())
