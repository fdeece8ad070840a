"""Examples in the documentation are the first code that anyone runs, so they are run here, exactly as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import resident_table

ROOT = Path(__file__).resolve().parents[2]


def example(page: str = "README.md") -> str:
    found = re.findall(r"<!-- executed by .*? -->\n```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert len(found) == 1
    return str(found[0])


def test_example_fits_a_glance() -> None:
    assert len(example().splitlines()) <= 25


def run(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
def test_example_prints_reused_tokens() -> None:
    printed = run(example())
    reused = [int(number) for number in re.findall(r"reused (\d+) tokens", printed)]
    assert len(reused) == 2, printed
    assert reused[0] == 0
    assert reused[1] >= 16


def test_the_engine_of_the_how_to_reuses_a_prompt_and_reads_cold_blocks() -> None:
    code = example("docs/how-to/write-an-adapter.md")
    assert len(code.splitlines()) <= 80
    code = code.replace("store.close()", "print(store.usage().bytes_by_class['full:0-1:int4'])\nstore.close()")
    first, second, cold_bytes = run(code).splitlines()
    assert int(cold_bytes) > 0
    assert first.startswith("first nothing reusable")
    assert second.startswith("second 288 tokens reusable")


def test_the_engine_of_the_how_to_is_right() -> None:
    """Without cold blocks the second answer equals the first, though its prompt was not computed."""
    code = example("docs/how-to/write-an-adapter.md").replace("KVStoreConfig(", 'KVStoreConfig(codec="raw", ')
    answers = [line[line.index("[") :] for line in run(code).splitlines()]
    assert len(answers) == 2
    assert answers[0] == answers[1]


def test_the_table_of_resident_blocks_is_what_the_command_prints() -> None:
    rows = resident_table.rows()
    page = (ROOT / "README.md").read_text()
    assert "<!-- printed by python -m benchmarks.resident_table -->\n" + "\n".join(rows) + "\n\n" in page
    cells = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ") for line in rows[2:]}
    assert cells["llama-3.1-70b"][-1] == "8.0 times"
    assert cells["mistral-7b"][3] == cells["mistral-7b"][4], "bounded by the window"
    assert float(cells["deepseek-v3"][2]) == round(61 * (512 + 64) * 2 / 1024, 1), "one latent a token and layer"
