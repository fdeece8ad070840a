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
    """Load the store blocks [start, len(hashes)) of a request. hashes: of all its blocks from the first on."""

    request_id: str
    root: bytes
    hashes: list[bytes]
    start: int
    tables: Tables


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Store the blocks at `start` and behind it. parent: the hash before them, None at a prompt's beginning."""

    root: bytes
    hashes: list[bytes]
    start: int
    parent: bytes | None
    tables: Tables


@dataclass(slots=True)
class Orders:
    """Of one step."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
