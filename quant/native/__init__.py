"""The C kernels: loading them, refusing stale ones, and choosing the path that runs.

`import quant.native` needs no torch. Without a usable extension `kernels` is None and everything runs on torch;
`reason` says why. The path is chosen once, here: the best that this CPU runs and that passes its self-test, or the one
that the environment variable KVSTORE_KERNELS names ("off" for none). Tests force others with `forced_path`.

Called by quant's codecs, by kvstore's hash chain and by attention backends. The C functions release Python's lock and
may be called from any thread.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

ABI = 1
"""The number that csrc/kernels.h has too: an extension with another one is an old build."""
SETTING = "KVSTORE_KERNELS"
_WITHOUT = (
    "INT4 encode and decode, attention over INT4 blocks, page copies and hashing run on torch and numpy: the same "
    "results, several times slower"
)


def _load() -> tuple[ModuleType | None, str]:
    """(the extension, "") or (None, why not)."""
    if os.environ.get(SETTING, "").lower() == "off":
        return None, f"switched off by {SETTING}=off"
    try:
        extension = importlib.import_module("quant.native._kernels")
    except ImportError as error:
        return None, f"not built ({error}); install a C compiler and reinstall"
    found = getattr(extension, "ABI", None)
    if found != ABI:
        return None, f"stale build (its ABI number is {found}, this version needs {ABI}); reinstall"
    return extension, ""


_extension, reason = _load()
kernels: Any = _extension
"""The extension module, or None."""


def _choose() -> str:
    """Why the named path cannot be used, "" when all is well."""
    wanted = os.environ.get(SETTING, "").lower()
    if wanted in ("", "auto"):
        for name, runs_here in kernels.paths():
            if runs_here:
                kernels.activate(name)
                break
        return ""
    try:
        kernels.activate(wanted)
    except ValueError:
        known = ", ".join(name for name, runs_here in kernels.paths() if runs_here)
        return f"{SETTING}={wanted!r}: expected off, auto or a path that runs here ({known})"
    return ""


if kernels is not None and (problem := _choose()):
    kernels, reason = None, problem
if kernels is None and "switched off" not in reason:
    warnings.warn(f"kvstore-llm: no native kernels: {reason}. {_WITHOUT}.", RuntimeWarning, stacklevel=2)


def active_path() -> str | None:
    """Name of the path in use, None without the extension."""
    return None if kernels is None else str(kernels.active())


def available_paths() -> tuple[str, ...]:
    """Paths that this CPU runs, best first; empty without the extension."""
    return () if kernels is None else tuple(name for name, runs_here in kernels.paths() if runs_here)


@contextmanager
def forced_path(name: str) -> Iterator[None]:
    """Run on the named path for a while (tests and benchmarks). ValueError when it cannot run here."""
    if kernels is None:
        raise ValueError(f"kernel path {name!r}: {reason}")
    before = kernels.active()
    kernels.activate(name)
    try:
        yield
    finally:
        kernels.activate(before)


def codec_selftest() -> bool:
    """Whether the active path's INT4 codec gives the reference's bytes on built-in inputs. Half a millisecond."""
    return kernels is not None and bool(kernels.codec_selftest()[0])
