"""Every kernel compiles for every supported architecture and keeps its values in registers. No card needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quant.cuda.compile_matrix import (
    ARCHITECTURES,
    CompileError,
    compile_matrix,
    compile_text,
    load_nvrtc,
    main,
    table,
    uses,
)
from quant.cuda.source import INT4_KERNELS, MODULES, kernels_of, source_of

needs_nvrtc = pytest.mark.skipif(load_nvrtc() is None, reason="nvidia-cuda-nvrtc is not installed")

SPILLING = """
extern "C" __global__ void copy_pages(float* x) {
    float held[200];
    for (int i = 0; i < 200; i++) held[i] = x[i * 32 + threadIdx.x];
    for (int i = 0; i < 200; i++) x[(int)held[(i * 37) % 200] & 1023] = held[(i * 91) % 200];
}
"""


@needs_nvrtc
@pytest.mark.parametrize(
    ("module", "architectures"),
    [("pages", ARCHITECTURES), ("int4_bf16", ARCHITECTURES), ("int4_fp16", (90,)), ("int4_fp32", (120,))],
)
def test_no_kernel_spills(module: str, architectures: tuple[int, ...]) -> None:
    """The command does all of them; here what finds most in a few seconds."""
    assert ARCHITECTURES == (80, 86, 89, 90, 100, 120)
    found = compile_matrix(architectures, [module])
    print(table(found))
    assert {use.architecture for use in found} == set(architectures)
    assert {use.kernel for use in found} == set(kernels_of(module))
    assert [use for use in found if use.spills] == []
    assert max(use.registers for use in found) <= 128, "512 threads of a thread block have no more"


@needs_nvrtc
def test_a_spilling_kernel_is_seen() -> None:
    nvrtc = load_nvrtc()
    assert nvrtc is not None
    (use,) = uses("pages", 90, compile_text(nvrtc, SPILLING, 90))
    assert use.spills
    assert "spill" in table([use])


@needs_nvrtc
def test_what_does_not_compile_or_warns_is_said() -> None:
    nvrtc = load_nvrtc()
    assert nvrtc is not None
    with pytest.raises(CompileError, match="sm_90"):
        compile_text(nvrtc, "not a program", 90)
    warned = compile_text(nvrtc, 'extern "C" __global__ void copy_pages(int* x) { int y; }', 90)
    with pytest.raises(CompileError, match="warnings"):
        uses("pages", 90, warned)
    quiet = compile_text(nvrtc, 'extern "C" __global__ void another(int* x) { x[0] = 1; }', 90)
    with pytest.raises(CompileError, match="no report on"):
        uses("pages", 90, quiet)


@needs_nvrtc
def test_command_prints_the_matrix(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quant.cuda.compile_matrix.compile_matrix", lambda given: compile_matrix(given, ["pages"]))
    assert main(["--arch", "90"]) == 0
    said = capsys.readouterr().out
    assert "pages copy_pages" in said
    assert "1 kernels, 0 with spills" in said


def test_bad_usage_is_exit_code_two() -> None:
    command = [sys.executable, "-m", "quant.cuda.compile_matrix", "--arch", "ninety"]
    done = subprocess.run(command, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "ninety" in done.stderr


def test_sources_have_the_kernels_that_launches_name() -> None:
    assert len(INT4_KERNELS) == 8
    for module in MODULES:
        text = source_of(module)
        assert "#include" not in text, "NVRTC is given no headers"
        for kernel in kernels_of(module):
            work, _, bits = kernel.rpartition("_")
            assert f"{kernel}(" in text or f"RECORD_KERNEL({work}, {bits})" in text
    with pytest.raises(KeyError, match="nonsense"):
        source_of("nonsense")
