"""Which blocks are worth more or less than others by order: priorities, each with an end, and whose a block is.

A mark belongs to a block under its name: a block id that was handed out for something else has none. Where there are no
marks, they cost nothing. Under the lock of the pool's caller.

A block used by several is worth what the most demanding of them said, as long as that lasts. So a parent, which every
user of its child uses too, is never worth less than the child.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from allocator.errors import UsageError

PRIORITY_DEFAULT: Final = 35
PRIORITY_MAX: Final = 100
NOBODY: Final = 0
"""The tenant of blocks that count against no quota."""

Steps: TypeAlias = tuple[tuple[int, float], ...]
"""(priority, end): priorities fall and ends grow; the default holds after the last end."""
PLAIN: Final[Steps] = ((PRIORITY_DEFAULT, math.inf),)


def steps_of(priority: int, until: float = math.inf) -> Steps:
    """UsageError for a priority that is none, or a low one with an end: it would rise at it, without a use."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= PRIORITY_MAX:
        raise UsageError(f"priority: got {priority!r}; expected an int in 0..{PRIORITY_MAX}")
    if priority < PRIORITY_DEFAULT and until != math.inf:
        raise UsageError(f"priority: got {priority} with an end; expected one above {PRIORITY_DEFAULT}, or no end")
    return ((priority, until),)


def merged(one: Steps, other: Steps) -> Steps:
    """The higher of two at any time."""
    found: list[tuple[int, float]] = []
    for priority, end in sorted({*one, *other}, key=lambda step: (-step[0], -step[1])):
        if not found or end > found[-1][1]:
            found.append((priority, end))
    return tuple(found)


def step_at(steps: Steps, now: float) -> tuple[int, float]:
    """(priority at that time, until when)."""
    return next((one for one in steps if one[1] > now), PLAIN[0])


@dataclass(frozen=True, slots=True)
class Mark:
    """What was ordered for the block of that hash."""

    block_hash: bytes
    steps: Steps
    tenant: int = NOBODY


class BlockMarks:
    """Marks by block id. hashes: the pool's own list of names, to tell a mark of the past."""

    def __init__(self, hashes: Sequence[bytes]) -> None:
        self._hashes = hashes
        self._marks: dict[int, Mark] = {}
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._marks)

    def get(self, block_id: int) -> Mark | None:
        """The mark of what the block is now."""
        mark = self._marks.get(block_id)
        return mark if mark is not None and mark.block_hash == self._hashes[block_id] else None

    def step(self, block_id: int) -> tuple[int, float]:
        """(priority of the block now, until when)."""
        mark = self.get(block_id)
        return step_at(PLAIN if mark is None else mark.steps, self.now)

    def keep(self, ids: Iterable[int], steps: Steps, tenant: int, *, first_use: bool) -> None:
        """A use of named blocks that wants them kept so. first_use: nobody had them before."""
        for block_id in ids:
            known = self.get(block_id)
            wanted = steps
            if known is not None:
                wanted = merged(known.steps, steps)
            elif not first_use:
                wanted = merged(PLAIN, steps)
            if wanted == PLAIN and tenant == NOBODY:
                self._marks.pop(block_id, None)
            else:
                self._marks[block_id] = Mark(self._hashes[block_id], wanted, tenant)

    def drop(self, ids: Iterable[int]) -> None:
        """Blocks that were evicted."""
        for block_id in ids:
            self._marks.pop(block_id, None)
