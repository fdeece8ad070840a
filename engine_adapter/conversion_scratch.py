"""Folders in which a model is converted: one a process, cleared away by the next start when that process was killed.

A lock file beside the folder is held with flock from before the folder is made; the kernel drops it when its process
dies, however it dies, so a folder whose lock can be had is nobody's. Any thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK_SUFFIX = ".lock"
_UNLOCKED_SECONDS = 86_400.0  # folders of versions without locks: no conversion takes a day


@contextmanager
def scratch_folder(folder: Path, name: str) -> Iterator[Path]:
    """A new folder in `folder`, gone at the end."""
    fd, lock = tempfile.mkstemp(prefix=f".{name}-", suffix=_LOCK_SUFFIX, dir=folder)
    scratch = Path(lock.removesuffix(_LOCK_SUFFIX))
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        scratch.mkdir(mode=0o700)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        Path(lock).unlink(missing_ok=True)
        os.close(fd)


def clear_stale(folder: Path, name: str) -> None:
    """Remove what killed processes left in `folder`; what a living one uses stays, and what cannot be removed."""
    for scratch in folder.glob(f".{name}-*"):
        if scratch.is_dir() and not scratch.is_symlink():
            with suppress(OSError):
                _clear(scratch, Path(f"{scratch}{_LOCK_SUFFIX}"))


def _clear(scratch: Path, lock: Path) -> None:
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        if time.time() - scratch.stat().st_mtime > _UNLOCKED_SECONDS:
            shutil.rmtree(scratch)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: its process lives
        shutil.rmtree(scratch)
        lock.unlink(missing_ok=True)
    finally:
        os.close(fd)
