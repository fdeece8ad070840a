"""What the scheduler's side tells the worker's: which blocks to load, and which to store. Plain values.

A table is one list of vLLM block ids per vLLM cache group: entry i holds the tokens [i * n, (i + 1) * n) of the
request, n the engine's block size; 0 is vLLM's null block, which holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Tables: TypeAlias = Sequence[Sequence[int]]
NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load the store blocks [start, len(hashes)) of a request. hashes: of all its blocks from the first on.

    lossy_at: the first block of which a lossy copy will do, since what follows is known as lossy; None: no block.
    wait_seconds: blocks that are not stored yet are on their way, one at least in so long a time.
    """

    request_id: str
    root: bytes
    hashes: list[bytes]
    start: int
    tables: Tables
    lossy_at: int | None = None
    wait_seconds: float = 0.0

    def must_be_exact(self, position: int) -> bool:
        return self.lossy_at is None or position < self.lossy_at


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store the blocks at `start` and behind it. parent: the hash before them, None at a prompt's beginning.

    is_exact: nothing lossy was read when they were computed. is_raw: as they are, whatever the codec.
    """

    root: bytes
    hashes: list[bytes]
    start: int
    parent: bytes | None
    tables: Tables
    is_exact: bool = True
    is_raw: bool = False


@dataclass(slots=True)
class Orders:
    """Of one step. ended: blocks of requests that are over, to be stored before the step writes to their pages."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    ended: list[SaveOrder] = field(default_factory=list)
