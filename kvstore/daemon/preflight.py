"""What `kvstore serve --check` tries beside reading the settings: whether this machine has what they ask for.

Starts nothing and leaves nothing behind. Any thread.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from allocator.errors import TierError
from kvstore.daemon.socket_lock import check_directory
from kvstore.disk_tier.map_room import why_not_mapped
from kvstore.host_memory import host_limit_bytes

if TYPE_CHECKING:
    from kvstore.daemon.settings import DaemonSettings


def problems(settings: DaemonSettings) -> list[str]:
    """Each says what was given and what is expected; none: the daemon could start, as far as this can be known."""
    return [*memory_problems(settings), *_disk_problems(settings), *_socket_problems(settings)]


def memory_problems(settings: DaemonSettings) -> list[str]:
    """More shared memory than there can ever be: the budget would be smaller, or a control group would end it all."""
    limit_bytes = host_limit_bytes()
    if settings.store.host_bytes <= limit_bytes:
        return []
    return [
        f"host_bytes: got {settings.store.host_bytes}; expected at most {limit_bytes}, which is what this process may "
        "have of the machine's memory, better 1 GiB less"
    ]


def closed_directory(settings: DaemonSettings) -> list[str]:
    """The socket's directory is there, and its mode keeps away who may connect."""
    directory = Path(settings.socket_path).parent
    try:
        mode = directory.stat().st_mode & 0o7777
    except OSError:
        return []
    if settings.is_private or mode & (stat.S_IXGRP | stat.S_IXOTH):
        return []
    return [
        f"socket_path: users of allowed_uids and domains do not get through {directory} (mode {mode:o}); expected "
        f"more: chmod 711 {directory}"
    ]


def _disk_problems(settings: DaemonSettings) -> list[str]:
    path = settings.store.disk_path
    if not path:
        return []
    problem = _cannot_be_used(Path(path))
    found = [f"disk_path: got {path!r}; expected a directory that can be written to ({problem})"] if problem else []
    unmapped = why_not_mapped(settings.store.disk_bytes)
    return found if unmapped is None else [*found, unmapped]


def _socket_problems(settings: DaemonSettings) -> list[str]:
    path = Path(settings.socket_path)
    try:
        if path.parent.exists():
            check_directory(path)
    except TierError as error:
        return [str(error)]
    except OSError as error:
        return [f"socket_path: got {str(path)!r}; its directory cannot be used ({error.strerror})"]
    problem = _cannot_be_used(path.parent)
    return [f"socket_path: got {str(path)!r}; expected a directory to write to ({problem})"] if problem else []


def _cannot_be_used(directory: Path) -> str:
    """Why nothing can be written there, "" where it can: found by making and removing something there, or where that is
    to be made first in what is there of the way to it."""
    try:
        there = next(one for one in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(one))
        if not there.is_dir():
            return f"{there} is no directory"
        os.rmdir(tempfile.mkdtemp(prefix=".kvstore-check-", dir=there))
    except OSError as error:
        return f"{there}: {error.strerror}"
    return ""
