"""Host registration and IPC handles: the arithmetic and the promises, over a driver that is a dictionary.

The real driver is tests/gpu's business; what is checked here is what we ask of it, and what we refuse.
"""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from quant.cuda import (
    CudaMemoryError,
    MemoryExporter,
    MemoryHandle,
    MemoryOpener,
    RegisteredHost,
    StaleMemoryError,
)

BASE = 0x7F0000000000
CARD = b"0000:17:00.0".ljust(16, b"\0")


class Machine:
    """Allocations of an exporting process by base; handles name them; opened ones appear 1 TiB higher."""

    SHIFT = 1 << 40

    def __init__(self) -> None:
        self.allocations: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.synchronized = 0
        self.refuse_host = False
        self.host_shift = 0

    def allocation_of(self, address: int) -> tuple[int, int]:
        for base, size in {**self.allocations, **self.mapped}.items():
            if base <= address < base + size:
                return base, size
        raise CudaMemoryError(f"no device allocation at {address:#x}")

    def card_id(self) -> bytes:
        return CARD

    def export_allocation(self, base: int) -> bytes:
        return base.to_bytes(8, "little").ljust(64, b"\x01")

    def open_allocation(self, handle: bytes) -> int:
        base = int.from_bytes(handle[:8], "little")
        if base + self.SHIFT in self.mapped:
            raise CudaMemoryError("already mapped")
        self.mapped[base + self.SHIFT] = self.allocations[base]
        return base + self.SHIFT

    def close_allocation(self, base: int) -> None:
        del self.mapped[base]

    def register_host(self, address: int, size_bytes: int) -> int:
        if self.refuse_host:
            raise CudaMemoryError("the driver says no")
        assert address not in self.registered
        self.registered[address] = size_bytes
        return address + self.host_shift * len(self.registered)

    def unregister_host(self, address: int) -> None:
        assert self.synchronized, "the device may still be reading"
        del self.registered[address]

    def synchronize(self) -> None:
        self.synchronized += 1


@pytest.fixture
def machine() -> Machine:
    found = Machine()
    found.allocations[BASE] = 20 << 20
    return found


# ---- IPC


def test_three_tensors_of_one_allocation_open_at_their_own_bytes(machine: Machine) -> None:
    """The CPU half of case 90: CUDA's handle names the allocation, so each handle carries its offset."""
    exporter, opener = MemoryExporter(machine), MemoryOpener(machine)
    offsets = (0, 512, 5 << 20)
    handles = [exporter.export(BASE + offset, 4096, object()) for offset in offsets]
    opened = [opener.open(MemoryHandle.from_bytes(handle.to_bytes())) for handle in handles]
    assert [memory.address - BASE - Machine.SHIFT for memory in opened] == list(offsets)
    assert {memory.size_bytes for memory in opened} == {4096}
    assert len(machine.mapped) == 1, "one mapping an allocation"
    for memory in opened:
        assert machine.mapped
        memory.close()
        memory.close()
    assert not machine.mapped


def test_an_allocation_that_grew_is_stale_until_it_is_exported_anew(machine: Machine) -> None:
    exporter, opener = MemoryExporter(machine), MemoryOpener(machine)
    old = exporter.export(BASE, 4096, object())
    machine.allocations[BASE] = 40 << 20
    with pytest.raises(StaleMemoryError, match="has 41943040 bytes, the handle says 20971520"):
        opener.open(old)
    assert not machine.mapped
    new = exporter.export(BASE + (30 << 20), 4096, object())
    assert new.generation > old.generation
    with opener.open(new) as memory:
        assert memory.address == BASE + Machine.SHIFT + (30 << 20)
        with pytest.raises(StaleMemoryError, match="has been seen"):
            opener.open(old)


def test_a_mapping_of_an_older_generation_is_never_given_for_a_newer(machine: Machine) -> None:
    exporter, opener = MemoryExporter(machine), MemoryOpener(machine)
    old = exporter.export(BASE, 4096, object())
    held = opener.open(old)
    exporter.withdraw(old)
    new = exporter.export(BASE, 4096, object())  # same base, same size, other memory
    assert new.generation == old.generation + 1
    with pytest.raises(StaleMemoryError, match="still in use here"):
        opener.open(new)
    held.close()
    with opener.open(new):
        assert len(machine.mapped) == 1
    assert not machine.mapped


def test_owners_live_until_they_are_withdrawn(machine: Machine) -> None:
    import gc
    import weakref

    class Owner:
        pass

    exporter, owner = MemoryExporter(machine), Owner()
    watched = weakref.ref(owner)
    handle = exporter.export(BASE, 16, owner)
    del owner
    gc.collect()
    assert watched() is not None
    exporter.withdraw(handle)
    gc.collect()
    assert watched() is None


def test_ranges_outside_the_allocation_and_other_cards_are_refused(machine: Machine) -> None:
    exporter = MemoryExporter(machine)
    for address, size in ((BASE, 0), (BASE + (20 << 20) - 16, 32)):
        with pytest.raises(CudaMemoryError, match="not inside"):
            exporter.export(address, size, None)
    with pytest.raises(CudaMemoryError, match="no device allocation"):
        exporter.export(BASE - 16, 16, None)
    handle = exporter.export(BASE, 16, None)

    class Other(Machine):
        def card_id(self) -> bytes:
            return b"0000:65:00.0".ljust(16, b"\0")

    with pytest.raises(CudaMemoryError, match="another card"):
        MemoryOpener(Other()).open(handle)


def test_hostile_handles_are_refused_before_anything_is_mapped(machine: Machine) -> None:
    good = MemoryExporter(machine).export(BASE + 64, 128, None).to_bytes()
    assert MemoryHandle.from_bytes(good).to_bytes() == good
    sizes = len(good) - 32
    huge = (1 << 63).to_bytes(8, "little")
    hostile = [
        *(b"", good[:-1], good + b"\0", b"X" + good[1:]),
        good[:sizes] + bytes(8) + good[sizes + 8 :],
        good[: sizes + 8] + huge + good[sizes + 16 :],
        good[: sizes + 16] + huge + good[sizes + 24 :],
        good[: sizes + 16] + bytes(8) + good[sizes + 24 :],
        good[: sizes + 24] + bytes(8),
    ]
    for content in hostile:
        with pytest.raises(CudaMemoryError, match="handle"):
            MemoryHandle.from_bytes(content)


# ---- host registration


def test_registration_begins_small_and_grows_piece_by_piece(machine: Machine) -> None:
    arena = mmap.mmap(-1, 10 * 4096)
    host = RegisteredHost(machine, arena, piece_bytes=4 * 4096)
    grown = []
    while host.register_next():
        grown.append(host.registered_bytes)
    assert grown == [4 * 4096, 8 * 4096, 10 * 4096]
    assert list(machine.registered.values()) == [4 * 4096, 4 * 4096, 2 * 4096]
    assert host.device_address == host.address
    host.close()
    host.close()
    assert not machine.registered
    assert machine.synchronized == 1
    assert host.registered_bytes == 0


def test_a_registered_buffer_cannot_go_away(machine: Machine) -> None:
    arena = mmap.mmap(-1, 4096)
    with RegisteredHost(machine, arena), pytest.raises(BufferError):
        arena.close()


def test_what_cannot_be_registered_is_said(machine: Machine) -> None:
    with pytest.raises(CudaMemoryError, match="writable"):
        RegisteredHost(machine, bytes(4096))
    memory = np.zeros(3 * 4096, np.uint8)
    off_page = memory[-memory.ctypes.data % 4096 + 16 :][:4096]
    with pytest.raises(CudaMemoryError, match="4096-byte page"):
        RegisteredHost(machine, off_page)
    with pytest.raises(CudaMemoryError, match="pieces"):
        RegisteredHost(machine, mmap.mmap(-1, 4096), piece_bytes=1000)
    machine.refuse_host = True
    with pytest.raises(CudaMemoryError, match="the driver says no"):
        RegisteredHost(machine, mmap.mmap(-1, 4096)).register_all()


def test_pieces_that_the_device_sees_apart_are_refused(machine: Machine) -> None:
    machine.host_shift = 1 << 30
    host = RegisteredHost(machine, mmap.mmap(-1, 8192), piece_bytes=4096)
    assert host.register_next()
    machine.synchronize()
    with pytest.raises(CudaMemoryError, match="one piece"):
        host.register_next()
    assert len(machine.registered) == 1
    assert host.registered_bytes == 4096
