"""The main job on a device that is not the CPU, where no card is: a stand-in, in a process of its own.

torch cannot forget a device, so pytest runs `on_stand_in.py` in a child. With a card `tests/gpu` runs the same cases.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("on_stand_in.py")


def test_the_main_job_on_another_device() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=plain, timeout=600, cwd=CASES.parents[2]
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
