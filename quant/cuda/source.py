"""The CUDA sources as one text a module, and how they are compiled. No cupy, no torch; any thread.

A module is a list of files of this folder joined in order, so a compiler needs no include path; `#line` keeps the file
names in messages. The int4 module exists once an element kind, "int4_bf16" and so on; "pages" once.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

KINDS = ("bf16", "fp16", "fp32")  # their index is ELEMENT_KIND
_INT4_FILES = ("types.cuh", "scalars.cuh", "int4_keys.cu", "int4_values.cu", "int4_entry.cu")
_PAGE_FILES = ("types.cuh", "pages.cu")
INT4_KERNELS = tuple(
    f"{work}_{bits}"
    for work, choices in (
        ("encode_keys", (4, 5)),
        ("encode_values", (4, 3)),
        ("decode_keys", (4, 5)),
        ("decode_values", (4, 3)),
    )
    for bits in choices
)
MODULES = ("pages", *(f"int4_{kind}" for kind in KINDS))
# No fused products, true divisions. CuPy appends -ftz=true to every compilation: the format is such that flushing
# subnormals changes no byte, and the tests run the kernels both ways.
OPTIONS = ("--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true")


def kernels_of(module: str) -> tuple[str, ...]:
    """Names of the kernels of a module."""
    return ("copy_pages",) if module == "pages" else INT4_KERNELS


@lru_cache(maxsize=len(MODULES))
def source_of(module: str) -> str:
    """The text of a module. KeyError for a name that is not in MODULES."""
    if module not in MODULES:
        raise KeyError(f"no CUDA module {module!r}; known: {', '.join(MODULES)}")
    folder = Path(__file__).parent
    files = _PAGE_FILES if module == "pages" else _INT4_FILES
    parts = [f'#line 1 "{name}"\n{(folder / name).read_text(encoding="utf-8")}' for name in files]
    if module != "pages":
        parts.insert(0, f"#define ELEMENT_KIND {KINDS.index(module.removeprefix('int4_'))}\n")
    return "\n".join(parts)
