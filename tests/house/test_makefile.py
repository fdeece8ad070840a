"""`make venv`: what is rebuilt when. The Makefile is the real one; environment and setup.py only log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A tree whose environment is up to date and whose kernels were never built."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("quant/native/csrc", "allocator/csrc"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.c").write_text("int a;\n")
    (tmp_path / "pyproject.toml").write_text("x\n")
    (tmp_path / "constraints-dev.txt").write_text("y\n")
    (tmp_path / "setup.py").write_text("print('kernels built')\n")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    digest = "cat pyproject.toml constraints-dev.txt | sha256sum"
    stamp = subprocess.run(digest, shell=True, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / ".venv/.installed-for").write_text(f"{stamp} {tmp_path.resolve()}\n")
    return tmp_path


def make(project: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        ["make", "venv"], cwd=project, env=environment | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_are_built_once(project: Path) -> None:
    assert "kernels built" in make(project)
    assert make(project) == ""


@pytest.mark.parametrize("changed", ["quant/native/csrc/new.inc", "allocator/csrc/a.c", "setup.py"])
def test_a_changed_source_rebuilds_the_kernels_and_not_the_environment(project: Path, changed: str) -> None:
    make(project)
    file = project / changed
    file.write_text((file.read_text() if file.exists() else "") + "# changed\n")
    said = make(project)
    assert "kernels built" in said
    assert "making" not in said
    assert make(project) == ""


def test_a_touched_file_rebuilds_nothing(project: Path) -> None:
    make(project)
    os.utime(project / "quant/native/csrc/a.c", (1, 1))
    assert make(project) == ""


def test_without_a_compiler_it_goes_on_and_a_compiler_that_comes_later_is_used(project: Path) -> None:
    assert "kernels built" in make(project, CC="/no/such/compiler")
    assert make(project, CC="/no/such/compiler") == ""
    assert "kernels built" in make(project, CC="true")
