"""The demo with tiers that outlive it: a second start reuses what the first one stored, and its outputs are equal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_adapter.demo.__main__ import parse
from tests.engine_adapter.demo_kit import save_tiny_model
from tests.servers import shared_server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


def start(tiny: Path, folder: Path, *tiers: str) -> dict[str, Any]:
    """One process start of the quick demo; its settings by name."""
    command = [sys.executable, "-m", "engine_adapter.demo", "--quick", "--requests", "4"]
    command += ["--model", str(tiny), "--threads", "1", "--json", "-", "--html", str(folder / "page.html"), *tiers]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr + done.stdout[:2000]
    report = json.loads(done.stdout)
    (promise,) = [one for one in report["promises"] if one["name"] == "second start"]
    return {one["name"]: one for one in report["settings"]} | {"held": promise["held"]}


def check(first: dict[str, Any], second: dict[str, Any], tier: str) -> None:
    assert (first["held"], second["held"]) == (None, True)
    for name in ("exact-tight", "tight", "tight-int4"):
        before, after = first[name], second[name]
        assert before["stored_tokens_before"] == 0 < after["stored_tokens_before"]
        assert after["prefill_tokens_reused"][tier] > before["prefill_tokens_reused"][tier]
        assert after["prefill_tokens_computed"] < before["prefill_tokens_computed"]
        assert after["output_tokens"] == before["output_tokens"]
        for one in (before, after):
            assert one["peak_bytes"]["host"] <= one["host_bytes_limit"], "of the host tier alone"
    for name in ("exact-ample", "exact-tight"):
        assert first[name]["outputs_equal"] is second[name]["outputs_equal"] is True
        assert second[name]["agreement"] == 1.0
    assert set(second["ample"]["prefill_tokens_reused"]) == {"device", "host"}


def test_a_second_start_reuses_a_directory_and_another_a_server(tiny: Path, tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path / "copies"))
    remote = ("--redis", shared_server().unix_url + "?namespace=demo")
    first = start(tiny, tmp_path, *disk, *remote)
    check(first, start(tiny, tmp_path, *disk), "disk")
    page = (tmp_path / "page.html").read_text()
    assert "reused from disk" in page, "in the table"
    assert 'title="reused, disk"' in page, "in the picture"
    assert "so their reading is not compared" in page
    assert "of the reading saved" not in page
    assert "Not checked, since " in page
    check(first, start(tiny, tmp_path, *remote), "remote")


def test_wrong_tiers_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    for arguments, said in ((["--disk", str(file)], "expected a directory"), (["--redis", "http://x"], "--redis")):
        with pytest.raises(SystemExit) as caught:
            parse(arguments)
        assert caught.value.code == 2
        assert said in capsys.readouterr().err
