"""What must hold between the sequences of a store and its pool. Called under the store's lock, in tests and drills."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator import IntegrityError
from kvstore.sequence import SequenceState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from allocator import BlockPool
    from kvstore.sequence import Sequence
    from kvstore.write_behind import WriteBehind


def check_store(pool: BlockPool, sequences: Mapping[str, Sequence], writes: WriteBehind) -> None:
    """Raise IntegrityError naming the first invariant that does not hold."""
    pool.check_invariants([table for sequence in sequences.values() for table in sequence.tables])
    for sequence in sequences.values():
        _check_sequence(sequence)
    _check_exact_holders(pool, sequences)
    writes.check()


def _check_sequence(sequence: Sequence) -> None:
    name = sequence.sequence_id
    if not 0 <= sequence.committed <= sequence.written and sequence.state is SequenceState.RUNNING:
        raise IntegrityError(f"{name!r}: committed {sequence.committed} > written {sequence.written}")
    if sequence.chain.token_count < sequence.committed:
        raise IntegrityError(f"{name!r}: chain of {sequence.chain.token_count} < committed {sequence.committed}")
    for table in sequence.tables:
        if table.token_count != sequence.written:
            raise IntegrityError(f"{name!r}: table has {table.token_count} tokens, written {sequence.written}")


def _check_exact_holders(pool: BlockPool, sequences: Mapping[str, Sequence]) -> None:
    """Every block of an exact sequence, and every tail kept from cooling, is held once by its sequence."""
    expected: dict[int, int] = {}
    for sequence in sequences.values():
        held = [one for table in sequence.tables for one in table.ids().tolist() if one >= 0] if sequence.exact else []
        for block_id in [*held, *sequence.held_tails.values()]:
            expected[block_id] = expected.get(block_id, 0) + 1
    counts = pool.exact_holders.tolist()
    for block_id, count in enumerate(counts):
        if count != expected.get(block_id, 0):
            raise IntegrityError(
                f"block {block_id}: {expected.get(block_id, 0)} sequences hold it exact, {count} counted"
            )
