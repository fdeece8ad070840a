"""Slot files: one file a size class, slots of that size, and how frames are written to and read from them.

Bookkeeping (take, free, plan) is called under the tier's lock and touches no file. A Plan is carried out afterwards, on
the thread that writes, before the slots it names are written: first room is given back (holes), then room is taken
(fallocate), so that the file system never holds more than the budget. Payloads go between the caller's buffers and the
page cache, each piece hashed while it lies in the processor's cache; nothing is copied in between.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvstore.disk_tier.layout import PAGE_BYTES, slot_file_bytes, slot_file_name
from kvstore.tier import ByteRow, Job
from quant.native.summed_file import Sums, Write, read_part, read_summed

_GROW_SLOTS, _GROW_BYTES = 16, 16 << 20
_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02
_NO_HOLES = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SLOT_OVERHEAD_BYTES = 128  # what a file system may need to remember where a slot lies
FILE_OVERHEAD_BYTES = 2 * PAGE_BYTES

_libc = ctypes.CDLL(None, use_errno=True)


class Plan:
    """Changes of files that were decided and not made: (slot size, first slot, slots)."""

    __slots__ = ("growths", "punches")

    def __init__(self) -> None:
        self.punches: list[tuple[int, int]] = []
        self.growths: list[tuple[int, int, int]] = []


class _SlotFile:
    __slots__ = ("fd", "free", "holes", "slot_bytes", "slot_count")

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.fd = -1
        self.slot_count = 0  # the file's length, in slots
        self.free: list[int] = []  # allocated, not in use; a heap, so that files stay short
        self.holes: list[int] = []  # within the length, without room behind them; a heap

    @property
    def allocated_slots(self) -> int:
        return self.slot_count - len(self.holes)

    @property
    def cost_bytes(self) -> int:
        slots = self.allocated_slots
        return slots * (self.slot_bytes + SLOT_OVERHEAD_BYTES) + (FILE_OVERHEAD_BYTES if self.slot_count else 0)


class SlotFiles:
    """All slot files of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, _SlotFile] = {}
        self.can_punch = True

    # bookkeeping -----------------------------------------------------------------------------------------------------

    @property
    def cost_bytes(self) -> int:
        """Bytes that the file system holds for slots, in use or not, at most."""
        return sum([file.cost_bytes for file in self._files.values()])

    def growth_bytes(self, slot_bytes: int) -> int:
        """What one more slot of this size costs."""
        known = slot_bytes in self._files and self._files[slot_bytes].slot_count
        return slot_bytes + SLOT_OVERHEAD_BYTES + (0 if known else FILE_OVERHEAD_BYTES)

    def take(self, slot_bytes: int) -> int | None:
        """A slot that has its room already."""
        file = self._files.get(slot_bytes)
        return heapq.heappop(file.free) if file is not None and file.free else None

    def grow(self, plan: Plan, slot_bytes: int, room_bytes: int) -> int:
        """A new slot, and some to spare where a good part of `room_bytes` is left. The caller saw to room for one."""
        file = self._files.setdefault(slot_bytes, _SlotFile(slot_bytes))
        if file.holes:
            slot = heapq.heappop(file.holes)
            plan.growths.append((slot_bytes, slot, 1))
            return slot
        each = slot_bytes + SLOT_OVERHEAD_BYTES
        count = max(1, min(_GROW_SLOTS, _GROW_BYTES // each, room_bytes // (8 * each)))
        slot = file.slot_count
        file.slot_count += count
        for spare in range(slot + 1, slot + count):
            heapq.heappush(file.free, spare)
        plan.growths.append((slot_bytes, slot, count))
        return slot

    def give_back(self, slot_bytes: int, slot: int) -> None:
        """A slot that nobody uses any more; its room stays, for the next of its size."""
        heapq.heappush(self._files[slot_bytes].free, slot)

    def reclaim(self, plan: Plan, spare_bytes: int) -> bool:
        """Give the room of one free slot back, not one of `spare_bytes` if others are free. False: none is free."""
        files = [file for file in self._files.values() if file.free and (self.can_punch or _tail_is_free(file))]
        if not files:
            return False
        file = max(files, key=lambda file: (file.slot_bytes != spare_bytes, len(file.free) * file.slot_bytes))
        slot = max(file.free)
        file.free.remove(slot)
        heapq.heapify(file.free)
        heapq.heappush(file.holes, slot)
        plan.punches.append((file.slot_bytes, slot))
        return True

    def in_use(self) -> dict[int, int]:
        """Slots that hold a copy, by size."""
        return {size: file.allocated_slots - len(file.free) for size, file in self._files.items() if file.slot_count}

    # files -----------------------------------------------------------------------------------------------------------

    def carry_out(self, plan: Plan) -> None:
        """Make the planned changes, room given back first. OSError when room cannot be had; then `undo` the plan."""
        self.give_room(plan)
        while plan.growths:
            slot_bytes, slot, count = plan.growths[-1]
            fd = self._fd(slot_bytes)
            os.posix_fallocate(fd, slot * slot_bytes, count * slot_bytes)
            plan.growths.pop()
        for slot_bytes in list(self._files):
            self._shorten(slot_bytes)

    def give_room(self, plan: Plan) -> None:
        """The first half of carry_out."""
        while plan.punches:
            slot_bytes, slot = plan.punches[-1]
            self._punch(slot_bytes, slot, 1)
            plan.punches.pop()

    def undo(self, plan: Plan) -> None:
        """What carry_out did not reach, once the slots of the plan's entries were given back, has not happened."""
        for slot_bytes, slot in plan.punches:
            file = self._files[slot_bytes]
            file.holes.remove(slot)
            heapq.heapify(file.holes)
            heapq.heappush(file.free, slot)
        plan.punches.clear()
        for slot_bytes, slot, count in plan.growths:
            file = self._files[slot_bytes]
            gone = set(range(slot, slot + count))
            file.free = [one for one in file.free if one not in gone]
            heapq.heapify(file.free)
            for one in sorted(gone):
                heapq.heappush(file.holes, one)
            with suppress(OSError):  # what a failed fallocate left behind is found again by the next open
                self._punch(slot_bytes, slot, count)
            self._shorten(slot_bytes)
        plan.growths.clear()

    def adopt(self, used: dict[int, set[int]]) -> int:
        """At open: keep the slots that the index names, give the rest back. How many bytes came free."""
        freed = 0
        self.can_punch = self._probe_holes()
        for name in sorted(os.listdir(self._directory)):
            slot_bytes = slot_file_bytes(name)
            if slot_bytes is None:
                continue
            keep = used.get(slot_bytes, set())
            file = self._files.setdefault(slot_bytes, _SlotFile(slot_bytes))
            before = self.stored_bytes(slot_bytes)
            file.slot_count = max(keep, default=-1) + 1
            os.ftruncate(self._fd(slot_bytes), file.slot_count * slot_bytes)
            file.holes = sorted(set(range(file.slot_count)) - keep)
            for first, count in _runs(file.holes):
                if not self._punch_at_open(slot_bytes, first, count):
                    file.free, file.holes = file.holes, []
                    break
            freed += max(0, before - self.stored_bytes(slot_bytes))
            self._shorten(slot_bytes)
        return freed

    def length_slots(self, slot_bytes: int) -> int:
        """Whole slots in the file as it is on disk; 0 when there is none."""
        try:
            return os.stat(self._directory / slot_file_name(slot_bytes)).st_size // slot_bytes
        except OSError:
            return 0

    def stored_bytes(self, slot_bytes: int) -> int:
        return os.fstat(self._fd(slot_bytes)).st_blocks * 512

    def empty(self) -> None:
        """Give everything back that is not in use."""
        plan = Plan()
        while self.reclaim(plan, 0):
            pass
        self.carry_out(plan)

    def sync(self, sizes: set[int]) -> None:
        for slot_bytes in sizes:
            os.fdatasync(self._fd(slot_bytes))

    def close(self) -> None:
        for file in self._files.values():
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1

    def _fd(self, slot_bytes: int) -> int:
        file = self._files[slot_bytes]
        if file.fd < 0:
            path = self._directory / slot_file_name(slot_bytes)
            file.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return file.fd

    def _probe_holes(self) -> bool:
        """Whether this file system makes holes; where not, only the ends of files can be given back.

        A full one is asked for a hole beyond the end of an empty file: that needs no room.
        """
        path = self._directory / "probe"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in NO_ROOM:
                return False
            raise
        try:
            with _without_room():
                os.pwrite(fd, bytes(2 * PAGE_BYTES), 0)
            made = False
            with _without_room():
                made = _make_hole(fd, 0, PAGE_BYTES)
            return made
        finally:
            os.close(fd)
            path.unlink(missing_ok=True)

    def _punch_at_open(self, slot_bytes: int, slot: int, count: int) -> bool:
        """False too where a full file system cannot even note a hole: the slots stay allocated, and free."""
        made = False
        with _without_room():
            made = self._punch(slot_bytes, slot, count)
        return made

    def _punch(self, slot_bytes: int, slot: int, count: int) -> bool:
        return self.can_punch and _make_hole(self._fd(slot_bytes), slot * slot_bytes, count * slot_bytes)

    def _shorten(self, slot_bytes: int) -> None:
        """Cut holes off the file's end; a file without slots goes."""
        file = self._files[slot_bytes]
        before, holes = file.slot_count, set(file.holes)
        while file.slot_count and file.slot_count - 1 in holes:
            file.slot_count -= 1
        if file.slot_count == 0:
            if file.fd >= 0:
                os.close(file.fd)
            (self._directory / slot_file_name(slot_bytes)).unlink(missing_ok=True)
            del self._files[slot_bytes]
        elif file.slot_count < before:
            file.holes = [slot for slot in file.holes if slot < file.slot_count]
            heapq.heapify(file.holes)
            os.ftruncate(self._fd(slot_bytes), file.slot_count * slot_bytes)

    # frames ----------------------------------------------------------------------------------------------------------

    def frame_write(self, slot: int, size: int, head: bytearray, sums: Sums, job: Job) -> Write:
        """Of a job's frame to a slot of `size` bytes, to the end of its last page; see write_all_summed."""
        return self._fd(size), slot * size, head, sums, job.rows, -(len(head) + job.size_bytes) % PAGE_BYTES

    def read_rows(self, slot: int, size: int, head: bytearray, sums: Sums, rows: list[ByteRow]) -> bytes | None:
        """Read a frame's payload into rows and fill the sums into the head. None: that head lies there; else what does,
        b"" where the file ends too early.
        """
        return read_summed(self._fd(size), slot * size, head, sums, rows)

    def read_part(self, slot: int, size: int, offset: int, rows: list[ByteRow]) -> bytes | None:
        """Read from `offset` in a slot on into rows: XXH3-128 of what came, None where the file ends too early."""
        return read_part(self._fd(size), slot * size + offset, rows)

    def write_whole(self, slot: int, frame: bytes, size: int) -> None:
        """Write a frame that was made elsewhere."""
        view, at = memoryview(frame), slot * size
        while view.nbytes:
            done = os.pwrite(self._fd(size), view, at)
            view, at = view[done:], at + done

    def read_whole(self, slot: int, frame_bytes: int, size: int) -> bytes | None:
        """A slot's first bytes; None when the file ends before them."""
        frame = os.pread(self._fd(size), frame_bytes, slot * size)
        return frame if len(frame) == frame_bytes else None

    def starts_with(self, slot: int, size: int, expected: bytes, offset: int) -> bool:
        """Whether a slot has these bytes at `offset`: a quick look at open."""
        try:
            return os.pread(self._fd(size), len(expected), slot * size + offset) == expected
        except OSError:
            return False


@contextmanager
def _without_room() -> Iterator[None]:
    """What a full file system cannot do is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise


def _make_hole(fd: int, offset: int, length: int) -> bool:
    if _libc.fallocate64(fd, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(length)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_HOLES:
        return False
    raise OSError(code, os.strerror(code))


def _tail_is_free(file: _SlotFile) -> bool:
    return bool(file.free) and max(file.free) == file.slot_count - 1


def _runs(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each run of numbers that follow each other, in sorted `slots`."""
    first = previous = None
    for slot in slots:
        if first is None or previous is None:
            first = slot
        elif slot != previous + 1:
            yield first, previous + 1 - first
            first = slot
        previous = slot
    if first is not None and previous is not None:
        yield first, previous + 1 - first
