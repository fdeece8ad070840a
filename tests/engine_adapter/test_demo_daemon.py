"""`make demo-daemon` on a tiny model: the second engine takes the documents from the daemon, the answers are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_adapter.demo.daemon import parse, report_of
from tests.engine_adapter.demo_kit import save_tiny_model


def test_the_second_engine_reuses_what_the_first_computed(tmp_path: Path) -> None:
    tiny = save_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "engine_adapter.demo.daemon", "--model", str(tiny), "--tokens", "160"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command += ["--threads", "1", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["outputs_equal"] is report["all_reused"] is True
    assert len(report["documents"]) == 4
    assert all(one["from_daemon_tokens"] >= 100 for one in report["documents"])


def test_an_answer_that_differs_or_a_prompt_computed_again_shows() -> None:
    one = {"answer": [1, 2], "prompt_tokens": 33, "computed_tokens": 33, "reused_tokens": {}, "ttft_seconds": 2.0}
    two = {**one, "reused_tokens": {"daemon": 32}, "ttft_seconds": 1.0}
    assert report_of({"a": one}, {"a": two})["all_reused"] is True
    assert report_of({"a": one}, {"a": two | {"answer": [1, 3]}})["outputs_equal"] is False
    assert report_of({"a": one}, {"a": two | {"reused_tokens": {"daemon": 16}}})["all_reused"] is False


def test_bad_usage_exits_with_2(tmp_path: Path) -> None:
    for wrong in (["--tokens", "5"], ["--model", str(tmp_path)], ["--threads", "0"]):
        with pytest.raises(SystemExit) as caught:
            parse(wrong)
        assert caught.value.code == 2
