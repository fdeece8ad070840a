"""SGLang's released wheel, imported on a CPU: its real classes, with stand-ins for two packages that they only name.

Triton and torchvision (1.5 GB with what they bring) are imported at the top of files that hold the host pools and the
cache controller, and used by none of what runs here. A stand-in has every name and does nothing.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

NAMES = ("triton", "torchvision")


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


class _Any(metaclass=_AnyMeta):
    """A class, a decorator, a value: whatever a file makes of it while it is imported."""

    def __new__(cls, *given: Any, **named: Any) -> Any:
        return given[0] if cls is _Any and len(given) == 1 and callable(given[0]) else super().__new__(cls)

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) else self


class _Module(types.ModuleType):
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        found = name.partition(".")[0] in NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def import_sglang() -> None:
    """Make `sglang` importable in this process."""
    importlib.import_module("torch._inductor.select_algorithm")  # it asks for the real Triton, and has found none now
    if any(importlib.util.find_spec(name) is None for name in NAMES):
        sys.meta_path.append(_Finder())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("managers.cache_controller", "mem_cache.pool_host.mla", "mem_cache.pool_host.mamba"):
            importlib.import_module(f"sglang.srt.{name}")
