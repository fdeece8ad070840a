"""Three servers that are slow on purpose, each in its own way: `kvstore doctor` names the cause of each.

The real server in a process of its own, real tiny models, the command as a user gives it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_adapter.server.own_loop import own_loop
from tests.engine_adapter.doctor_kit import diagnosed, save_slow_model

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CODEC", "raw")
    monkeypatch.setenv("KVSTORE_DEVICE_BYTES", "512 MiB")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))


def model(folder: Path, **shape: int) -> list[str]:
    """Words that make the server serve a model of that shape."""
    return ["--model", str(save_slow_model(folder, **shape)), "--threads", "1"]


def test_compute_bound_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = model(tmp_path / "m", hidden_size=384, intermediate_size=2048, num_hidden_layers=4)
    with own_loop(words) as url:
        asked = ("--prompt-tokens", "128,512,1536", "--answer-tokens", "8", "--concurrency", "2")
        report = diagnosed(url, capsys, *asked)
    assert (report["verdict"]["bottleneck"], report["verdict"]["cause"]) == ("prompt", "compute"), report
    assert report["repeated_prompt_share"] < 0.5, "our own prefix cache must show"


def test_bandwidth_bound_decode_with_long_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = model(tmp_path / "m", num_attention_heads=64, num_key_value_heads=64, head_dim=128)
    with own_loop(words) as url:
        asked = ("--prompt-tokens", "128,512,1024", "--answer-tokens", "320", "--concurrency", "1")
        report = diagnosed(url, capsys, *asked)
    assert (report["verdict"]["bottleneck"], report["verdict"]["cause"]) == ("decode", "bandwidth"), report
    assert "(KV)" in report["verdict"]["because"], report


def test_queueing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = model(tmp_path / "m")
    with own_loop([*words, "--max-batch", "1"]) as url:
        asked = ("--prompt-tokens", "32,64,128", "--answer-tokens", "192", "--concurrency", "8")
        report = diagnosed(url, capsys, *asked)
        assert (report["verdict"]["bottleneck"], report["verdict"]["cause"]) == ("queue", "queueing"), report
    with own_loop(words) as url:  # the same with room for all: whatever it is now, it is no queue
        assert diagnosed(url, capsys, *asked, names=False)["verdict"]["bottleneck"] != "queue"
