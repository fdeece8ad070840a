"""The directory of a daemon's socket, and the lock that says whose it is: the kernel's, so none is left behind."""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from allocator.errors import TierError

if TYPE_CHECKING:
    from kvstore.daemon.settings import DaemonSettings


def locked_directory(path: Path, settings: DaemonSettings) -> int:
    """The socket's directory, made and locked for this daemon: a descriptor. TierError says who has it, or why it is
    not safe there."""
    try:
        if not path.parent.exists():
            _make(path.parent, settings)
        check_directory(path)
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


def _make(directory: Path, settings: DaemonSettings) -> None:
    """Open to this user alone, or to be passed through where others may connect, whatever the umask; parents too."""
    if not directory.parent.is_dir():
        _make(directory.parent, settings)
    with suppress(FileExistsError):  # somebody else's, made meanwhile
        directory.mkdir(mode=0o700)
        directory.chmod(0o700 if settings.is_private else 0o711)


def check_directory(path: Path) -> None:
    """One that is there is left as it is, and is not used where others could put their own socket in the place of the
    daemon's. TierError; OSError when it is not there."""
    directory = path.parent
    found = directory.stat()
    said = f"socket {path}: got the directory {directory}"
    if not stat.S_ISDIR(found.st_mode):
        raise TierError(f"{said}, which is none; expected a directory")
    if found.st_mode & stat.S_IWOTH:
        raise TierError(
            f"{said}, which everybody may write to (mode {found.st_mode & 0o7777:o}), and so take the daemon's place; "
            f"expected one of its own, such as {directory}/kvstore/{path.name} would have"
        )
    if found.st_uid not in (0, os.geteuid()):
        raise TierError(
            f"{said} of user {found.st_uid}, who could take the daemon's place; expected one of user {os.geteuid()}"
        )
