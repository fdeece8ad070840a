"""Device memory of one process read by another: handles that say which bytes of which allocation, at which generation.

Numbers only: no cupy, no torch. CUDA's own handle names a whole allocation, so a handle here carries the offset and
size inside it too, the allocation's size and a generation. The exporter counts the generation up whenever an allocation
at the same base may be another one; the opener maps again when it sees a newer one and refuses an older. The handle's
bytes go over a channel that the two processes trust; a lease (not this module) says for how long.
"""

from __future__ import annotations

import os
import struct
import threading
from dataclasses import dataclass

from quant.cuda.driver import MemoryDriver
from quant.cuda.errors import CudaMemoryError, StaleMemoryError

HANDLE_BYTES = 64
_GRANULE_BYTES = 2 << 20
_REMEMBERED = 4096  # generations of allocations that are not mapped now
_MAGIC = b"KVIPC\x01\0\0"
_FORM = struct.Struct(f"<8s16s16s{HANDLE_BYTES}sQQQQ")


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """size_bytes at offset_bytes inside an allocation of allocation_bytes on the card `card_id`.

    exporter: 16 random bytes a process; generation: of the allocation within that exporter, from 1.
    """

    exporter: bytes
    card_id: bytes
    handle: bytes
    allocation_bytes: int
    offset_bytes: int
    size_bytes: int
    generation: int

    def to_bytes(self) -> bytes:
        """136 bytes, little-endian, no pickle."""
        return _FORM.pack(
            *(_MAGIC, self.exporter, self.card_id, self.handle),
            *(self.allocation_bytes, self.offset_bytes, self.size_bytes, self.generation),
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> MemoryHandle:
        """Inverse of to_bytes. CudaMemoryError for anything else, ranges included."""
        if len(content) != _FORM.size or not content.startswith(_MAGIC):
            raise CudaMemoryError(f"not a memory handle: {len(content)} bytes, expected {_FORM.size}")
        _, *fields = _FORM.unpack(content)
        found = cls(*fields)
        if not found.size_bytes or found.offset_bytes + found.size_bytes > found.allocation_bytes:
            raise CudaMemoryError(
                f"memory handle names {found.size_bytes} bytes at {found.offset_bytes} of {found.allocation_bytes}"
            )
        if not found.generation:
            raise CudaMemoryError("memory handle without a generation")
        return found


class MemoryExporter:
    """Makes handles of this process's device memory. Keeps owners alive until they are withdrawn. Any thread."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._id = os.urandom(16)
        self._lock = threading.Lock()
        self._count = 0
        self._live: dict[int, tuple[int, int, bytes]] = {}  # base -> (bytes, generation, CUDA handle)
        self._owners: dict[int, list[object]] = {}

    def export(self, address: int, size_bytes: int, owner: object) -> MemoryHandle:
        """Handle of [address, address + size_bytes), which `owner` keeps allocated. Raises CudaMemoryError."""
        base, allocation_bytes = self._driver.allocation_of(address)
        if size_bytes < 1 or address + size_bytes > base + allocation_bytes:
            raise CudaMemoryError(f"{size_bytes} bytes at {address - base} are not inside {allocation_bytes}")
        with self._lock:
            known = self._live.get(base)
            if known is None or known[0] != allocation_bytes:
                self._count += 1
                known = allocation_bytes, self._count, self._driver.export_allocation(base)
                self._live[base] = known
            self._owners.setdefault(base, []).append(owner)
        return MemoryHandle(
            *(self._id, self._driver.card_id(), known[2], allocation_bytes, address - base, size_bytes, known[1])
        )

    def withdraw(self, handle: MemoryHandle) -> None:
        """Forgets an allocation and its owners: what is exported at that base next has a new generation."""
        with self._lock:
            for base, (_, generation, _) in list(self._live.items()):
                if generation == handle.generation:
                    del self._live[base]
                    self._owners.pop(base, None)


@dataclass(slots=True)
class _Mapping:
    base: int
    allocation_bytes: int
    generation: int
    users: int = 0


class OpenedMemory:
    """Another process's bytes at `address`. Close it when nothing on the device reads it any more."""

    def __init__(self, opener: MemoryOpener, mapping: _Mapping, handle: MemoryHandle) -> None:
        self._opener = opener
        self._mapping: _Mapping | None = mapping
        self.handle = handle
        self.address = mapping.base + handle.offset_bytes
        self.size_bytes = handle.size_bytes

    def close(self) -> None:
        """Gives the mapping back; unmapped with its last user. May be called twice."""
        mapping, self._mapping = self._mapping, None
        if mapping is not None:
            self._opener.give_back(mapping)

    def __enter__(self) -> OpenedMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MemoryOpener:
    """Maps handles of other processes on one device; one mapping an allocation. Any thread."""

    def __init__(self, driver: MemoryDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._mappings: dict[tuple[bytes, bytes], _Mapping] = {}
        self._newest: dict[tuple[bytes, bytes], int] = {}

    def open(self, handle: MemoryHandle) -> OpenedMemory:
        """The bytes that the handle names. StaleMemoryError when a newer generation was seen or the size is another."""
        if handle.card_id != self._driver.card_id():
            raise CudaMemoryError("the memory is on another card than this opener")
        key = handle.exporter, handle.handle
        with self._lock:
            if handle.generation < self._newest.get(key, 0):
                raise StaleMemoryError(f"generation {handle.generation}, {self._newest[key]} has been seen")
            mapping = self._mappings.get(key)
            if mapping is not None and mapping.generation == handle.generation:
                if mapping.allocation_bytes != handle.allocation_bytes:
                    raise StaleMemoryError(
                        f"allocation of {handle.allocation_bytes} bytes is mapped with {mapping.allocation_bytes}"
                    )
            else:
                mapping = self._map(key, handle)
            mapping.users += 1
        return OpenedMemory(self, mapping, handle)

    def _map(self, key: tuple[bytes, bytes], handle: MemoryHandle) -> _Mapping:
        old = self._mappings.get(key)
        if old is not None:  # CUDA maps a handle once a process, so the old generation has to go first
            self._mappings[key] = old
            raise StaleMemoryError(f"generation {old.generation} of this allocation is still in use here")
        base = self._driver.open_allocation(handle.handle)
        try:
            found, size = self._driver.allocation_of(base)
            most = -(-handle.allocation_bytes // _GRANULE_BYTES) * _GRANULE_BYTES  # a mapping may be rounded up
            if found != base or not handle.allocation_bytes <= size <= most:
                raise StaleMemoryError(f"the allocation has {size} bytes, the handle says {handle.allocation_bytes}")
        except BaseException:
            self._driver.close_allocation(base)
            raise
        self._newest.pop(key, None)
        self._newest[key] = handle.generation
        while len(self._newest) > _REMEMBERED:
            del self._newest[next(iter(self._newest))]
        self._mappings[key] = _Mapping(base, handle.allocation_bytes, handle.generation)
        return self._mappings[key]

    def give_back(self, mapping: _Mapping) -> None:
        """Called by OpenedMemory.close."""
        with self._lock:
            mapping.users -= 1
            if mapping.users == 0:
                self._mappings = {key: kept for key, kept in self._mappings.items() if kept is not mapping}
                self._driver.close_allocation(mapping.base)
