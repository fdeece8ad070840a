"""Copies that wait to be written to one tier, and those under way: bounded, each key once, fronts of prefixes first.

Pure bookkeeping under the store's lock; no bytes. Copies wait in runs, as they were offered: front of a prefix first,
since a hit is a leading run. The run that was offered first is the coldest: it is written first, and when the queue is
full its tail is what goes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from allocator.block_marks import PLAIN
from allocator.errors import IntegrityError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from allocator.block_marks import Steps
    from kvstore.tier import CopyKey, Tier

NO_BLOCK = -1


class Waiting(NamedTuple):
    """A copy to be written. block_id: where it lies on the device, NO_BLOCK: only in a tier above.

    steps: what is wanted of it, for the store's own memory.
    """

    key: CopyKey
    parent: bytes | None
    size_bytes: int
    block_id: int = NO_BLOCK
    steps: Steps = PLAIN


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Blocks and bytes that wait or are under way."""

    blocks: int
    bytes: int


class SpillQueue:
    def __init__(self, tier: Tier, limits: QueueLimits) -> None:
        self.tier = tier
        self.limits = limits
        self.waiting_blocks = 0
        self.under_way_blocks = 0
        self.queued_bytes = 0  # waiting and under way
        self._runs: deque[deque[Waiting]] = deque()
        self._urgent: deque[Waiting] = deque()
        self._keys: dict[CopyKey, int] = {}  # waiting or under way -> bytes

    def __contains__(self, key: CopyKey) -> bool:
        return key in self._keys

    @property
    def room_blocks(self) -> int:
        return self.limits.blocks - len(self._keys)

    def add(self, copies: Sequence[Waiting], *, urgent: bool) -> tuple[int, int]:
        """Queue copies, none of which is queued: (how many were taken, how many were dropped to make room or refused).

        urgent: before all others, and only others give way; else the coldest run's tail does, this one's last.
        """
        taken = dropped = 0
        run: deque[Waiting] = deque()
        if not urgent:
            self._runs.append(run)
        for copy in copies:
            while not self._has_room(copy) and self._drop_coldest(before=None if urgent else run):
                dropped += 1
            if not self._has_room(copy):
                dropped += len(copies) - taken
                break
            (self._urgent if urgent else run).append(copy)
            self._enter(copy)
            self.waiting_blocks += 1
            taken += 1
        self._forget_empty_runs()
        return taken, dropped

    def hasten(self, keys: Iterable[CopyKey]) -> None:
        """Those that wait are about to be lost: before all others now."""
        wanted = {key for key in keys if key in self._keys}
        for run in self._runs if wanted else ():
            found = [copy for copy in run if copy.key in wanted]
            if found:
                self._urgent.extend(found)
                rest = [copy for copy in run if copy.key not in wanted]
                run.clear()
                run.extend(rest)
        self._forget_empty_runs()

    def begin(self, copies: Sequence[Waiting]) -> list[Waiting]:
        """Those that there is room for, under way at once."""
        begun = []
        for copy in copies:
            if self._has_room(copy):
                self._enter(copy)
                self.under_way_blocks += 1
                begun.append(copy)
        return begun

    def _enter(self, copy: Waiting) -> None:
        self._keys[copy.key] = copy.size_bytes
        self.queued_bytes += copy.size_bytes

    def _has_room(self, copy: Waiting) -> bool:
        return len(self._keys) < self.limits.blocks and self.queued_bytes + copy.size_bytes <= self.limits.bytes

    def _drop_coldest(self, before: deque[Waiting] | None) -> bool:
        self._forget_empty_runs(keep=before)
        if not self._runs or self._runs[0] is before:
            return False
        copy = self._runs[0].pop()
        self.waiting_blocks -= 1
        self._leave([copy])
        return True

    def _forget_empty_runs(self, keep: deque[Waiting] | None = None) -> None:
        while self._runs and not self._runs[0] and self._runs[0] is not keep:
            self._runs.popleft()

    def take_urgent(self, blocks: int) -> list[Waiting]:
        """`take` of those that are about to be lost."""
        taken = [self._urgent.popleft() for _ in range(min(blocks, len(self._urgent)))]
        self.waiting_blocks -= len(taken)
        self.under_way_blocks += len(taken)
        return taken

    def take(self, blocks: int) -> list[Waiting]:
        """The next copies to be written; they are under way until `finish` or `put_back`."""
        taken: list[Waiting] = []
        while len(taken) < blocks and self._runs:
            if self._runs[0]:
                taken.append(self._runs[0].popleft())
            else:
                self._runs.popleft()
        self._forget_empty_runs()
        self.waiting_blocks -= len(taken)
        self.under_way_blocks += len(taken)
        return taken

    def put_back(self, copies: Sequence[Waiting]) -> None:
        """They could not begin yet: first in line again."""
        if copies:
            self._runs.appendleft(deque(copies))
            self.waiting_blocks += len(copies)
            self.under_way_blocks -= len(copies)

    def finish(self, copies: Sequence[Waiting]) -> None:
        """They are no longer under way, however they ended: they may be queued again."""
        self.under_way_blocks -= len(copies)
        self._leave(copies)

    def _leave(self, copies: Iterable[Waiting]) -> None:
        for copy in copies:
            self.queued_bytes -= self._keys.pop(copy.key)

    def clear(self) -> int:
        """Forget what waits; how many."""
        count = self.waiting_blocks
        self._leave([*self._urgent, *(copy for run in self._runs for copy in run)])
        self._urgent.clear()
        self._runs.clear()
        self.waiting_blocks = 0
        return count

    def check(self, under_way: Iterable[CopyKey]) -> None:
        """IntegrityError when the account does not add up. under_way: keys of the transfers that have not ended."""
        waiting = [copy.key for copy in self._urgent] + [copy.key for run in self._runs for copy in run]
        flying = list(under_way)
        rules = (
            ("what waits is counted", len(waiting) == self.waiting_blocks),
            ("what is under way is counted", len(flying) == self.under_way_blocks),
            ("every key is queued once", sorted([*waiting, *flying]) == sorted(self._keys)),
            ("bytes are counted", sum(self._keys.values()) == self.queued_bytes),
            ("limits hold", len(self._keys) <= self.limits.blocks and self.queued_bytes <= self.limits.bytes),
        )
        broken = [name for name, holds in rules if not holds]
        if broken:
            raise IntegrityError(f"queue of tier {self.tier.name}: broken rule: {broken[0]}")
