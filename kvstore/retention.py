"""What a request asks of the blocks it leaves behind: priorities by token range, and the tenant that they count for.

    store.retain("a", [Retention(priority=80, end_token=2000, seconds=600)])    # a live sequence

Priorities are TensorRT-LLM's: 0 to 100, 35 when nothing is said; the lowest go first, and among equals the store's
policy decides. Applied when a sequence gives its blocks back; `seconds` count from then. Under the store's lock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator import UsageError
from allocator.block_marks import PLAIN, Steps, merged, steps_of
from kvstore.arguments import duration, whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Items

    from allocator import BlockPool, BlockTable
    from kvstore.identity import HashChain
    from kvstore.quotas import Quotas
    from kvstore.sequence import Sequence
    from kvstore.upkeep import Upkeep


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Keep the blocks of tokens start_token..end_token - 1 at a priority.

    end_token: None for all that follows, generated tokens included. seconds: then 35 again; None: until evicted. Only a
    priority above 35 may end. A block is never worth less than one behind it, so a high priority reaches back to the
    first token, and a low one counts only as far as nothing higher follows.
    """

    priority: int
    start_token: int = 0
    end_token: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        whole("start_token", self.start_token, 0)
        if self.end_token is not None:
            whole("end_token", self.end_token, self.start_token + 1)
        steps_of(self.priority, math.inf if self.seconds is None else duration("seconds", self.seconds))

    def steps(self, now: float) -> Steps:
        return steps_of(self.priority, math.inf if self.seconds is None else now + self.seconds)


def check_retention(retention: Items[Retention]) -> tuple[Retention, ...]:
    """UsageError unless it is a list or tuple of Retention."""
    if not isinstance(retention, list | tuple) or not all(isinstance(one, Retention) for one in retention):
        raise UsageError(f"retention: got {retention!r}; expected a list of kvstore.Retention, or ()")
    return tuple(retention)


def stretches(orders: Items[Retention], blocks: int, block_tokens: int, now: float) -> Iterator[tuple[int, int, Steps]]:
    """(first block, end, what is wanted) over a chain of so many blocks, last stretch first."""
    spans = []
    for one in orders:
        last = blocks if one.end_token is None else min(blocks, -(-one.end_token // block_tokens))
        spans.append((min(blocks, one.start_token // block_tokens), last, one.steps(now)))
    edges = sorted({0, blocks, *(edge for first, last, _ in spans for edge in (first, last))})
    behind: Steps = ()
    for first, end in zip(edges[-2::-1], edges[:0:-1], strict=True):
        wanted: Steps = ()
        for start, last, steps in spans:
            if start < end and first < last:
                wanted = merged(wanted, steps)
        behind = merged(behind, wanted or PLAIN)
        yield first, end, behind


class Retainer:
    """Marks what sequences leave behind, on the device and in the store's own memory. quotas: who has one."""

    def __init__(self, pool: BlockPool, block_tokens: int, quotas: Quotas, upkeep: Upkeep) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._quotas = quotas
        self._upkeep = upkeep

    def keep(self, sequence: Sequence) -> None:
        """A sequence is about to give its blocks back."""
        if not sequence.shared:
            return
        blocks, tenant = sequence.sealed_blocks, self._quotas.number_of(sequence.tenant)
        if sequence.private_from is not None:
            blocks = min(blocks, sequence.private_from // self._block_tokens)
        if not (sequence.retention or tenant or self._pool.has_marks or self._upkeep.has_marks_below):
            return
        for first, end, steps in stretches(sequence.retention, blocks, self._block_tokens, self._pool.now):
            known = min(max(sequence.known_blocks, first), end)
            for table in sequence.tables:
                ids = table.ids()
                self._pool.keep(ids[first:known], steps, tenant=tenant)
                self._pool.keep(ids[known:end], steps, tenant=tenant, first_use=True)
            self._upkeep.keep_below(sequence.root, sequence.chain.hashes[first:end], steps)

    def keep_copies(self, chain: HashChain, retention: Items[Retention]) -> None:
        """Copies of a prefix in the store's own memory are wanted so from now on."""
        for first, end, steps in stretches(retention, len(chain.hashes), self._block_tokens, self._pool.now):
            self._upkeep.keep_below(chain.root, chain.hashes[first:end], steps)

    def keep_blocks(self, blocks: Items[Items[int]], retention: Items[Retention], tokens: int) -> None:
        """The leading blocks of a prefix, by group, are wanted so from now on. Of a group with a window, the last."""
        count = tokens // self._block_tokens
        for first, end, steps in stretches(retention, count, self._block_tokens, self._pool.now):
            for ids in blocks:
                left_out = count - len(ids)
                self._pool.keep(ids[max(0, first - left_out) : max(0, end - left_out)], steps)

    def keep_dropped(self, sequence: Sequence, table: BlockTable) -> None:
        """Blocks of a running sequence that leave the window: wanted as much as any of it."""
        tenant = self._quotas.number_of(sequence.tenant)
        if not sequence.shared or not (sequence.retention or tenant):
            return
        *_, (_, _, steps) = stretches(sequence.retention, sequence.sealed_blocks, self._block_tokens, self._pool.now)
        named = [one for one in table.window_surplus(sequence.committed).tolist() if one >= 0]
        self._pool.keep([one for one in named if self._pool.hash_of(one) is not None], steps, tenant=tenant)
