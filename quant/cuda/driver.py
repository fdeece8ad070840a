"""What the rest of quant.cuda asks of a CUDA runtime, as protocols. No cupy, no torch.

`runtime.CudaDevice` is the one that talks to a card. Tests put others in its place: the CPU behind the shim, and one
that runs work late, to show what is still referenced when a copy really happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from quant.cuda.launches import Launch

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Has everything before the point run? Never blocks."""

    def wait(self) -> None:
        """Blocks the calling thread until it has."""


@dataclass(frozen=True, slots=True)
class DeviceBuffer:
    """Device memory that lives as long as `owner` is referenced, and whatever else `owner` keeps alive."""

    address: int
    size_bytes: int
    owner: object


class Driver(Protocol):
    """One device. Streams are raw handles (0: the default stream). Any thread."""

    def launch(self, launches: Sequence[Launch], stream: int) -> None:
        """Enqueues in order; returns before they ran."""

    def record(self, stream: int) -> Event:
        """An event after everything enqueued so far."""

    def wait_for(self, stream: int, event: Event) -> None:
        """What is enqueued on `stream` from now on waits for the event; the calling thread does not."""

    def upload(self, content: Bytes, stream: int) -> DeviceBuffer:
        """Device copy of `content`, made in stream order from a private snapshot: the caller may reuse `content`.

        The buffer's owner must be referenced until the stream has passed the copy and all that reads it.
        """

    def download(self, buffer: DeviceBuffer, stream: int) -> Bytes:
        """The bytes of a buffer after all work of the stream. Blocks."""


class MemoryDriver(Protocol):
    """Host registration and IPC of one device. Raises CudaMemoryError with the driver's reason."""

    def register_host(self, address: int, size_bytes: int) -> int:
        """Pins and maps host memory; returns the address that the device sees."""

    def unregister_host(self, address: int) -> None:
        """Undoes register_host for a range that was registered under this address."""

    def synchronize(self) -> None:
        """Blocks until the device has done all its work."""

    def allocation_of(self, address: int) -> tuple[int, int]:
        """(base address, bytes) of the device allocation that holds an address."""

    def card_id(self) -> bytes:
        """16 bytes that name the card on this host, whatever its index."""

    def export_allocation(self, base: int) -> bytes:
        """IPC handle of a whole allocation."""

    def open_allocation(self, handle: bytes) -> int:
        """Maps another process's allocation; returns its base address here."""

    def close_allocation(self, base: int) -> None:
        """Unmaps it."""
