"""Tiers of the simulator: the host tier's own index, budget, eviction and queue over an arena that keeps no bytes.

Each host has a tier for its memory, and one that leads to the remote tier; those share one index, as processes share a
server. Transfers take as long as a link of that bandwidth needs, by the simulated clock. One thread; used by
`kvstore.simulation.stores`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvstore.host_tier.arena import HostArena
from kvstore.host_tier.index import HostIndex
from kvstore.host_tier.tier import HostTier

if TYPE_CHECKING:
    from kvstore.tier import ByteRow, Job, Transfer, TransferKind

_ROUNDING_SECONDS = 1e-9


class Link:
    """An executor whose tasks end one after the other, each after the time that its bytes take."""

    def __init__(self, clock: Callable[[], float], bytes_per_second: float) -> None:
        self._clock = clock
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._next_bytes = 0
        self._tasks: deque[tuple[float, Callable[[], None]]] = deque()
        self.submitted_count = 0

    def announce(self, byte_count: int) -> None:
        """What the task that is submitted next moves."""
        self._next_bytes = byte_count

    def submit(self, task: Callable[[], None]) -> None:
        self._free_at = max(self._clock(), self._free_at) + self._next_bytes / self._bytes_per_second
        self._tasks.append((self._free_at, task))
        self.submitted_count += 1

    @property
    def next_end_seconds(self) -> float | None:
        """When the next task ends; None: there is none."""
        return self._tasks[0][0] if self._tasks else None

    def run_due(self) -> None:
        """Run what has ended by now."""
        while self._tasks and self._tasks[0][0] <= self._clock() + _ROUNDING_SECONDS:
            self._tasks.popleft()[1]()

    def close(self) -> None:
        while self._tasks:
            self._tasks.popleft()[1]()


class NoArena(HostArena):
    """An arena of addresses alone. What is read from it has the right length and no meaning."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.memory = _Addresses()  # type: ignore[assignment]

    def wait_prefaulted(self, timeout_seconds: float) -> bool:
        return True

    def close(self) -> None:
        return


class _Addresses:
    def __init__(self) -> None:
        self._row = np.empty(0, dtype=np.uint8)

    def __getitem__(self, span: slice) -> ByteRow:
        size = span.stop - span.start
        if size > len(self._row):
            self._row = np.empty(size, dtype=np.uint8)  # never touched, so it takes no memory
        return self._row[:size]


class SimulatedHostTier(HostTier):
    """A host's memory."""

    holds_bytes = False

    def __init__(self, capacity_bytes: int, link: Link, *, name: str = "host", slot_bytes: int) -> None:
        self.link = link
        super().__init__(capacity_bytes, link, name=name, slot_bytes=[slot_bytes])

    def _make_arena(self, capacity_bytes: int, prefault: bool) -> HostArena:
        return NoArena(capacity_bytes)

    def _start(self, kind: TransferKind, jobs: list[Job], *, by_layer: bool = False) -> Transfer:
        self.link.announce(sum(job.size_bytes for job in jobs))
        return super()._start(kind, jobs, by_layer=by_layer)

    def _copy_in(self, entry: object, job: Job) -> None:
        return

    def _copy_out(self, entry: object, job: Job) -> None:
        return


class RemoteRoom:
    """What the remote tier holds, for all hosts."""

    def __init__(self, capacity_bytes: int, slot_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.index = HostIndex(capacity_bytes, [slot_bytes])
        self.lock = threading.Lock()


class SimulatedRemoteTier(SimulatedHostTier):
    """One host's way to the remote tier: written behind, by the store's policy for slower tiers."""

    private_memory = False
    put_batch_copies = 16

    def __init__(self, room: RemoteRoom, link: Link, *, slot_bytes: int) -> None:
        super().__init__(room.capacity_bytes, link, name="remote", slot_bytes=slot_bytes)
        self._index, self._lock = room.index, room.lock
