"""Rules of the house that no linter knows: sizes, names, and what is never imported. Each rule is shown to catch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("allocator", "quant", "kvstore", "engine_adapter", "benchmarks")
FILES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
FILE_LINES = 450
FUNCTION_LINES = 75
CONSTRUCTOR_ARGUMENTS = 8
BANNED_NAMES = {"data", "info", "offload", "onboard", "swap", "serde"}
ENGINES_NAMES = {"extra_info", "transfer_stats_data"}
"""Parameters that SGLang and vLLM pass by these names."""
BANNED_FILES = {*BANNED_NAMES, "utils", "util", "common", "helpers", "misc"}
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
BANNED_CALLS = {"eval", "exec"}


def names(file: Path) -> str:
    return str(file.relative_to(ROOT))


def defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def broken_rules(source: str, where: str = "module.py") -> list[str]:
    tree = ast.parse(source)
    found = []
    if len(source.splitlines()) > FILE_LINES:
        found.append(f"{len(source.splitlines())} lines in a file")
    if source.strip() and not ast.get_docstring(tree):
        found.append("no module docstring")
    if set(Path(where).stem.split("_")) & BANNED_FILES:
        found.append(f"file name {where}")
    for name in defined_names(tree):
        if set(name.lower().split("_")) & BANNED_NAMES and name not in ENGINES_NAMES:
            found.append(f"name {name}")
        if name.endswith("Manager"):
            found.append(f"class {name}")
    for node in ast.walk(tree):
        found += _broken_in(node)
    return found


def _broken_in(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{node.name}: {length} lines"
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if node.name == "__init__" and len(arguments) - 1 > CONSTRUCTOR_ARGUMENTS:
            yield f"{node.name}: {len(arguments) - 1} arguments"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        for module in modules:
            if module.split(".")[0] in BANNED_MODULES:
                yield f"import {module}"
    elif isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in BANNED_CALLS or called == "torch.load":
            yield f"call of {called}"
    elif isinstance(node, ast.ExceptHandler) and _swallows_everything(node):
        yield "a handler for everything"


def _swallows_everything(node: ast.ExceptHandler) -> bool:
    """True unless the handler names what it is for, raises again, or carries the error elsewhere."""
    if node.type is not None and ast.unparse(node.type) != "BaseException":
        return False
    if isinstance(node.body[-1], ast.Raise):
        return False
    kept = [name.id for line in node.body for name in ast.walk(line) if isinstance(name, ast.Name)]
    return node.name is None or node.name not in kept


@pytest.mark.parametrize("file", FILES, ids=names)
def test_rules_hold(file: Path) -> None:
    assert broken_rules(file.read_text(encoding="utf-8"), file.name) == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("'''d'''\n" + "x = 1\n" * FILE_LINES, "lines in a file"),
        ("x = 1\n", "no module docstring"),
        ("'''d'''\ndef f():\n" + "    x = 1\n" * FUNCTION_LINES, "f: 76 lines"),
        ("'''d'''\nclass A:\n    def __init__(self, a, b, c, d, e, f, g, h, i): ...\n", "9 arguments"),
        ("'''d'''\nblock_info = 1\n", "name block_info"),
        ("'''d'''\nclass BlockManager: ...\n", "class BlockManager"),
        ("'''d'''\nimport pickle\n", "import pickle"),
        ("'''d'''\nimport torch\ntorch.load('x')\n", "call of torch.load"),
        ("'''d'''\ntry:\n    pass\nexcept:\n    pass\n", "a handler for everything"),
        ("'''d'''\ntry:\n    pass\nexcept BaseException:\n    x = 1\n", "a handler for everything"),
    ],
)
def test_a_broken_rule_is_found(source: str, expected: str) -> None:
    assert any(expected in found for found in broken_rules(source))


@pytest.mark.parametrize("package", ["allocator", "kvstore", "engine_adapter.batch"])
def test_control_plane_imports_no_torch(package: str) -> None:
    unwanted = ("torch", "cupy", "redis", "lmdb", "transformers")
    program = f"import sys, {package}; print([m for m in {unwanted} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
