"""Peers in processes of their own: another environment's interpreter, one JSON request and one answer at a time.

A peer module reads lines `{"method": ..., "arguments": [...]}` and answers `{"seconds": ...}` or `{"error": ...}`; its
first line says `{"version": ...}`. `serve` is that loop for the peer's side; it imports nothing but the standard
library, so every environment has it.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]


class PeerError(RuntimeError):
    """The peer ended, or said that it could not do what it was asked."""


def peer_python(variable: str, environment_name: str) -> str | None:
    """An interpreter that has the peer: named by the environment, made by `make bench-peers`, or none."""
    named = os.environ.get(variable)
    if named:
        if not Path(named).is_file():
            raise RuntimeError(f"{variable} is {named!r}, which is no file: expected a Python interpreter")
        return named
    made = ROOT / environment_name / "bin" / "python"
    return str(made) if made.is_file() else None


class PeerProcess:
    """A running peer. Raises PeerError when it cannot start or answers with an error."""

    def __init__(self, python: str, module: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._module = module
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if "pytest" in sys.modules else None,
            text=True,
        )
        self.version = str(self._answer()["version"])

    def seconds(self, method: str, *arguments: object) -> float:
        """Have one thing done once."""
        return float(self.ask(method, *arguments)["seconds"])

    def ask(self, method: str, *arguments: object) -> dict[str, Any]:
        """The peer's whole answer."""
        assert self._process.stdin is not None
        print(json.dumps({"method": method, "arguments": arguments}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process; may already have ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _answer(self) -> dict[str, Any]:
        answers: IO[str] | None = self._process.stdout
        assert answers is not None
        line = answers.readline()
        if not line:
            code = self._process.wait(timeout=60)
            raise PeerError(f"the peer {self._module} ended with code {code}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"the peer {self._module}: {answer['error']}")
        return answer


def serve(side: object, version: str) -> None:
    """The peer's side: answer until standard input ends. A method's result is its seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints must not land between the answers
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            found: dict[str, object] = {"seconds": getattr(side, asked["method"])(*asked["arguments"])}
        except Exception as error:  # the other process must hear of it, whatever it is
            found = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        print(json.dumps(found), file=answers, flush=True)
