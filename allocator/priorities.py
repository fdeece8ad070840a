"""Priorities and tenants of blocks: what is to be evicted later, or earlier, than the policy says, and whose.

    keep(ids, steps, ...)        a use of named blocks, with what it wants of them; see `block_marks`
    expire(now)                  priorities end
    evict_of(tenant, bytes)      a tenant that is over its quota gives up what it holds idle, and nobody else

Part of the pool, under its caller's lock. Works above every policy: until the first call of `keep` a pool runs its
policies as they are, from then on they lie on shelves (`eviction_shelves`).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from allocator.block_life import IdBatch
from allocator.block_marks import NOBODY, PLAIN, BlockMarks, Steps
from allocator.block_state import IDLE, SEALED, STATE
from allocator.compaction import Compaction
from allocator.errors import UsageError
from allocator.eviction_shelves import Shelves, TenantBlocks
from allocator.extent_ledger import Ids

_EXPIRED_A_CALL = 256


class Priorities(Compaction):
    """`Compaction` with priorities and tenants."""

    _tenants: dict[int, TenantBlocks]

    def keep(self, ids: IdBatch, steps: Steps = PLAIN, *, tenant: int = NOBODY, first_use: bool = False) -> None:
        """A use of sealed or idle blocks, head first (-1 ignored), that wants them kept at these priorities.

        first_use: nobody used them before, so a priority below the default counts. UsageError for other blocks.
        """
        if self.marks is None:
            if steps == PLAIN and tenant == NOBODY:
                return
            self.marks = self._put_on_shelves()
        if steps == PLAIN and tenant == NOBODY and not len(self.marks):
            return
        batch = [block_id for block_id in map(int, ids) if block_id >= 0]
        for block_id in batch:
            if self._words[self._checked(block_id)] & STATE not in (SEALED, IDLE):
                raise UsageError(
                    f"expected sealed or idle blocks to keep, got block {block_id} ({self.state_of(block_id).name})"
                )
        idle = [block_id for block_id in reversed(batch) if self._words[block_id] & STATE == IDLE]  # leaves go first
        ages = [self.policies[self._classes[block_id]].since(block_id) for block_id in idle]
        for block_id in idle:
            self.policies[self._classes[block_id]].forget([block_id])
        self.marks.keep(batch, steps, tenant, first_use=first_use)
        for block_id, tick in zip(idle, ages, strict=True):
            self.policies[self._classes[block_id]].idle([block_id], tick)

    def _put_on_shelves(self) -> BlockMarks:
        marks, self._tenants = BlockMarks(self.hashes), {}
        for index, plain in enumerate(self.policies):
            self.policies[index] = Shelves(plain, marks, self._tenants, self.layout.raw_slot_bytes[index])
        return marks

    def priority_of(self, block_id: int) -> int:
        """The priority of a named block now."""
        return PLAIN[0][0] if self.marks is None else self.marks.step(self._checked(block_id))[0]

    def steps_of(self, block_id: int) -> Steps:
        """What is wanted of a named block, for a copy of it."""
        mark = None if self.marks is None else self.marks.get(block_id)
        return PLAIN if mark is None else mark.steps

    @property
    def has_marks(self) -> bool:
        """Whether any block may have another priority than the default, or count for a tenant."""
        return self.marks is not None and len(self.marks) > 0

    @property
    def now(self) -> float:
        """The time that `expire` was told last."""
        return 0.0 if self.marks is None else self.marks.now

    def expire(self, now: float) -> None:
        """The time is `now`: some of the idle blocks whose priority has ended get the next one; to be called often."""
        if self.marks is not None:
            self.marks.now = now
            for shelves in self.policies:
                assert isinstance(shelves, Shelves)
                shelves.expire(now, _EXPIRED_A_CALL)

    # -- tenants ------------------------------------------------------------------------------------------------

    def idle_bytes_of(self, tenant: int) -> int:
        """Bytes of the idle blocks of a tenant."""
        found = None if self.marks is None else self._tenants.get(tenant)
        return 0 if found is None else found.idle_bytes

    def live_bytes(self, tables: Iterable[Ids]) -> int:
        """Bytes of the blocks in these tables that are not idle, each once (-1 ignored)."""
        mask = np.zeros(self.ledger.id_capacity + 1, dtype=bool)
        for ids in tables:
            mask[ids] = True  # -1 is the last place
        places = np.flatnonzero(mask[:-1])
        places = places[self._life[places] & STATE != IDLE]
        counts = np.bincount(self.ledger.class_of[places], minlength=self.layout.class_count).tolist()
        return sum(count * size for count, size in zip(counts, self.layout.raw_slot_bytes, strict=True))

    def evict_of(self, tenant: int, byte_count: int) -> int:
        """Evicts idle blocks of a tenant that are not held, lowest priority and longest idle first.

        Returns the bytes that were given up: at least so many, or all that can go.
        """
        found = None if self.marks is None else self._tenants.get(tenant)
        if found is None or byte_count <= 0:
            return 0
        before, ids = found.idle_bytes, found.first(byte_count, self.idle_mask)
        for index, part in self._by_class(np.array(ids, dtype=np.intp)):
            self.policies[index].forget(part)
            self._drop_idle(index, part)
        return before - found.idle_bytes
