"""The daemon's suite has every case that is asked for, but those that need a peer which may not be here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.targets import targets

ROOT = Path(__file__).resolve().parents[2]


def test_the_daemon_suite_has_every_case_that_is_asked_for() -> None:
    command = [sys.executable, "-m", "benchmarks", "--suite", "daemon", "--json", "-", "--quick", "--rounds", "1"]
    kept = {name: value for name, value in os.environ.items() if name != "KVSTORE_LMCACHE_PYTHON"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=kept)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    wanted = {case for case in targets()["daemon"] if not case.endswith("_vs_lmcache")}
    assert wanted <= set(rows)
    assert all(rows[case]["ratio"] > 0 for case in wanted)
