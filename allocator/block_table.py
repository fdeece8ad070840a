"""A sequence's ordered blocks in one cache group.

One owner (the sequence), used under the lock of the pool's owner. A table holds block ids and one reference to each;
what
leaves for an engine is `entries` (slot * 2 + form) or `slot_mapping`, looked up anew each time, because a block may
have
changed its slot since.

Invariants (checked by the stateful tests with `BlockPool.check_invariants(tables)`):
- one reference for each id in the table; -1 marks a position whose block left the window, before all live positions
- token_count <= capacity_tokens; the block that the next token goes to is written by this table alone
  (`writable_tail` makes it so before anything is written into a partly filled block)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from allocator.block_pool import BlockPool
from allocator.block_state import OPEN, OPEN_ONCE, REFERENCE_SHIFT, STATE
from allocator.errors import CannotRollback, UsageError
from allocator.extent_ledger import Ids
from allocator.extents import COLD, FULL
from allocator.prefix_index import window_first_block


class CopyOnWrite(NamedTuple):
    """The caller copies the bytes of `source_slot` to `target_slot`, then writes into the target.

    `source_form` is COLD when the source is an INT4 block: then the caller decodes instead of copying.
    The source may be evicted as soon as the pool is asked for room again.
    """

    source_id: int
    target_id: int
    source_slot: int
    target_slot: int
    source_form: int


class BlockTable:
    """Blocks of one sequence in one group.

    block_tokens    tokens a block holds
    window_tokens   None for full and latent groups
    """

    __slots__ = (
        "_ids",
        "_size",
        "_view",
        "_words",
        "block_tokens",
        "first_live",
        "group",
        "pool",
        "released",
        "token_count",
        "window_tokens",
    )

    def __init__(self, pool: BlockPool, group: int, block_tokens: int = 16, window_tokens: int | None = None) -> None:
        if block_tokens < 1:
            raise UsageError(f"expected block_tokens >= 1, got {block_tokens}")
        self.pool = pool
        self.group = group
        self.block_tokens = block_tokens
        self.window_tokens = window_tokens
        self.token_count = 0
        self.first_live = 0
        self.released = False
        self._ids: Ids = np.empty(16, dtype=np.int32)
        self._view = self._ids.data
        self._words = pool.ledger.life_view
        self._size = 0

    def __len__(self) -> int:
        """Positions, dropped ones included."""
        return self._size

    def ids(self) -> Ids:
        """Block ids in order, -1 for dropped positions: int32[len], a copy."""
        return self._ids[: self._size].copy()

    def id_at(self, position: int) -> int:
        """Block id of one position (-1 when it was dropped)."""
        if not 0 <= position < self._size:
            raise UsageError(f"expected a block position in 0..{self._size - 1}, got {position}")
        return self._view[position]

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit into the blocks of the table."""
        return self._size * self.block_tokens

    # -- growing ------------------------------------------------------------------------------------------------

    def append(self, ids: Ids | list[int]) -> None:
        """Adds blocks whose reference the table now owns; leading -1: positions that no window needs."""
        self._check_alive()
        count = len(ids)
        self._reserve(count)
        self._ids[self._size : self._size + count] = ids
        if count and self.first_live == self._size:
            dropped = 0
            while dropped < count and ids[dropped] < 0:
                dropped += 1
            self.first_live += dropped
        self._size += count

    def append_one(self, block_id: int) -> None:
        """`append([block_id])` for a live block."""
        if self.released or self._size == len(self._view):
            self._check_alive()
            self._reserve(1)
        self._view[self._size] = block_id
        self._size += 1

    def _reserve(self, count: int) -> None:
        if self._size + count > len(self._ids):
            grown = np.empty(max(2 * len(self._ids), self._size + count), dtype=np.int32)
            grown[: self._size] = self._ids[: self._size]
            self._ids = grown
            self._view = grown.data

    def missing_blocks(self, token_count: int) -> int:
        """Blocks to allocate so that `token_count` more tokens fit."""
        return max(0, -(-(self.token_count + token_count) // self.block_tokens) - self._size)

    def advance(self, token_count: int) -> None:
        """`token_count` more tokens are written (or, at a block boundary, adopted with their sealed blocks).

        UsageError when they do not fit, or would go into a partly filled block that others see (`writable_tail` first).
        """
        self._check_alive()
        end = self.token_count + token_count
        if token_count < 0 or end > self._size * self.block_tokens:
            raise UsageError(
                f"expected 0..{self.capacity_tokens - self.token_count} more tokens, got {token_count}: "
                "append blocks first"
            )
        if token_count and self.token_count % self.block_tokens and self.tail_is_shared():
            raise UsageError(
                f"block {self._view[self.token_count // self.block_tokens]} is shared or sealed: "
                "expected writable_tail first"
            )
        self.token_count = end

    def advance_in_tail(self, token_count: int) -> bool:
        """`advance` when all of it goes into the partly filled last block that this table alone writes; else False.

        The common case of a decode step, in one call. Changes nothing when it returns False.
        """
        written, size = self.token_count, self.block_tokens
        offset = written % size  # 0 after release, too
        if not offset or offset + token_count > size or self._words[self._view[written // size]] != OPEN_ONCE:
            return False
        self.token_count = written + token_count
        return True

    def tail_is_shared(self) -> bool:
        """Whether the block that holds the next token's place must be copied before it is written."""
        position = self.token_count // self.block_tokens
        if position >= self._size:
            return False
        word = self.pool.ledger.life_view[self._view[position]]
        return word != OPEN_ONCE and (word & STATE != OPEN or word >> REFERENCE_SHIFT != 1)

    def writable_tail(self) -> CopyOnWrite | None:
        """Before a write into a partly filled block that others see: a fresh block takes its place; copy the bytes.

        None when nothing is to be copied. CapacityError, with nothing changed, when there is no block.
        """
        self._check_alive()
        if not self.token_count % self.block_tokens or not self.tail_is_shared():
            return None
        position = self.token_count // self.block_tokens
        source = self._view[position]
        target = self.pool.allocate_one(self.group, FULL)
        self._view[position] = target
        self.pool.release_one(source)
        entry = self.pool.entry_of(source)
        return CopyOnWrite(source, target, entry >> 1, self.pool.entry_of(target) >> 1, entry & 1)

    def fork(self) -> BlockTable:
        """A table over the same written tokens, sharing every block; nothing is copied until one of them writes.

        Blocks appended ahead of the written tokens stay with this table.
        """
        self._check_alive()
        child = BlockTable(self.pool, self.group, self.block_tokens, self.window_tokens)
        written = self._ids[: -(-self.token_count // self.block_tokens)].copy()
        self.pool.share(written)
        child.append(written)
        child.token_count = self.token_count
        child.first_live = min(self.first_live, len(written))
        return child

    def replace(self, position: int, block_id: int) -> None:
        """Another id at a position, e.g. what `seal` returned; the reference has moved already."""
        self.id_at(position)
        self._view[position] = block_id

    def replace_run(self, position: int, ids: Ids) -> None:
        """`replace` for a run of positions."""
        if not 0 <= position <= position + len(ids) <= self._size:
            raise UsageError(f"expected a run inside 0..{self._size}, got {len(ids)} blocks at {position}")
        self._ids[position : position + len(ids)] = ids

    # -- shrinking ----------------------------------------------------------------------------------------------

    def truncate(self, token_count: int) -> Ids:
        """Keeps the first `token_count` tokens; gives back the blocks behind them (returned, tail first).

        Shared and sealed blocks stay intact for others. CannotRollback, with nothing changed, when the window of the
        next token would need blocks that were dropped already.
        """
        self.check_truncate(token_count)
        keep = -(-token_count // self.block_tokens)
        gone = self._ids[keep : self._size][::-1].copy()
        self.pool.release(gone)
        self._size = keep
        self.token_count = token_count
        self.first_live = min(self.first_live, keep)
        return gone

    def check_truncate(self, token_count: int) -> None:
        """What `truncate` would raise, without truncating: lets a caller cut the tables of all groups or none."""
        self._check_alive()
        if not 0 <= token_count <= self.token_count:
            raise UsageError(f"expected a token count in 0..{self.token_count} to truncate to, got {token_count}")
        needed = 0
        if self.window_tokens is not None:
            needed = window_first_block(token_count, self.window_tokens, self.block_tokens)
        if token_count and needed < self.first_live and needed < -(-token_count // self.block_tokens):
            raise CannotRollback(
                f"{token_count} tokens need blocks from {needed} on, those before {self.first_live} "
                "have left the window"
            )

    def drop_before(self, token: int) -> Ids:
        """Gives back the blocks that end at or before `token`, oldest first; their positions stay, as -1.

        They remain hits until they are evicted. Returns their ids.
        """
        self._check_alive()
        end = min(token, self.token_count) // self.block_tokens
        if end <= self.first_live:
            return np.empty(0, dtype=np.int32)
        gone = self._ids[self.first_live : end].copy()
        self.pool.release(gone)
        self._ids[self.first_live : end] = -1
        self.first_live = end
        return gone

    def drop_window(self, committed_tokens: int) -> Ids:
        """`drop_before` for a sliding group: all that no token after `committed_tokens` reads, less one block.

        The extra block keeps the hit point one block earlier alive: a prompt that is sent again, a few tokens shorter,
        still hits. No-op in other groups.
        """
        if self.window_tokens is None:
            return np.empty(0, dtype=np.int32)
        return self.drop_before(self._window_edge(committed_tokens))

    def window_surplus(self, committed_tokens: int) -> Ids:
        """The ids that `drop_window` would give back now."""
        if self.window_tokens is None:
            return np.empty(0, dtype=np.int32)
        end = min(self._window_edge(committed_tokens), self.token_count) // self.block_tokens
        return self._ids[self.first_live : max(end, self.first_live)].copy()

    def _window_edge(self, committed_tokens: int) -> int:
        assert self.window_tokens is not None
        return committed_tokens - self.window_tokens + 1 - self.block_tokens

    def release(self) -> None:
        """Gives everything back; the table cannot be used afterwards (UsageError).

        Full and latent groups tail first, so that leaves go first; a sliding group as one run.
        """
        self._check_alive()
        ids = self._ids[self.first_live : self._size]
        if self.window_tokens is None:
            self.pool.release(ids[::-1].copy())
        else:
            self.pool.release(ids.copy(), run=True)
        self._size = 0
        self.token_count = 0
        self.first_live = 0
        self.released = True

    # -- what engines get ---------------------------------------------------------------------------------------

    def entries(self) -> npt.NDArray[np.int64]:
        """slot * 2 + form of every position, int64[len]; -1 where the block was dropped."""
        self._check_alive()
        return self.pool.ledger.entry[self._ids[: self._size]]

    def slot_mapping(self, start: int, count: int) -> npt.NDArray[np.int64]:
        """Place of each of the tokens [start, start + count): slot * block_tokens + offset, int64[count].

        For writes, so every block must be there and in full precision: UsageError otherwise.
        """
        self._check_alive()
        if count < 0 or start < 0 or start + count > self.capacity_tokens:
            raise UsageError(f"expected tokens inside 0..{self.capacity_tokens}, got {count} from {start}")
        if not count:
            return np.empty(0, dtype=np.int64)
        size = self.block_tokens
        if count == 1:
            position, offset = divmod(start, size)
            entry = self.pool.ledger.entry_view[self._view[position]]
            if entry < 0 or entry & 1 == COLD:
                raise self._unwritable(position)
            return np.array([(entry >> 1) * size + offset], dtype=np.int64)
        first, last = start // size, (start + count - 1) // size
        entries = self.pool.ledger.entry[self._ids[first : last + 1]]
        if bool(((entries < 0) | (entries & 1 == COLD)).any()):
            raise self._unwritable(first)
        places = ((entries >> 1) * size)[:, None] + np.arange(size, dtype=np.int64)
        return places.reshape(-1)[start - first * size : start - first * size + count].copy()

    def _unwritable(self, position: int) -> UsageError:
        return UsageError(f"expected full-precision blocks from position {position} on, one is dropped or INT4")

    def _check_alive(self) -> None:
        if self.released:
            raise UsageError("the table was released: expected no further use")
