"""Building the extension apart from the tree that the tests run from, and what of it needs which tool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from quant import native

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "quant/native/csrc"
COMPILER = shutil.which("gcc") or shutil.which("cc")
HEADERS = Path(sysconfig.get_paths()["include"]) / "Python.h"
CAN_BUILD = COMPILER is not None and HEADERS.exists()

needs_extension = pytest.mark.skipif(native.kernels is None, reason=f"no native kernels: {native.reason}")
needs_compiler = pytest.mark.skipif(not CAN_BUILD, reason="no C compiler, or no headers of Python")


def run(command: list[str], *, environment: dict[str, str] | None = None, folder: Path = ROOT) -> str:
    """Standard output; fails the test with all that was said when the command does."""
    done = subprocess.run(
        command, cwd=folder, env=environment or dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def copied_tree(folder: Path) -> Path:
    """The packages and what builds them, without what was built."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("allocator", "quant", "kvstore", "engine_adapter"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(ROOT / "constraints-dev.txt", folder)
    return folder


def without_compiler() -> dict[str, str]:
    """An environment in which nothing compiles."""
    return dict(os.environ) | {"CC": "/bin/false", "PATH": str(Path(sys.executable).parent)}


def build_in_place(tree: Path, environment: dict[str, str] | None = None) -> str:
    """Build the extension of a copied tree; what the build said."""
    return run([sys.executable, "setup.py", "build_ext", "--inplace"], environment=environment, folder=tree)


def ask(tree: Path, program: str, **variables: str) -> str:
    """What a program prints, warnings included, that imports the packages of `tree`."""
    environment = {name: value for name, value in os.environ.items() if name != "KVSTORE_KERNELS"}
    return run(
        [sys.executable, "-c", program], environment=environment | {"PYTHONPATH": str(tree)} | variables, folder=tree
    )
