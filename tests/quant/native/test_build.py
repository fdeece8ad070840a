"""Building and installing: what is in a wheel, what happens without a compiler, and what an old build cannot do.

All but the builds that must fail share one build, made in a copy of the tree with flags in the environment that would
spoil it if they were let through.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from quant.native import ABI
from tests.quant.native.build_kit import (
    COMPILER,
    HEADERS,
    SOURCES,
    ask,
    build_in_place,
    copied_tree,
    needs_compiler,
    run,
    without_compiler,
)

pytestmark = pytest.mark.slow
PATH_OF = "import quant.native as n; print(n.active_path(), n.kernels.thread_probe(100, 4)[0])"
WIDE = {"avx512": r"%zmm|%k[1-7]", "avx": r"%ymm|\tv[a-z]"}
"""What only these instruction sets have, as objdump -d prints it."""


@dataclass(frozen=True)
class Build:
    """tree: copied, with its build/. wheel: the file. site: the wheel, unpacked."""

    tree: Path
    wheel: Path
    site: Path

    def objects(self) -> dict[str, Path]:
        """ "path-avx2/path.o", "common/threads.o"... -> the file."""
        files = self.tree.glob("build/temp*/**/*.o")
        return {f"{file.relative_to(self.tree).parts[2]}/{file.name}": file for file in files}


def wheel_of(tree: Path, environment: dict[str, str]) -> Path:
    target = tree / "wheels"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(target), "."]
    run(command, folder=tree, environment=environment | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    (wheel,) = target.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The one real build; its environment asks for this machine's instructions, link-time and fast arithmetic.

    Two paths, not optimised to the end, are enough for what is asked of it, and a fraction of the time.
    """
    tree = copied_tree(tmp_path_factory.mktemp("tree"))
    spoiled = {"CFLAGS": "-march=native -flto -ffast-math", "KV_BUILD_PATHS": "avx2", "KV_BUILD_LEVEL": "-O1"}
    wheel = wheel_of(tree, dict(os.environ) | spoiled)
    site = tree / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return Build(tree, wheel, site)


def kernels_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("**/_kernels*.so"))


def built_in(folder: Path) -> list[Path]:
    """Both extensions, sorted: the pool's core, the kernels."""
    return [*sorted(folder.glob("**/_pool*.so")), *kernels_in(folder)]


@needs_compiler
def test_the_wheel_has_the_extension_and_no_sources(build: Build) -> None:
    names = zipfile.ZipFile(build.wheel).namelist()
    assert re.search(r"-cp311-abi3-[a-z0-9_]+\.whl$", build.wheel.name)
    assert {"quant/native/_kernels.abi3.so", "allocator/_pool.abi3.so"} <= set(names)
    assert "quant/py.typed" in names
    assert "kvstore/cli/doctor.py" in names
    assert not [name for name in names if "csrc" in name or name.endswith((".c", ".h", ".inc"))]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "allocator",
        "engine_adapter",
        "kvstore",
        "quant",
    }


@needs_compiler
def test_the_wheel_runs_and_forced_to_the_baseline_too(build: Build) -> None:
    path, once = ask(build.site, PATH_OF).split()
    assert (path in ("baseline", "avx2"), once) == (True, "100")
    assert ask(build.site, PATH_OF, KVSTORE_KERNELS="baseline").split() == ["baseline", "100"]


@needs_compiler
def test_no_instruction_is_outside_its_path(build: Build) -> None:
    if not shutil.which("objdump") or "common/cpu.o" not in build.objects() or sys.maxsize < 2**32:
        pytest.skip("no objdump")
    if sysconfig.get_platform() not in ("linux-x86_64", "linux-amd64"):
        pytest.skip("instructions of x86-64 are looked for")
    narrow = [name for name in build.objects() if name.split("/")[0] in ("common", "path-baseline", "pool")]
    assert {"pool/pool.o", "common/module.o", "common/threads.o", "common/cpu.o", "path-baseline/path.o"} <= set(narrow)
    for name in narrow:
        found = instructions(build.objects()[name], rf"{WIDE['avx']}|{WIDE['avx512']}")
        assert found == [], name
    if "path-avx2/path.o" in build.objects():
        assert instructions(build.objects()["path-avx2/path.o"], WIDE["avx512"]) == []


def instructions(file: Path, pattern: str) -> list[str]:
    """Disassembled lines that match."""
    return [line for line in run(["objdump", "-d", str(file)]).splitlines() if re.search(pattern, line)]


@needs_compiler
def test_wide_instructions_are_found_where_they_are(tmp_path: Path) -> None:
    """The control of the test above."""
    if not shutil.which("objdump") or sysconfig.get_platform() != "linux-x86_64":
        pytest.skip("no objdump, or no x86-64")
    source = tmp_path / "wide.c"
    source.write_text("void add(float *a) { for (int i = 0; i < 64; i++) a[i] += 1; }\n")
    for flag, pattern in (("-mavx2", WIDE["avx"]), ("-mavx512f -mprefer-vector-width=512", WIDE["avx512"])):
        run([str(COMPILER), "-O3", *flag.split(), "-c", str(source), "-o", str(tmp_path / "wide.o")])
        assert instructions(tmp_path / "wide.o", pattern)


@needs_compiler
@pytest.mark.parametrize(("cpu", "expected"), [("qemu64", "baseline"), ("Haswell", "avx2")])
def test_it_runs_on_a_lesser_cpu(build: Build, cpu: str, expected: str) -> None:
    """An emulated CPU ends the process at the first instruction that it has not."""
    emulator = shutil.which("qemu-x86_64-static") or shutil.which("qemu-x86_64")
    if not emulator:
        pytest.skip("no qemu-user-static")
    environment = dict(os.environ) | {"PYTHONPATH": str(build.site)}
    environment.pop("KVSTORE_KERNELS", None)
    command = [emulator, "-cpu", cpu, os.path.realpath(sys.executable), "-c", PATH_OF]
    done = subprocess.run(command, env=environment, cwd=build.site, capture_output=True, text=True, check=False)
    if "doesn't support requested feature" in done.stderr and done.stdout.split()[:1] == ["baseline"]:
        pytest.skip(f"this qemu cannot emulate {cpu} whole")
    assert done.stdout.split() == [expected, "100"], done.stderr


@needs_compiler
def test_a_build_with_another_number_is_refused(build: Build, tmp_path: Path) -> None:
    shutil.copytree(build.site, tmp_path, dirs_exist_ok=True)
    (extension,) = kernels_in(tmp_path)
    have = [f"-DKV_HAVE_{name.removeprefix('path-').split('/')[0]}" for name in build.objects() if "path-" in name]
    module = tmp_path / "module.o"
    headers = [f"-I{SOURCES}", f"-I{HEADERS.parent}"]
    source = str(SOURCES / "module.c")
    run([str(COMPILER), "-fPIC", "-O1", "-DKV_ABI=999", *have, *headers, "-c", source, "-o", str(module)])
    others = [str(file) for name, file in build.objects().items() if name != "common/module.o"]
    extension.unlink()
    run([str(COMPILER), "-shared", "-pthread", str(module), *others, "-lm", "-o", str(extension)])
    said = ask(tmp_path, "import quant.native as n; print(n.active_path(), n.reason)")
    assert f"None stale build (its ABI number is 999, this version needs {ABI}); reinstall" in said
    assert said.count("RuntimeWarning") == 1


@needs_compiler
def test_a_failed_rebuild_leaves_no_old_extension(build: Build, tmp_path: Path) -> None:
    tree = copied_tree(tmp_path)
    built = tree / f"build/lib.{sysconfig.get_platform()}-cpython-{sys.version_info.major}{sys.version_info.minor}"
    for kept in built_in(build.site):
        for folder in (tree, built):
            place = folder / kept.relative_to(build.site)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(kept, place)
    assert len(built_in(tree)) == 4
    assert ask(tree, PATH_OF).split()[1] == "100"  # the control
    said = build_in_place(tree, without_compiler())
    assert "does not compile" in said
    assert built_in(tree) == []


@pytest.mark.parametrize("how", ["a compiler that fails", "no compiler", "no headers"])
def test_without_a_compiler_the_build_only_warns(how: str, tmp_path: Path) -> None:
    tree = copied_tree(tmp_path / "tree")
    environment = without_compiler()
    expected = "/bin/false does not compile"
    if how == "no compiler":
        environment |= {"CC": "no-such-compiler"}
        expected = "no C compiler"
    elif how == "no headers":
        if COMPILER is None:
            pytest.skip("no C compiler")
        script = tmp_path / "cc"
        script.write_text(
            "#!/bin/sh\nfor word; do case $word in *.c) if grep -q Python.h $word; then\n"
            f'echo "fatal error: Python.h: No such file" >&2; exit 1; fi;; esac; done\nexec {COMPILER} "$@"\n'
        )
        script.chmod(0o755)
        environment = dict(os.environ) | {"CC": str(script)}
        expected = "Python's headers are missing"
    said = build_in_place(tree, environment)
    assert said.count(expected) == 2, said
    assert built_in(tree) == []


def test_installing_without_a_compiler_works_and_warns_once(tmp_path: Path) -> None:
    tree, target = copied_tree(tmp_path / "tree"), tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
    ]
    run([*command, "."], folder=tree, environment=without_compiler() | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    assert (target / "bin/kvstore").exists()
    assert built_in(target) == []
    program = (
        "import quant.native as n, torch; from quant import get_codec, BlockShape; import quant.native; "
        "codec = get_codec('int4'); keys = torch.ones(1, 1, 16, 32); "
        "print(len(codec.encode(keys, keys)), n.kernels, n.reason)"
    )
    said = ask(target, program)
    assert "None not built; install a C compiler" in said
    assert said.count("RuntimeWarning: kvstore-llm: no native kernels: not built") == 1
    assert "several times slower" in said


def test_a_wheel_without_the_extension_does_not_pass_for_one_with_it(tmp_path: Path) -> None:
    wheel = wheel_of(copied_tree(tmp_path), without_compiler())
    assert wheel.name.endswith("-py3-none-any.whl")
    assert built_in(tmp_path) == []


def test_the_source_distribution_has_the_c_sources(tmp_path: Path) -> None:
    tree = copied_tree(tmp_path)
    run([sys.executable, "setup.py", "-q", "sdist"], folder=tree)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    wanted = {f"quant/native/csrc/{file.name}" for file in SOURCES.iterdir() if file.is_file()}
    assert wanted | {"allocator/csrc/pool.c", "setup.py", "pyproject.toml", "LICENSE"} <= names
