"""Shared memory between daemon and clients: memfds of fixed size, mapped for reading by all, for writing by one.

A segment is one memfd, its pages reserved when it is made, sealed against shrinking, growing and further seals: no
mapping of it can ever fault. Readers get a descriptor that was opened again for reading only, so their mappings cannot
be made writable; writers get the writable one, of the segments leased to them. docs/formats/protocol.md says what the
kernel enforces of that and what it cannot.

`SegmentMemory` is the daemon's side, `map_for_reading` and `map_for_writing` the client's. Any thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import secrets

import numpy as np

from allocator.errors import CapacityError, TierError
from kvstore.tier import ByteRow

PAGE_BYTES = mmap.PAGESIZE
SEGMENT_NAME = "kvstore-segment-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_SPARE_DESCRIPTORS = 64  # that segments leave to clients


class SegmentMemory:
    """One segment of the daemon's. CapacityError when the system has no room for its pages, or no descriptor.

    memory: the daemon's own view; write_fd, read_fd: what is sent to clients; name: of its own in this boot of the
    system, so that a successor finds it again.
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.name = f"{SEGMENT_NAME}{secrets.token_hex(8)}"
        self.memory: ByteRow = np.empty(0, dtype=np.uint8)
        self.write_fd = self.read_fd = -1
        try:
            self.write_fd = os.memfd_create("kvstore-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            if self.write_fd + _SPARE_DESCRIPTORS > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                raise OSError(errno.EMFILE, "the rest is for clients")
            os.ftruncate(self.write_fd, size_bytes)
            os.posix_fallocate(self.write_fd, 0, size_bytes)
            fcntl.fcntl(self.write_fd, fcntl.F_ADD_SEALS, _SEALS)
            self._open_and_map()
        except OSError as error:
            self.let_go()
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
                raise CapacityError(size_bytes, 0, "bytes") from error
            raise

    @classmethod
    def taken_over(cls, descriptor: int, size_bytes: int, name: str) -> SegmentMemory:
        """One that an earlier daemon has made, which owns the descriptor from then on. TierError for what is none."""
        _check(descriptor, size_bytes)
        found = cls.__new__(cls)
        found.size_bytes, found.name = size_bytes, name
        found.write_fd, found.read_fd = descriptor, -1
        try:
            found._open_and_map()
        except OSError as error:
            raise TierError(f"segment {name}: cannot be mapped ({error.strerror})") from error
        return found

    def _open_and_map(self) -> None:
        os.fchmod(self.write_fd, 0o400)
        self.read_fd = os.open(f"/proc/self/fd/{self.write_fd}", os.O_RDONLY | os.O_CLOEXEC)
        os.fchmod(self.write_fd, 0)  # who is not its owner cannot open it again
        mapped = mmap.mmap(self.write_fd, self.size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self.memory = np.frombuffer(mapped, dtype=np.uint8)  # the one that keeps the mapping, and its descriptor

    def close(self) -> None:
        """Give the memory back now, whoever still has it mapped: they read zeros from then on. Idempotent."""
        if self.write_fd >= 0:
            _libc().fallocate(
                self.write_fd, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(self.size_bytes)
            )
            self.let_go()

    def let_go(self) -> None:
        """No more can map it; who has keeps it as it is. Unmapped here once nothing holds a view."""
        self.memory = np.empty(0, dtype=np.uint8)
        for descriptor in (self.write_fd, self.read_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.write_fd = self.read_fd = -1


def map_for_reading(descriptor: int, size_bytes: int) -> ByteRow:
    """A segment that was received, for reading. TierError for what is not a sealed segment of this size."""
    _check(descriptor, size_bytes)
    mapped = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | _populate(), mmap.PROT_READ)
    mapped.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapped, dtype=np.uint8)


def map_for_writing(descriptor: int, size_bytes: int) -> ByteRow:
    """A segment that is leased to this process. A forked child does not inherit the mapping. Errors as for reading."""
    _check(descriptor, size_bytes)
    mapped = mmap.mmap(descriptor, size_bytes, mmap.MAP_SHARED | _populate(), mmap.PROT_READ | mmap.PROT_WRITE)
    mapped.madvise(mmap.MADV_DONTFORK)
    return np.frombuffer(mapped, dtype=np.uint8)


def abandon(memory: ByteRow) -> None:
    """In a forked child, of a mapping that it did not inherit: never unmap it, since something else of the child's may
    lie where the parent had it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))


def _check(descriptor: int, size_bytes: int) -> None:
    """What was received can be mapped without ever faulting."""
    held = os.fstat(descriptor).st_size
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if held != size_bytes or seals & _SIZE_SEALS != _SIZE_SEALS:
        raise TierError(f"segment: got {held} bytes with seals {seals}; expected {size_bytes}, of fixed size")


def _populate() -> int:
    return getattr(mmap, "MAP_POPULATE", 0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
