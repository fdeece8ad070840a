"""The C form of small allocations and releases: loading it, and refusing one that does not belong to this source.

`core` is the module `allocator._pool`, or None: not built, an old build, or switched off with KVSTORE_KERNELS=off;
`reason` says which. It is optional and says nothing by itself, since the pool is the same without it, only slower.
Read by allocator.block_references, whose plain Python is the reference.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from allocator.block_life import SMALL_BATCH
from allocator.block_state import FREE, IDLE, OPEN_ONCE, SEALED_ONCE

ABI = 1
"""The number that csrc/pool.c has too: an extension with another one is an old build."""
_SETTING = "KVSTORE_KERNELS"  # the variable that quant.native reads too
_EXPECTED = {"ABI": ABI, "FREE": FREE, "IDLE": IDLE, "OPEN_ONCE": OPEN_ONCE, "SEALED_ONCE": SEALED_ONCE}


def refused(extension: Any) -> str:
    """Why an extension is not the one that belongs to this source, "" when it is."""
    for name, expected in _EXPECTED.items():
        found = getattr(extension, name, None)
        if found != expected:
            return f"stale build (its {name} is {found}, this version needs {expected}); reinstall"
    if extension.BATCH_MAX < SMALL_BATCH:
        return f"stale build (it takes batches of {extension.BATCH_MAX}, this version needs {SMALL_BATCH}); reinstall"
    return ""


def _load() -> tuple[Any, str]:
    """(the extension, "") or (None, why not)."""
    if os.environ.get(_SETTING, "").strip().lower() == "off":
        return None, f"switched off by {_SETTING}=off"
    try:
        extension = importlib.import_module("allocator._pool")
    except ModuleNotFoundError:
        return None, "not built; install a C compiler and Python's headers, and reinstall"
    except ImportError as error:
        return None, f"the extension cannot be loaded ({error}); reinstall"
    stale = refused(extension)
    return (None, stale) if stale else (extension, "")


core, reason = _load()
