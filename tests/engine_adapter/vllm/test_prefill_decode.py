"""One vLLM computes a prompt, another answers from what the first has stored: `examples/prefill_and_decode.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_the_example_on_a_tiny_model(models: dict[str, Path]) -> None:
    environ = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "examples/prefill_and_decode.py", "--model", str(models["full"]), "--tokens", "3000"]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"prefill: 3000 prompt tokens computed", done.stdout)
    assert re.search(r"decode: 2992 of them loaded, 16 tokens answered", done.stdout)
    assert "the first engine answers the same" in done.stdout
