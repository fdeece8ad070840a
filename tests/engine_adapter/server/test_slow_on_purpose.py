"""Three servers that are slow on purpose, each in its own way: `kvstore doctor` names the cause of each.

The real server in a process of its own, real tiny models, the command as a user gives it. A disturbed machine may make
the doctor refuse; then it is asked again. Naming a wrong cause is never forgiven.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_adapter.server.own_loop import own_loop
from kvstore.cli import main
from tests.engine_adapter.demo_kit import save_tiny_model

pytestmark = pytest.mark.slow
_TRIES = 4


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CODEC", "raw")
    monkeypatch.setenv("KVSTORE_DEVICE_BYTES", "512 MiB")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[3]))


def model(folder: Path, **shape: int) -> list[str]:
    """Words that make the server serve a model of that shape."""
    save_tiny_model(folder)
    fields = json.loads((folder / "config.json").read_text())
    torch.manual_seed(5)
    small = {"num_hidden_layers": 1, "max_position_embeddings": 8192, "initializer_range": 0.05}
    LlamaForCausalLM(LlamaConfig(**{**fields, **small, **shape})).save_pretrained(folder)
    return ["--model", str(folder), "--threads", "1"]


def diagnosed(url: str, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The first report that is no refusal."""
    for _ in range(_TRIES):
        code = main(("doctor", "--url", url, "--json", "-", "--rounds", "2", *words))
        report: dict[str, Any] = json.loads(capsys.readouterr().out)["speed"]
        assert code == (0 if report["verdict"]["refused"] is None else 1)
        if code == 0:
            return report
    pytest.fail(f"refused {_TRIES} times: {report['verdict']}")


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
        assert diagnosed(url, capsys, *asked)["verdict"]["bottleneck"] != "queue"
