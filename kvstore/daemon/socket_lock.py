"""The directory of a daemon's socket, and the lock that says whose it is: the kernel's, so none is left behind."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TYPE_CHECKING

from allocator.errors import TierError

if TYPE_CHECKING:
    from kvstore.daemon.settings import DaemonSettings


def locked_directory(path: Path, settings: DaemonSettings) -> int:
    """The socket's directory, made and locked for this daemon: a descriptor. TierError says who has it."""
    directory = path.parent
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if settings.is_private and directory.stat().st_uid == os.geteuid() and directory.name == "kvstore":
            directory.chmod(0o700)
        elif not settings.is_private and directory.name == "kvstore":
            directory.chmod(0o711)
        descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise TierError(f"socket {path}: its directory cannot be used ({error.strerror})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise TierError(f"socket {path}: a daemon runs there already, process {holder}") from error
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
