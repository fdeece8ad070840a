"""One vLLM computes a prompt, another answers from what the first has stored: `examples/prefill_and_decode.py`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_example_on_a_tiny_model(models: dict[str, Path]) -> None:
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/prefill_and_decode.py", "--model", str(models["full"]), "--tokens", "3000"]
    pipe = subprocess.PIPE
    example = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        shown, problems = example.communicate(timeout=550)
    finally:
        with suppress(ProcessLookupError):  # its engines and daemon too, however it ended
            os.killpg(example.pid, signal.SIGKILL)
        example.wait()
    assert example.returncode == 0, shown[-2000:] + problems[-4000:]
    assert re.search(r"prefill: 3000 prompt tokens computed", shown)
    assert re.search(r"decode: 2992 of them loaded, 16 tokens answered", shown)
    assert "the first engine answers the same" in shown
