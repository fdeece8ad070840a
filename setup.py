"""Builds the native CPU kernels: one source compiled once per instruction set, all in one extension module.

Everything else about the package is in pyproject.toml. The extension is optional: without a compiler the package
installs and runs on torch alone, and says so when it is imported.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("quant/native/csrc")
COMMON_FLAGS = [
    "-std=gnu11", "-O3", "-fvisibility=hidden", "-Wall", "-Wextra",
    # The arithmetic is normative: never fused, never reassociated. No -ffast-math: it changes the whole process.
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
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
SHA_FLAGS = ["-msha", "-msse4.1", "-mssse3"]


class BuildKernels(build_ext):
    """Compiles path.c once per path that the compiler knows, then everything else, and links it all."""

    def build_extension(self, ext: Extension) -> None:
        """Only `quant.native._kernels` is built here."""
        self.mkpath(self.build_temp)
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        paths = ["baseline", *(name for name in X86_PATHS if on_x86 and self._accepts(PATH_FLAGS[name]))]
        have = [f"-DKV_HAVE_{name}" for name in paths]
        objects = []
        for name in paths:
            objects += self._compile("path.c", f"path-{name}", [*PATH_FLAGS[name], f"-DKV_PATH={name}"])
        if on_x86 and self._accepts(SHA_FLAGS):
            have.append("-DKV_HAVE_SHA")
        for source in sorted(SOURCES.glob("*.c")):
            if source.name == "path.c":
                continue
            flags = SHA_FLAGS if source.name == "sha_x86.c" else []
            if source.name == "sha_x86.c" and "-DKV_HAVE_SHA" not in have:
                continue
            objects += self._compile(source.name, "common", [*have, *flags])
        self.compiler.link_shared_object(
            objects,
            self.get_ext_fullpath(ext.name),
            extra_postargs=["-pthread"],
            libraries=["m"],
            build_temp=self.build_temp,
        )

    def _compile(self, source: str, folder: str, flags: list[str]) -> list[str]:
        return self.compiler.compile(
            [str(SOURCES / source)],
            output_dir=str(Path(self.build_temp) / folder),
            include_dirs=[str(SOURCES), *self.include_dirs],
            macros=[("Py_LIMITED_API", "0x030B0000")],
            extra_postargs=[*COMMON_FLAGS, "-pthread", *flags],
            depends=[str(path) for path in SOURCES.iterdir()],
        )

    def _accepts(self, flags: list[str]) -> bool:
        """Does the compiler know these flags? An older one builds the older paths only."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "probe.c"
            source.write_text("#include <immintrin.h>\nint probe(void) { return 0; }\n", encoding="ascii")
            command = [*self.compiler.compiler_so[:1], *flags, "-c", str(source), "-o", str(Path(folder) / "probe.o")]
            return subprocess.run(command, capture_output=True, check=False).returncode == 0


setup(
    ext_modules=[
        Extension(
            "quant.native._kernels",
            [str(SOURCES / "module.c")],
            depends=[str(path) for path in SOURCES.glob("*")],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
