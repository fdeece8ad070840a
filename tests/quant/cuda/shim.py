"""The CUDA kernels compiled for the CPU by g++ behind a shim of CUDA's threads. Test code; one thread."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

from quant.cuda.launches import Launch
from quant.cuda.source import source_of

_FOLDER = Path(__file__).parent
_FLAGS = ("-O1", "-std=c++17", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC")
ORDERS = (0, 1, 7)  # forward, backward, shuffled


def compiler() -> str | None:
    """g++ where there is one."""
    return shutil.which("g++")


class ShimDevice:
    """Builds modules into `folder` as they are needed and runs launches on addresses of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._libraries: dict[str, ctypes.CDLL] = {}

    def library(self, module: str) -> ctypes.CDLL:
        """The module as a shared library."""
        if module not in self._libraries:
            self._libraries[module] = ctypes.CDLL(str(self._build(module)))
        return self._libraries[module]

    def _build(self, module: str, text: str | None = None) -> Path:
        job = "CopyJob" if module == "pages" else "RecordJob"
        parts = [(_FOLDER / "shim_threads.hpp").read_text(), text or source_of(module)]
        parts += [f"#define SHIM_JOB {job}", (_FOLDER / "shim_launch.hpp").read_text()]
        source, target = self._folder / f"{module}.cpp", self._folder / f"{module}.so"
        source.write_text("\n".join(parts))
        command = [str(compiler()), *_FLAGS, "-o", str(target), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:4000]
        return target

    def run(self, launches: list[Launch], order: int = 0) -> None:
        """Runs them one after another. Fails when a thread block hangs or an argument has another size."""
        for launch in launches:
            library = self.library(launch.module)
            assert library.shim_job_bytes() == launch.job.nbytes
            kernel = ctypes.cast(library[launch.kernel], ctypes.c_void_p)
            code = library.shim_launch(
                kernel, launch.grid, *launch.threads, launch.job.ctypes.data_as(ctypes.c_void_p), order
            )
            assert code == 0, f"{launch.kernel} hangs in a barrier with {launch.threads} threads"
