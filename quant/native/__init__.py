"""The C kernels: loading them, refusing stale ones, and choosing the path that runs.

`import quant.native` needs no torch. Without a usable extension `kernels` is None and everything runs on torch;
`reason` says why. The path is chosen once, here: the best that this CPU runs and that passes its self-test
(quant.native.selftest), or the one that the environment variable KVSTORE_KERNELS names ("off" for none). Tests force
others with `forced_path`. `path_states` says about each path why it is or is not used.

Called by quant's codecs, by kvstore's hash chain and by attention backends, through quant.dispatch. The C functions
release Python's lock and may be called from any thread.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from quant.native.choice import (
    ABI,
    SETTING,
    Choice,
    PathState,
    after_self_test,
    choose,
    cpu_features,
    refused_by_abi,
    states,
)

__all__ = [
    "ABI",
    "SETTING",
    "PathState",
    "active_path",
    "available_paths",
    "features",
    "forced_path",
    "kernels",
    "path_states",
    "reason",
    "self_test_every_path",
]

_WITHOUT = (
    "INT4 encode and decode, attention over INT4 blocks, page copies and hashing run on torch and numpy: the same "
    "results, several times slower"
)


def _load() -> tuple[ModuleType | None, str]:
    """(the extension, "") or (None, why not)."""
    if os.environ.get(SETTING, "").strip().lower() == "off":
        return None, f"switched off by {SETTING}=off"
    try:
        extension = importlib.import_module("quant.native._kernels")
    except ModuleNotFoundError:
        return None, "not built; install a C compiler and Python's headers, and reinstall"
    except ImportError as error:
        return None, f"the extension cannot be loaded ({error}); reinstall"
    if stale := refused_by_abi(extension):
        return None, stale
    return extension, ""


_extension, reason = _load()
_choice = choose(_extension, os.environ.get(SETTING, "")) if _extension is not None else Choice(None, reason, ())
kernels: Any = _extension if _choice.path else None
"""The extension module, or None."""
reason = _choice.reason
"""Why there are no kernels, "" when there are."""

if kernels is None and "switched off" not in reason:
    warnings.warn(f"kvstore-llm: no native kernels: {reason}. {_WITHOUT}.", RuntimeWarning, stacklevel=2)
elif kernels is not None and (_failed := [f"{one.name}: {one.reason}" for one in _choice.states if one.failed]):
    warnings.warn(
        f"kvstore-llm: native kernels run on path {_choice.path}, since {'; '.join(_failed)}.",
        RuntimeWarning,
        stacklevel=2,
    )


def active_path() -> str | None:
    """Name of the path in use, None without the extension."""
    return None if kernels is None else str(kernels.active())


def available_paths() -> tuple[str, ...]:
    """Paths that this CPU runs and that failed no self-test, best first; empty without the extension."""
    return () if kernels is None else tuple(one.name for one in _choice.states if one.usable)


def path_states() -> tuple[PathState, ...]:
    """Every path there is, best first, and why it cannot be used; empty without the extension.

    Those worse than the one in use have not been self-tested (see `self_test_every_path`).
    """
    return _choice.states


def self_test_every_path() -> tuple[PathState, ...]:
    """`path_states` after self-testing them all. Not while kernels run: it activates one path after the other."""
    if kernels is None:
        return _choice.states
    before = kernels.active()
    try:
        return tuple(after_self_test(kernels, state) for state in states(kernels))
    finally:
        kernels.activate(before)


def features() -> tuple[str, ...]:
    """What this CPU and system have of what the paths use; empty without the extension."""
    return () if kernels is None else cpu_features(kernels)


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
