"""One writer a directory: a lock file held with flock, which also says how the last writer ended.

The kernel drops the lock when its process dies, however it dies. A forked child does not inherit it: its copy of the
file is closed in the child, so that the lock ends with the process that took it. Used by DiskTier only, at open and
close.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from allocator.errors import TierError
from kvstore.disk_tier.layout import BALLAST_BYTES, BALLAST_NAME, LOCK_NAME, READERS_NAME

_MOST_BYTES = 4096
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


class DirectoryLock:
    """Taken by the constructor. TierError names the process that holds it.

    previous: what the last writer left in the file ({} on the first open or when it cannot be read).
    """

    def __init__(self, directory: Path, sync: str) -> None:
        self._path = directory / LOCK_NAME
        self._sync = sync
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(f"disk tier {directory}: cannot be opened for writing ({error.strerror})") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = self._read().get("pid")
            os.close(self._fd)
            who = "this process" if holder == os.getpid() else f"process {holder}"
            raise TierError(
                f"disk tier {directory}: already open for writing in {who}; expected one writer a directory "
                "(opening it for inspection is allowed)"
            ) from error
        _let_ballast_go(directory)
        self.previous = self._read()
        self._pid = os.getpid()
        self._readers_fd = -1
        _held.add(self)
        try:
            self._readers_fd = os.open(directory / READERS_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._write("open")
        except OSError as error:
            self._drop()
            raise TierError(f"disk tier {directory}: cannot be written ({error.strerror})") from error

    @property
    def is_ours(self) -> bool:
        """False in a forked child."""
        return self._fd >= 0 and self._pid == os.getpid()

    @property
    def survived_power_loss(self) -> bool:
        """False when the last writer promised nothing, did not close, and the machine has started anew since."""
        before = self.previous
        if before.get("state", "closed") == "closed" or before.get("sync") != "none":
            return True
        return before.get("boot") == _boot_id()

    @property
    def is_inspected(self) -> bool:
        """Whether somebody reads the directory just now: freed pages of the index cannot be used then."""
        try:
            fcntl.flock(self._readers_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._readers_fd, fcntl.LOCK_UN)
        return False

    def release(self) -> None:
        """Note a clean end and let go. Idempotent; in a forked child only the child's copy is closed."""
        if self.is_ours:
            with suppress(OSError):  # a full disk: the next open then checks more than it must
                self._write("closed")
        self._drop()

    def _drop(self) -> None:
        _held.discard(self)
        for fd in (self._fd, self._readers_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._readers_fd = -1

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(os.pread(self._fd, _MOST_BYTES, 0).rstrip(b" \n\x00") or b"{}")
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _write(self, state: str) -> None:
        row = {"pid": os.getpid(), "boot": _boot_id(), "sync": self._sync, "state": state}
        os.pwrite(self._fd, json.dumps(row).encode().ljust(256), 0)


class InspectionLock:
    """Held shared by those who read a directory that another process may write, exclusively to replace its index.

    TierError when it cannot be had within timeout_seconds.
    """

    def __init__(self, directory: Path, *, exclusive: bool, timeout_seconds: float = 5.0) -> None:
        flags = os.O_RDWR | os.O_CREAT if exclusive else os.O_RDONLY
        try:
            self._fd = os.open(directory / READERS_NAME, flags | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TierError(f"disk tier {directory}: cannot be opened ({error.strerror})") from error
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                fcntl.flock(self._fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            except OSError as error:
                if time.monotonic() >= deadline:
                    os.close(self._fd)
                    what = "is being inspected" if exclusive else "has its index replaced just now"
                    raise TierError(f"disk tier {directory}: {what}; expected to be alone") from error
                time.sleep(0.01)
            else:
                return

    def __enter__(self) -> InspectionLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _let_ballast_go(directory: Path) -> None:
    """On a full file system, for what opening writes; the writer takes it again when it can."""
    room = os.statvfs(directory)
    if room.f_bavail * room.f_frsize < BALLAST_BYTES:
        with suppress(OSError):
            (directory / BALLAST_NAME).unlink()


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _forget_in_child() -> None:
    for lock in list(_held):
        lock._drop()


os.register_at_fork(after_in_child=_forget_in_child)
