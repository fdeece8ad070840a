"""Pools lie in huge pages where the system gives them: the slab and the arena of the host tier, measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.cli.machine import huge_pages
from kvstore.host_tier.arena import HostArena

SIZE = 32 << 20


def huge_bytes_at(address: int) -> int:
    """Bytes in transparent huge pages of the mapping that holds an address."""
    for part in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE):
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", part)
        if bounds and int(bounds[1], 16) <= address < int(bounds[2], 16):
            found = re.search(r"AnonHugePages:\s+(\d+) kB", part)
            return int(found[1]) << 10 if found else 0
    raise AssertionError("no mapping holds the address")


@pytest.fixture(autouse=True)
def _given() -> None:
    granted = huge_pages().granted_fraction
    if granted is None or granted < 0.9:
        pytest.skip("this system gives no huge pages, or has none free")


@pytest.mark.parametrize("prefault", [False, True])
def test_the_host_arena_lies_in_huge_pages(prefault: bool) -> None:
    arena = HostArena(SIZE, prefault=prefault)
    try:
        assert arena.huge_pages
        if prefault:
            assert arena.wait_prefaulted(30)
        else:
            arena.memory[::4096] = 1
        assert huge_bytes_at(arena.memory.ctypes.data + SIZE // 2) >= SIZE // 2
    finally:
        arena.close()


def test_the_slab_lies_in_huge_pages() -> None:
    from allocator.slab import _map_memory

    pool, _ = _map_memory(SIZE)
    pool[::4096] = 1
    assert pool.data_ptr() % (2 << 20) == 0
    assert huge_bytes_at(pool.data_ptr() + SIZE // 2) >= SIZE // 2
