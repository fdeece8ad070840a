"""Compiles every CUDA kernel for every architecture that is supported, without a card, and says what each uses.

    python -m quant.cuda.compile_matrix [--arch 80,90]     exit 1 when a kernel spills or does not compile, 2 bad usage

Needs NVIDIA's run-time compiler, `pip install nvidia-cuda-nvrtc`, which the extra `cuda-compile` brings; nothing else
of CUDA. The options are those of the runtime. No cupy, no torch.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from quant.cuda.source import MODULES, OPTIONS, kernels_of, source_of

ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# What CuPy adds on its own, and the assembler's report of registers and spills.
_ADDED = ("-ftz=true", "--ptxas-options=-v")
_REPORT = re.compile(
    r"Function properties for (?P<kernel>\w+)\s+ptxas\s+\.\s+(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\s+ptxas info\s+: Used (?P<registers>\d+) "
    r"registers(?:[^\n]*?(?P<shared>\d+) bytes smem)?"
)


class CompileError(RuntimeError):
    """A module that NVRTC does not compile, or whose report cannot be read."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """What the assembler gave a kernel. shared_bytes: static shared memory."""

    module: str
    kernel: str
    architecture: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int

    @property
    def spills(self) -> bool:
        """Does it use memory in place of registers?"""
        return bool(self.spill_bytes or self.stack_bytes)


@lru_cache(maxsize=1)
def load_nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the pip packages or of the system; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    found = [str(path) for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*"), reverse=True)]
    for name in (*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def nvrtc_version(nvrtc: ctypes.CDLL) -> str:
    """Such as "13.5"."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compile_text(nvrtc: ctypes.CDLL, text: str, architecture: int, options: Iterable[str] = OPTIONS) -> str:
    """Compiles a text to machine code and returns the log. Raises CompileError with it."""
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None):
        raise CompileError("NVRTC does not take the program")
    try:
        given = [option.encode() for option in (f"--gpu-architecture=sm_{architecture}", *options, *_ADDED)]
        code = nvrtc.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given))
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode(errors="replace")
    if code:
        raise CompileError(f"sm_{architecture}: {said[:2000]}")
    return said


def uses(module: str, architecture: int, log: str) -> list[KernelUse]:
    """The report of a log, one a kernel of the module. CompileError when one is missing or there are warnings."""
    if "warning" in log:
        raise CompileError(f"{module} for sm_{architecture} compiles with warnings: {log[:2000]}")
    found = {
        match["kernel"]: KernelUse(
            *(module, match["kernel"], architecture, int(match["registers"])),
            *(int(match["stores"]) + int(match["loads"]), int(match["stack"]), int(match["shared"] or 0)),
        )
        for match in _REPORT.finditer(log)
    }
    missing = set(kernels_of(module)) - set(found)
    if missing:
        raise CompileError(f"no report on {sorted(missing)} of {module} for sm_{architecture}: {log[:500]}")
    return [found[kernel] for kernel in kernels_of(module)]


def compile_matrix(architectures: Sequence[int] = ARCHITECTURES, modules: Sequence[str] = MODULES) -> list[KernelUse]:
    """Every kernel of the modules for every architecture. Raises CompileError."""
    nvrtc = load_nvrtc()
    if nvrtc is None:
        raise CompileError("no NVRTC: pip install nvidia-cuda-nvrtc")
    pairs = [(module, architecture) for module in modules for architecture in architectures]

    def one(pair: tuple[str, int]) -> list[KernelUse]:
        return uses(*pair, compile_text(nvrtc, source_of(pair[0]), pair[1]))

    with ThreadPoolExecutor(max_workers=2) as pool:  # NVRTC may be called from several threads
        return [use for found in pool.map(one, pairs) for use in found]


def table(found: Sequence[KernelUse]) -> str:
    """Registers by kernel and architecture, with spills where there are any."""
    architectures = sorted({use.architecture for use in found})
    cells = {(use.module, use.kernel, use.architecture): use for use in found}
    lines = [f"{'registers':32}" + "".join(f"{f'sm_{architecture}':>14}" for architecture in architectures)]
    for module, kernel in dict.fromkeys((use.module, use.kernel) for use in found):
        row = f"{module + ' ' + kernel:32}"
        for architecture in architectures:
            use = cells[module, kernel, architecture]
            row += f"{f'{use.registers}' + (f' spill {use.spill_bytes}' if use.spills else ''):>14}"
        lines.append(row)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m quant.cuda.compile_matrix", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", default=",".join(map(str, ARCHITECTURES)), help="compute capabilities, as in 80,90")
    given = parser.parse_args(arguments)
    try:
        architectures = [int(part) for part in given.arch.split(",")]
    except ValueError:
        parser.error(f"--arch: expected numbers such as 80,90, got {given.arch}")
    try:
        found = compile_matrix(architectures)
    except CompileError as error:
        print(error, file=sys.stderr)
        return 1
    nvrtc = load_nvrtc()
    spilling = [use for use in found if use.spills]
    print(table(found))
    print(f"NVRTC {nvrtc_version(nvrtc) if nvrtc else '?'}; {len(found)} kernels, {len(spilling)} with spills")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
