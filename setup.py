"""Builds the native CPU kernels, one source compiled once per instruction set, and the pool's small C core.

Everything else about the package is in pyproject.toml. Both extensions are optional: without a compiler or Python's
headers the package installs and runs on torch and Python alone, and says so when it is imported. Such a wheel is named
py3-none-any, so that it never passes for one that has the kernels.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

SOURCES = Path("quant/native/csrc")
POOL_SOURCE = Path("allocator/csrc/pool.c")
BUILT = ("quant/native/_kernels*.so", "allocator/_pool*.so")
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")
COMMON_FLAGS = [
    "-std=gnu11", os.environ.get("KV_BUILD_LEVEL", "-O3"), "-fvisibility=hidden", "-Wall", "-Wextra",
    # The arithmetic is normative: never fused, never reassociated. No -ffast-math: it changes the whole process.
    "-fno-fast-math", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    # Flags of the environment must not widen a path (-march=native) nor mix paths while linking.
    "-fno-lto", *(["-march=x86-64", "-mtune=generic"] if ON_X86 else []),
]  # fmt: skip
_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mavx2", "-mfma", "-mf16c", "-mbmi2"]
PATH_FLAGS: dict[str, list[str]] = {
    "baseline": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    "avx512": _AVX512,
    "avx512bf16": [*_AVX512, "-mavx512bf16"],
    "amx": [*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-int8"],
}
X86_PATHS = ("avx2", "avx512", "avx512bf16", "amx")
ONLY = "KV_BUILD_PATHS"
"""An environment variable that names the paths to build beside the baseline ("avx2,avx512"), for a quick build."""
SHA_FLAGS = ["-msha", "-msse4.1", "-mssse3"]


class BuildKernels(build_ext):
    """Compiles path.c once per path that the compiler knows, then everything else, and links it all."""

    def run(self) -> None:
        """Old builds go first: one that stayed behind a failed build would be used as if it were new."""
        for folder in (Path(self.build_lib), Path()):
            for pattern in BUILT:
                for old in folder.glob(pattern):
                    old.unlink()
        super().run()

    def build_extension(self, ext: Extension) -> None:
        """`quant.native._kernels` or `allocator._pool`. CompileError says what is missing."""
        self._require_headers()
        if ext.name == "allocator._pool":
            self._link(self._compile(POOL_SOURCE, "pool", []), ext)
            return
        wanted = os.environ.get(ONLY, ",".join(X86_PATHS)).split(",")
        wide = [name for name in X86_PATHS if ON_X86 and name in wanted and self._accepts(PATH_FLAGS[name])]
        paths = ["baseline", *wide]
        have = [f"-DKV_HAVE_{name}" for name in paths]
        jobs = [("path.c", f"path-{name}", [*PATH_FLAGS[name], f"-DKV_PATH={name}"]) for name in paths]
        has_sha = ON_X86 and self._accepts(SHA_FLAGS)
        if has_sha:
            have.append("-DKV_HAVE_SHA")
        for source in sorted(SOURCES.glob("*.c")):
            if source.name == "path.c" or (source.name == "sha_x86.c" and not has_sha):
                continue
            flags = SHA_FLAGS if source.name == "sha_x86.c" else []
            jobs.append((source.name, "common", [*have, *flags]))
        for _, folder, _ in jobs:
            self.mkpath(str(Path(self.build_temp) / folder / SOURCES))
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = [one for built in pool.map(self._compile_kernels, jobs) for one in built]
        self._link(objects, ext)

    def _link(self, objects: list[str], ext: Extension) -> None:
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread"],
            libraries=["m"],
            build_temp=self.build_temp,
        )

    def _compile_kernels(self, job: tuple[str, str, list[str]]) -> list[str]:
        source, folder, flags = job
        return self._compile(SOURCES / source, folder, flags)

    def _compile(self, source: Path, folder: str, flags: list[str]) -> list[str]:
        return self.compiler.compile(
            [str(source)],
            output_dir=str(Path(self.build_temp) / folder),
            include_dirs=[str(source.parent), *self.include_dirs],
            macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_postargs=[*COMMON_FLAGS, "-pthread", *flags],
        )

    def _require_headers(self) -> None:
        """CompileError unless a compiler runs here and finds Python's headers."""
        includes = [f"-I{folder}" for folder in self.include_dirs]
        try:
            if self._probe("int probe(void) { return 0; }", []):
                raise CompileError(f"{self.compiler.compiler_so[0]} does not compile")
            if problem := self._probe("#include <Python.h>", includes):
                raise CompileError(f"Python's headers are missing (python3-dev or alike): {problem.splitlines()[0]}")
        except OSError as error:
            raise CompileError(f"no C compiler ({error})") from error

    def _accepts(self, flags: list[str]) -> bool:
        """Does the compiler know these flags? An older one builds the older paths only."""
        return not self._probe("#include <immintrin.h>\nint probe(void) { return 0; }", flags)

    def _probe(self, source: str, flags: list[str]) -> str:
        """What the compiler says about a source that it refuses, "" when it takes it. OSError without a compiler."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "probe.c"
            file.write_text(source + "\n", encoding="ascii")
            command = [*self.compiler.compiler_so[:1], *flags, "-c", str(file), "-o", str(Path(folder) / "probe.o")]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"


class NameWheel(bdist_wheel):
    """Names a wheel by what is in it."""

    def get_tag(self) -> tuple[str, str, str]:
        folder = Path(self.get_finalized_command("build").build_lib)
        if not any(file for pattern in BUILT for file in folder.glob(pattern)):
            self.root_is_pure = True
            self.py_limited_api = False
        return super().get_tag()


setup(
    ext_modules=[
        Extension(
            "quant.native._kernels",
            [str(SOURCES / "module.c")],
            depends=sorted(str(path) for path in SOURCES.glob("*")),
            py_limited_api=True,
            optional=True,
        ),
        Extension("allocator._pool", [str(POOL_SOURCE)], py_limited_api=True, optional=True),
    ],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": NameWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
