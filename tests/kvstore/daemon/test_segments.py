"""Segments lie in huge pages where the system has some, and are mapped by them."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from kvstore.daemon.segments import SegmentMemory, map_for_reading, map_for_writing
from kvstore.tier import ByteRow
from tests.kvstore.daemon.kit import ROOT

SIZE = 8 << 20


def huge_bytes(memory: ByteRow) -> int:
    """Of this mapping, in huge pages."""
    place = memory.ctypes.data
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if bounds and int(bounds[1], 16) <= place < int(bounds[2], 16):
            return int(re.search(r"ShmemPmdMapped:\s+(\d+) kB", part)[1]) << 10  # type: ignore[index]
    raise AssertionError("not mapped")


def gathered() -> SegmentMemory:
    segment = SegmentMemory(SIZE, at_leisure=True)
    ctypes.set_errno(0)
    if not segment.gather():
        knows = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1)
        assert ctypes.get_errno() != errno.EINVAL or not knows, "asked for in the wrong way"
        segment.close()
        pytest.skip("this system gives shared memory no huge pages, or has none free")
    return segment


def test_a_segment_is_mapped_by_huge_pages() -> None:
    segment = gathered()
    assert huge_bytes(segment.memory) == 0, "not as the daemon's own size"
    reader, writer = map_for_reading(segment.read_fd, SIZE), map_for_writing(segment.write_fd, SIZE)
    assert huge_bytes(reader) == huge_bytes(writer) == SIZE
    writer[:] = 7
    assert (reader == 7).all()
    assert (segment.memory == 7).all()
    with pytest.raises(ValueError, match="read-only"):
        reader[0] = 1
    segment.close()
    assert not reader.any(), "its memory was given back"


def test_one_made_in_a_hurry_is_gathered_under_its_users() -> None:
    gathered().close()  # or there is nothing to see
    segment = SegmentMemory(SIZE)
    reader, writer = map_for_reading(segment.read_fd, SIZE), map_for_writing(segment.write_fd, SIZE)
    over, rounds = threading.Event(), [0]

    def write() -> None:
        while not over.is_set() or not rounds[0]:
            rounds[0] += 1
            writer[:] = rounds[0] % 251

    thread = threading.Thread(target=write)
    thread.start()
    found = segment.gather()
    over.set()
    thread.join()
    assert (reader == rounds[0] % 251).all()
    assert not found or huge_bytes(map_for_reading(segment.read_fd, SIZE)) == SIZE
    segment.close()


@pytest.mark.parametrize("size", [4096, SIZE])
def test_a_view_of_a_mapping_keeps_it_and_no_descriptor_stays(size: int) -> None:
    """A client says that it has unmapped a segment once nothing refers to the mapping: a view must count."""
    segment, before = SegmentMemory(size), len(os.listdir("/proc/self/fd"))
    writer = map_for_writing(segment.write_fd, size)
    assert len(os.listdir("/proc/self/fd")) == before
    is_there, view = weakref.ref(writer), writer[100:200][10:20]
    del writer
    gc.collect()
    assert is_there() is not None
    view[:] = 5
    assert np.flatnonzero(segment.memory).tolist() == list(range(110, 120))
    del view
    gc.collect()
    assert is_there() is None
    segment.close()


FORKING = """
import os, threading
from pathlib import Path
from kvstore.daemon.segments import SegmentMemory, map_for_writing

def mapped():
    return any("kvstore-segment" in line for line in Path("/proc/self/maps").read_text().splitlines())

segment, over = SegmentMemory(32 << 20), threading.Event()

def keep_mapping():
    while not over.is_set():
        map_for_writing(segment.write_fd, 32 << 20)

thread = threading.Thread(target=keep_mapping)
thread.start()
inherited = 0
for _ in range(100):
    child = os.fork()
    if not child:
        os._exit(mapped())
    inherited += os.waitpid(child, 0)[1] != 0
over.set()
thread.join()
print(inherited)
"""


def test_a_child_that_is_forked_while_a_segment_is_mapped_does_not_have_it() -> None:
    command = [sys.executable, "-c", FORKING]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stdout) == (0, "0\n"), run.stderr
