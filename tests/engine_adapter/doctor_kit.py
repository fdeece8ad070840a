"""`kvstore doctor` against servers that are slow on purpose, as a user gives it: a model of any shape, and the verdict.

A disturbed machine adds to every phase, so that the doctor may refuse or find none that takes most; then it is asked
again. Naming a wrong cause is never forgiven.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli import main

_TRIES = 4


def save_slow_model(folder: Path, **shape: int) -> Path:
    """One token per byte, one layer unless `shape` says another number."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.engine_adapter.demo_kit import save_tiny_model

    save_tiny_model(folder)
    fields = json.loads((folder / "config.json").read_text())
    torch.manual_seed(5)
    small = {"num_hidden_layers": 1, "max_position_embeddings": 8192, "initializer_range": 0.05}
    LlamaForCausalLM(LlamaConfig(**{**fields, **small, **shape})).save_pretrained(folder)
    return folder


def diagnosed(url: str, capsys: pytest.CaptureFixture[str], *words: str, names: bool = True) -> dict[str, Any]:
    """The first report that names a bottleneck and its cause; without `names` the first, whatever it says."""
    for _ in range(_TRIES):
        code = main(("doctor", "--url", url, "--json", "-", "--rounds", "2", *words))
        report: dict[str, Any] = json.loads(capsys.readouterr().out)["speed"]
        assert code == (0 if report["verdict"]["refused"] is None else 1)
        if not names or (code == 0 and report["verdict"]["bottleneck"] is not None):
            return report
    pytest.fail(f"nothing named in {_TRIES} tries: {report['verdict']}")
