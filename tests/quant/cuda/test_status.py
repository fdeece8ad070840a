"""The availability probe and the choice of path on machines without a card: a reason, never an error."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quant.cuda
from quant import dispatch, get_codec
from quant.cuda import CudaUnavailable, cuda_codec_for, cuda_device, status

ROOT = Path(__file__).resolve().parents[3]
HAS_CUPY = importlib.util.find_spec("cupy") is not None

# A CuPy that loads, finds a card and cannot compile: not our code under test, but what ours has to survive.
FAKE_CUPY = """
class _Nothing:
    def __init__(self, *arguments, **options): pass
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def __getattr__(self, name): return _Nothing()
    def __call__(self, *arguments, **options): return _Nothing()

class _Runtime:
    def getDeviceCount(self): {count}
    def getDevice(self): return 0

class _Cuda:
    runtime = _Runtime()
    Device = _Nothing

class RawModule:
    def __init__(self, **options): pass
    def compile(self): raise RuntimeError("\\n  line 3: expected a semicolon\\n more")

cuda = _Cuda()
__version__ = "0"
"""


def probe(folder: Path | None = None) -> str:
    code = "import sys, quant.cuda; print(quant.cuda.status(), 'torch' in sys.modules, 'cupy' in sys.modules)"
    path = str(ROOT) if folder is None else f"{folder}:{ROOT}"
    environment = {"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_status_says_why_and_imports_no_torch() -> None:
    found = probe()
    assert found.startswith("(False, 'no device" if HAS_CUPY else "(False, 'no cupy'")
    assert found.split(") ")[1].startswith("False ")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise ImportError('libcudart.so.13: not found')", "cupy does not load: libcudart.so.13: not found"),
        (FAKE_CUPY.format(count="return 0"), "no device"),
        (FAKE_CUPY.format(count="raise RuntimeError('driver too old')"), "no device: driver too old"),
        (FAKE_CUPY.format(count="return 1"), "compile failed: line 3: expected a semicolon"),
        ("1 / 0", "cupy does not load: division by zero"),
    ],
)
def test_a_broken_cupy_is_a_reason(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "cupy.py").write_text(source)
    assert probe(tmp_path).startswith(f"(False, '{said}') False")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a card")
def test_without_a_card_the_torch_path_runs() -> None:
    assert cuda_codec_for(torch.zeros(1)) is None
    usable, reason = status()
    assert not usable
    assert reason
    with pytest.raises(CudaUnavailable):
        cuda_device(0)
    keys = torch.arange(1024.0).view(1, 1, 16, 64)
    assert get_codec("int4").encode(keys, keys)


def test_what_the_dispatch_decided_on_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnCard:
        is_cuda = True

    monkeypatch.setattr(quant.cuda, "implementation_of", lambda operation, device: "torch")
    assert cuda_codec_for(OnCard(), "int4_decode") is None
    monkeypatch.setattr(quant.cuda, "implementation_of", lambda operation, device: "cuda")
    with pytest.raises(AttributeError):
        cuda_codec_for(OnCard(), "int4_decode")  # asked for its device: it would have been considered


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a card")
def test_the_dispatch_shows_the_reason() -> None:
    assert quant.cuda.absence() == status()[1] != ""
    for operation in ("int4_encode", "int4_decode", "page_copy"):
        names = [name for name, _ in dispatch.decision(operation, "cuda").passed_over]
        assert names == ["cuda", "torch"]
