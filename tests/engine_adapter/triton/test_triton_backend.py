"""The triton backend without a GPU: the interpreter's suite and the compiler in processes of their own; its absence.

Triton decides at import whether it interprets, so neither can share this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from engine_adapter.attention import AttentionSettings, get_backend, triton_paged
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.attention.triton_paged import TritonPagedAttention
from tests.engine_adapter.attention_kit import MIXED_LENGTHS, Scene

ROOT = Path(__file__).resolve().parents[3]
STRICT = ("-W", "error", "-W", "ignore:kvstore-llm")  # a checkout without built kernels warns, and may
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed (make test-triton)")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, check=False)


@needs_triton
@pytest.mark.slow
def test_kernels_in_the_interpreter() -> None:
    """interpreted_suite.py, whose cases are those of a card (tests/gpu/test_triton_attention.py)."""
    suite = "tests/engine_adapter/triton/interpreted_suite.py"
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", suite, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_every_target(tmp_path: Path) -> None:
    """One shape for all targets here; all shapes: `make compile-matrix`."""
    module, written = "tests.engine_adapter.triton.compile_matrix", tmp_path / "rows.json"
    done = python(*STRICT, "-m", module, "--cases", "smollm 64, float16", "--json", str(written))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    rows = json.loads(written.read_text(encoding="utf-8"))
    assert {row["target"] for row in rows} == {80, 86, 89, 90, 100, 120}
    assert {row["kernel"] for row in rows} == {"paged_decode", "combine_splits"}
    assert all(16 <= row["registers"] <= 255 for row in rows)


@needs_triton
@pytest.mark.nightly
def test_the_whole_matrix() -> None:
    done = python(*STRICT, "-m", "tests.engine_adapter.triton.compile_matrix")
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_importing_the_backend_imports_no_triton() -> None:
    program = "import sys, engine_adapter.attention.triton_paged; print('triton' in sys.modules)"
    done = python("-c", program)
    assert done.stdout.strip() == "False", done.stderr


@pytest.fixture
def fresh_status() -> object:
    triton_paged.status.cache_clear()
    yield
    triton_paged.status.cache_clear()


@pytest.mark.usefixtures("fresh_status")
def test_without_triton_the_reason_is_told_and_torch_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    works, reason = triton_paged.status()
    assert not works
    assert "triton" in reason
    assert not triton_paged.supports("cpu")
    assert not triton_paged.supports("cuda")
    scene, settings = Scene(MIXED_LENGTHS, cold_share=0.5), AttentionSettings(0.25)
    backend = get_backend("triton")
    assert isinstance(backend, TritonPagedAttention)
    assert backend.plan(scene.cache, 0, scene.batch()).decode is None
    assert torch.equal(scene.run(backend, 1, settings), scene.run(TorchPagedAttention(), 1, settings))


@pytest.mark.usefixtures("fresh_status")
@pytest.mark.parametrize(
    ("version", "expected"), [("3.8.1", "older than 3.9"), ("2", "older than 3.9"), (None, "AttributeError")]
)
def test_a_triton_of_another_age_or_kind_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str | None, expected: str
) -> None:
    stranger = ModuleType("triton")
    if version is not None:
        stranger.__version__ = version  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", stranger)
    works, reason = triton_paged.status()
    assert not works
    assert expected in reason


@needs_triton
@pytest.mark.usefixtures("fresh_status")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_reason_says_so() -> None:
    works, reason = triton_paged.status()
    assert not works
    assert "sees no CUDA device" in reason
