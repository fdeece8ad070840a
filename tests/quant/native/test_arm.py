"""The sources compile for Arm and run there: cross-compiled and emulated, where the tools are installed.

Debian: gcc-aarch64-linux-gnu and qemu-user-static.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.quant.native.build_kit import HEADERS, SOURCES, run

CROSS = shutil.which("aarch64-linux-gnu-gcc")
EMULATOR = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-pthread", "-DKV_HAVE_baseline"]
FLAGS += ["-Wno-maybe-uninitialized"]  # at -O1 gcc does not see through loops that it unrolls at -O3
DRIVER = Path(__file__).parent / "thread_driver.c"

pytestmark = pytest.mark.skipif(CROSS is None, reason="no aarch64-linux-gnu-gcc")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every source but those of x86, compiled for Arm. Python's headers of this machine will do: both are LP64.

    Debian's send a compiler to those of its own architecture, which are seldom there: then the bindings are left out.
    """
    folder = tmp_path_factory.mktemp("arm")
    probe = folder / "probe.c"
    probe.write_text("#include <Python.h>\n", encoding="ascii")
    asked = [str(CROSS), f"-I{HEADERS.parent}", "-fsyntax-only", str(probe)]
    has_python = HEADERS.exists() and subprocess.run(asked, capture_output=True, check=False).returncode == 0
    built = {}
    for source in sorted(SOURCES.glob("*.c")):
        if source.stem.endswith("_x86") or (source.name.startswith(("bind_", "module")) and not has_python):
            continue
        path = ["-DKV_PATH=baseline"] if source.name == "path.c" else []
        built[source.stem] = folder / f"{source.stem}.o"
        includes = [f"-I{SOURCES}", f"-I{HEADERS.parent}"]
        run([str(CROSS), *FLAGS, *path, *includes, "-c", str(source), "-o", str(built[source.stem])])
    return built


def test_every_source_compiles(objects: dict[str, Path]) -> None:
    assert {"path", "threads", "cpu", "dispatch"} <= set(objects)


@pytest.mark.skipif(EMULATOR is None, reason="no qemu-user-static")
def test_the_pool_runs(objects: dict[str, Path], tmp_path: Path) -> None:
    program = tmp_path / "driver"
    run([str(CROSS), *FLAGS, "-static", f"-I{SOURCES}", str(DRIVER), str(objects["threads"]), "-o", str(program)])
    assert run([str(EMULATOR), str(program)]).strip() in ("all tasks ran once", "no worker took part")
