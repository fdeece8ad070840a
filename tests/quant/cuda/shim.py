"""The CUDA kernels compiled for the CPU by g++ behind a shim of CUDA's threads. Test code; one thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quant.cuda.driver import Bytes, DeviceBuffer
from quant.cuda.launches import Launch
from quant.cuda.source import source_of

_FOLDER = Path(__file__).parent
_FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")
ORDERS = (0, 1, 7)  # forward, backward, shuffled


def compiler() -> str | None:
    """g++ where there is one."""
    return shutil.which("g++")


class ShimDevice:
    """A driver (quant.cuda.driver.Driver) whose device memory is this process's and whose work runs at once.

    Builds modules into `folder` as they are needed. order, flush: of the threads, and whether subnormals are flushed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}
        self.order = 0
        self.flush = False

    def library(self, module: str) -> ctypes.CDLL:
        """The module as a shared library."""
        if module not in self._libraries:
            self._libraries[module] = ctypes.CDLL(str(self.build(module, source_of(module))))
        return self._libraries[module]

    def build(self, module: str, text: str, name: str | None = None) -> Path:
        """Compiles a module's text; `name` of the files where it is not the module's own text."""
        job = "CopyJob" if module == "pages" else "RecordJob"
        parts = [(_FOLDER / "shim_threads.hpp").read_text(), text]
        parts += [f"#define SHIM_JOB {job}", (_FOLDER / "shim_launch.hpp").read_text()]
        source, target = self._folder / f"{name or module}.cpp", self._folder / f"{name or module}.so"
        source.write_text("\n".join(parts))
        command = [str(compiler()), *_FLAGS, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        return target

    def run(self, launches: Sequence[Launch]) -> None:
        """quant.cuda.codec.Launcher. Fails when a thread block hangs or an argument has another size."""
        for launch in launches:
            assert run_on(self.library(launch.module), launch, self.order, self.flush) == 0, (
                f"{launch.kernel} hangs in a barrier with {launch.threads} threads"
            )

    # ---- the driver

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        self.run(launches)

    def record(self, stream: int) -> DoneEvent:
        return DoneEvent()

    def wait_for(self, stream: int, event: Any) -> None:
        event.wait()

    def upload(self, content: Bytes, stream: int) -> DeviceBuffer:
        memory = np.zeros(content.nbytes + 256, np.uint8)
        start = -memory.ctypes.data % 256  # as CUDA's allocations are
        memory[start : start + content.nbytes] = content.reshape(-1).view(np.uint8)
        return DeviceBuffer(memory.ctypes.data + start, content.nbytes, memory)

    def download(self, buffer: DeviceBuffer, stream: int) -> Bytes:
        return np.frombuffer(ctypes.string_at(buffer.address, buffer.size_bytes), np.uint8).copy()


class DoneEvent:
    """Of a device that runs everything at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return


def run_on(library: ctypes.CDLL, launch: Launch, order: int, flush: bool) -> int:
    """0, or 1 when a thread block hangs."""
    assert library.shim_job_bytes() == launch.job.nbytes
    kernel = ctypes.cast(library[launch.kernel], ctypes.c_void_p)
    job = launch.job.ctypes.data_as(ctypes.c_void_p)
    code: int = library.shim_launch(kernel, launch.grid, *launch.threads, job, order, int(flush))
    return code
