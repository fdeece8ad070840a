"""The README's example is the first code that anyone runs, so it is run here, exactly as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def example() -> str:
    found = re.findall(r"<!-- executed by .*? -->\n```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_example_fits_a_glance() -> None:
    assert len(example().splitlines()) <= 25


@pytest.mark.model
def test_example_prints_reused_tokens() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", example()], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    reused = [int(number) for number in re.findall(r"reused (\d+) tokens", done.stdout)]
    assert len(reused) == 2, done.stdout
    assert reused[0] == 0
    assert reused[1] >= 16
