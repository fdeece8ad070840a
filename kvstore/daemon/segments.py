"""Shared memory between daemon and clients: memfds of fixed size, mapped for reading by all, for writing by one.

A segment is one memfd, its pages reserved when it is made, sealed against shrinking, growing and further seals: no
mapping of it can ever fault. It lies in huge pages where the system can be talked into them (MADV_COLLAPSE, Linux 6.1;
by itself it gives shared memory none): then it is mapped in a tenth of a millisecond, not in tens, and copies do not
depend on where its pages happen to lie. Readers get a descriptor that was opened again for reading only, so their
mappings cannot be made writable; writers get the writable one, of the segments leased to them. docs/formats/protocol.md
says what the kernel enforces of that and what it cannot.

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
import threading
import time
from functools import cache

import numpy as np

from allocator.errors import CapacityError, TierError
from kvstore.tier import ByteRow

PAGE_BYTES = mmap.PAGESIZE
SEGMENT_NAME = "kvstore-segment-"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_HUGE_BYTES = 2 << 20
_MAP_FIXED, _MAP_FAILED = 0x10, ctypes.c_void_p(-1).value
_MADV_COLLAPSE = 25
_GATHERING_SECONDS = 0.5
_SPARE_DESCRIPTORS = 64  # that segments leave to clients
_forking = threading.RLock()
"""A fork waits for what is mapped and not kept from children yet."""


class SegmentMemory:
    """One segment of the daemon's. CapacityError when the system has no room for its pages, or no descriptor.

    memory: the daemon's own view; write_fd, read_fd: what is sent to clients; name: of its own in this boot of the
    system, so that a successor finds it again.
    """

    def __init__(self, size_bytes: int, at_leisure: bool = False) -> None:
        """at_leisure: ask for huge pages, for which the system may have to make room first."""
        self.size_bytes = size_bytes
        self.name = f"{SEGMENT_NAME}{secrets.token_hex(8)}"
        self.memory: ByteRow = np.empty(0, dtype=np.uint8)
        self.write_fd = self.read_fd = -1
        try:
            self.write_fd = os.memfd_create("kvstore-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            if self.write_fd + _SPARE_DESCRIPTORS > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
                raise OSError(errno.EMFILE, "the rest is for clients")
            os.ftruncate(self.write_fd, size_bytes)
            self._open_and_map()
            if at_leisure:
                self.gather(fresh=True)
            os.posix_fallocate(self.write_fd, 0, size_bytes)  # what is not there yet
            fcntl.fcntl(self.write_fd, fcntl.F_ADD_SEALS, _SEALS)
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
        self.memory = _mapped(self.write_fd, self.size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)

    def gather(self, *, fresh: bool = False) -> bool:
        """Ask for huge pages, in place: who has it mapped, or uses it meanwhile, sees the same bytes. False where there
        was none for a part of it, or it took the system too long to make room. fresh: nothing is there yet, so nothing
        has to move."""
        memory = self.memory  # stays mapped until this returns
        start, whole = memory.ctypes.data, memory.nbytes - memory.nbytes % _HUGE_BYTES
        gathered, until = True, time.monotonic() + _GATHERING_SECONDS
        for at in range(0, whole, _HUGE_BYTES):
            if fresh:
                os.pwrite(self.write_fd, b"\0", at)
            if time.monotonic() > until or _libc().madvise(start + at, _HUGE_BYTES, _MADV_COLLAPSE):
                gathered = False
                break
        _libc().madvise(start, memory.nbytes, mmap.MADV_DONTNEED)  # shared: it stays, only not as this process's size
        return gathered

    def close(self) -> None:
        """Give the memory back now, whoever still has it mapped: they read zeros from then on. Idempotent."""
        if self.write_fd >= 0:
            _libc().fallocate(self.write_fd, _KEEP_SIZE | _PUNCH_HOLE, 0, self.size_bytes)
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
    return _mapped(descriptor, size_bytes, mmap.PROT_READ, mmap.MAP_POPULATE)


def map_for_writing(descriptor: int, size_bytes: int) -> ByteRow:
    """A segment that is leased to this process. A forked child does not inherit the mapping. Errors as for reading."""
    _check(descriptor, size_bytes)
    return _mapped(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_POPULATE)


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


def _mapped(descriptor: int, size_bytes: int, protection: int, flags: int = 0) -> ByteRow:
    """At a multiple of a huge page, as it takes to be mapped by such, and in no child. Python's mmap cannot say where,
    so it reserves room and the segment is mapped over that: one array holds both, and views of it are told by it."""
    spare = _HUGE_BYTES if size_bytes >= _HUGE_BYTES else 0
    room = mmap.mmap(-1, size_bytes + spare, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, protection)
    room.madvise(mmap.MADV_DONTFORK)
    start = np.frombuffer(room, dtype=np.uint8).ctypes.data
    offset = -start % _HUGE_BYTES if spare else 0
    flags |= mmap.MAP_SHARED | _MAP_FIXED
    with _forking:
        found = _libc().mmap(start + offset, size_bytes, protection, flags, descriptor, 0)
        if found == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), "a segment cannot be mapped")
        if _libc().madvise(found, size_bytes, mmap.MADV_DONTFORK):
            raise OSError(ctypes.get_errno(), "a segment cannot be kept from children")
    return np.frombuffer(room, dtype=np.uint8, count=size_bytes, offset=offset)


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    libc.mmap.restype, libc.mmap.argtypes = address, (address, size, number, number, number, offset)
    libc.madvise.argtypes = (address, size, number)
    libc.fallocate.argtypes = (number, number, offset, offset)
    return libc


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forking.release)
