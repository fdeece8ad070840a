"""Blocks kept on the device of vLLM's own pages: the fastest tier, decoded into those pages without leaving the device.

One allocation of fixed size, with the host tier's bookkeeping: slots of the copies' sizes, least recently used first
and leaves first, nothing evicted that is being read. On a CPU that is host memory, on a card VRAM beside vLLM's own.
It keeps copies in the forms that every tier keeps (encoded; a prompt's first block and newest tokens as they are) and
no checksums: nobody else has this memory. Puts run on its executor, in the order of the copier's copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from allocator import ConfigError
from kvstore.host_memory import host_limit_bytes as host_limit_bytes  # settings asks for it here
from kvstore.host_tier.arena import HostArena
from kvstore.host_tier.index import HostEntry
from kvstore.host_tier.tier import HostTier
from kvstore.tier import Job, Loan

if TYPE_CHECKING:
    from engine_adapter.vllm_connector.copier import Copier
    from kvstore.executor import Executor
    from kvstore.tier import CopyKey

NAME = "device"


class _CardArena(HostArena):
    """Memory of a card in place of the host's; nothing of it is to be had as a numpy row."""

    def __init__(self, capacity_bytes: int, copier: Copier) -> None:
        self.capacity_bytes = capacity_bytes
        self.memory = np.empty(0, np.uint8)
        with copier.aside():  # of the stream that alone will use it
            self.bytes = torch.zeros(capacity_bytes, dtype=torch.uint8, device=copier.device)

    def wait_prefaulted(self, timeout_seconds: float) -> bool:
        return True

    def close(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)


def check_room(wanted_bytes: int, engine_bytes: int, free_bytes: int, total_bytes: int) -> None:
    """ConfigError where a card has no room for the tier beside vLLM's own cache, which vLLM allocates afterwards.

    vLLM has measured its memory before connectors are made, so it leaves this much only if it is told to.
    """
    short_bytes = wanted_bytes + engine_bytes - free_bytes
    if short_bytes > 0:
        raise ConfigError(
            f"device_int4_bytes: got {wanted_bytes}, beside the {engine_bytes} bytes of vLLM's own cache, where "
            f"{free_bytes} are free; expected a --gpu-memory-utilization that is lower by "
            f"{math.ceil(100 * short_bytes / total_bytes) / 100:.2f}"
        )


class DeviceTier(HostTier):
    """capacity_bytes: reserved at once on the copier's device. slot_bytes: sizes of copies to expect.

    prefault: on a CPU, as the host tier's.
    """

    def __init__(
        self,
        capacity_bytes: int,
        executor: Executor | None,
        copier: Copier,
        *,
        slot_bytes: Sequence[int] = (),
        prefault: bool = True,
    ) -> None:
        self._copier = copier
        super().__init__(capacity_bytes, executor, name=NAME, slot_bytes=slot_bytes, prefault=prefault)

    def _make_arena(self, capacity_bytes: int, prefault: bool) -> HostArena:
        if self._copier.is_immediate:
            return HostArena(capacity_bytes, prefault=prefault)
        return _CardArena(capacity_bytes, self._copier)

    @property
    def memory(self) -> torch.Tensor:
        """uint8 [capacity_bytes] on the device: what `reading` says places in."""
        arena = self._arena
        return arena.bytes if isinstance(arena, _CardArena) else torch.from_numpy(arena.memory)

    @contextmanager
    def reading(self, keys: Sequence[CopyKey]) -> Iterator[list[int | None]]:
        """Where in `memory` each copy begins, None for one that is not there. A use: it stays, and ages anew.

        On a card it is enough to enqueue the reading inside: what is put into a slot afterwards comes after it.
        """
        entries = self._claim([Job(key, [], None, 0) for key in keys])
        try:
            yield [None if entry is None else entry.offset for entry in entries]
        finally:
            self._release(entries)

    def lend(self, keys: Sequence[CopyKey]) -> list[Loan | None]:
        return super().lend(keys) if self._copier.is_immediate else [None] * len(keys)

    def _copy_in(self, entry: HostEntry, job: Job) -> None:
        if self._copier.is_immediate:
            return super()._copy_in(entry, job)
        memory, at = self.memory, entry.offset
        with self._copier.aside():
            for row in job.rows:
                memory[at : at + row.nbytes].copy_(torch.from_numpy(row))
                at += row.nbytes

    def _copy_out(self, entry: HostEntry, job: Job) -> None:
        if self._copier.is_immediate:
            return super()._copy_out(entry, job)
        memory, at = self.memory, entry.offset
        with self._copier.aside():
            for row in job.rows:
                torch.from_numpy(row).copy_(memory[at : at + row.nbytes])
                at += row.nbytes
