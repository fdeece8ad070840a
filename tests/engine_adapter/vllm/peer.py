"""Another process that runs vLLM engines for the tests: one after the other, each over the tiers that it is told.

python -m tests.engine_adapter.vllm.peer reads a line of JSON for each, and prints one with what the engine answered.
An engine of several ranks has a process for each of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_MARK = "RESULT "
_SECONDS = 300.0


class Peer:
    """The process, while tests use it."""

    def __init__(self, log: Path) -> None:
        environ = {**os.environ, "PYTHONPATH": os.getcwd(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # more ranks than cores are not refused
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine_adapter.vllm.peer"],
                env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip

    def run(self, model: Path, tiers: dict[str, Any], prompts: list[list[int]], ranks: int = 1) -> dict[str, Any]:
        """answers: greedy tokens and how many of the prompt's were cached, each. hits: tokens loaded, says vLLM."""
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        pipe_in.write(json.dumps([str(model), tiers, prompts, ranks]) + "\n")
        pipe_in.flush()
        watch = threading.Timer(_SECONDS, self._process.kill)
        watch.start()
        shown = []
        for line in pipe_out:
            if line.startswith(_MARK):
                watch.cancel()
                found: dict[str, Any] = json.loads(line.removeprefix(_MARK))
                return found
            shown.append(line)
        watch.cancel()
        raise AssertionError("".join(shown)[-2000:] + self._log.read_text()[-4000:])

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    from tests.engine_adapter.vllm.kit import engine

    for line in sys.stdin:
        model, tiers, prompts, ranks = json.loads(line)
        with engine(Path(model), tiers, tensor_parallel_size=ranks) as made:
            answers = [made.answer(one) for one in prompts]
            hits = made.external_hits()
            if ranks == 1:
                made.settle()
            else:
                time.sleep(0.5)  # what waits in the ranks' processes is written
        print(_MARK + json.dumps({"answers": answers, "hits": hits}), flush=True)


if __name__ == "__main__":
    main()
