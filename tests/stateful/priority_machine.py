"""The pool's machine with priorities that end and tenants beside everything else it does."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from allocator import BlockState
from allocator.block_marks import PLAIN, PRIORITY_DEFAULT, steps_of
from tests.stateful.pool_machine import PoolMachine, Sequence, pick

_LEVELS = (5, PRIORITY_DEFAULT, 60, 60, 90)


class PriorityMachine(PoolMachine):
    """Every other sequence asks for something when it ends; idle blocks are kept, expire, and are given up."""

    seconds = 0.0

    def observe(self, sequence: Sequence) -> None:
        super().observe(sequence)
        level = _LEVELS[sum(sequence.tokens) % len(_LEVELS)]
        steps = steps_of(level, self.seconds + 5 if level > PRIORITY_DEFAULT else float("inf"))
        for table, count in zip(sequence.tables, sequence.sealed, strict=True):
            named = [one for one in table.ids()[:count].tolist() if one >= 0 and self.pool.hash_of(one) is not None]
            self.pool.keep(named, steps, tenant=len(sequence.tokens) % 3, first_use=level < 60)

    @rule(kind=st.sampled_from(("keep", "expire", "give")), which=pick, level=st.sampled_from(_LEVELS))
    def keeping(self, kind: str, which: int, level: int) -> None:
        idle = self.blocks(BlockState.IDLE)
        if kind == "keep" and idle:
            chosen = idle[which % len(idle)]
            self.pool.keep([chosen], steps_of(level), tenant=1)
            assert self.pool.priority_of(chosen) >= (level if level > PRIORITY_DEFAULT else 0)
            self.pool.keep([chosen], PLAIN)
            assert self.pool.priority_of(chosen) >= PRIORITY_DEFAULT
        elif kind == "expire":
            self.seconds += which % 4
            self.pool.expire(self.seconds)
        elif kind == "give":
            before = self.pool.idle_bytes_of(1)
            given = self.pool.evict_of(1, which % 600)
            assert self.pool.idle_bytes_of(1) == before - given
