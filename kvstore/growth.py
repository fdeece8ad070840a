"""How a sequence grows and shrinks: room, commit, seal, window drop, rollback. Runs under the store's lock.

A block is named (sealed) as *exact* only when every token in it was computed while nothing before it was read lossy.
`lossy_from` of a sequence is the first position computed after such a read; it is set when a lossy block is shared
at admission and when a commit finds a cold block in the sequence's own tables. The check at commit is on the safe
side: cooling that happened between the forward pass and the commit marks tokens lossy that were exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from allocator import COLD, FULL, CannotRollback, CapacityError, IntegrityError, UsageError
from kvstore.arguments import length, whole
from kvstore.sequence import RUNNING

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    import numpy.typing as npt

    from allocator import BlockPool, BlockTable, KVGeometry
    from kvstore.announce import Announcer
    from kvstore.device import BlockBytes
    from kvstore.identity import Media
    from kvstore.metrics import StoreMetrics
    from kvstore.retention import Retainer
    from kvstore.sequence import Sequence
    from kvstore.upkeep import Upkeep


def has_cold(entries: npt.NDArray[np.int64]) -> bool:
    """Whether any of a table's entries (slot << 1 | form, -1 where dropped) is an INT4 block."""
    return bool(((entries & 1 == COLD) & (entries >= 0)).any())


class Growth:
    def __init__(
        self,
        geometry: KVGeometry,
        pool: BlockPool,
        device: BlockBytes,
        upkeep: Upkeep,
        metrics: StoreMetrics,
        announcer: Announcer,
        retainer: Retainer,
        *,
        poison: bool = False,
    ) -> None:
        self.computed_tokens = 0  # since the last step, which hands them to the metrics
        self._pool = pool
        self._device = device
        self._mover = upkeep.mover
        self._upkeep = upkeep
        self._metrics = metrics
        self._announcer = announcer
        self._retainer = retainer
        self._poison = poison
        self._block_tokens = geometry.block_tokens
        self._windows = [group.window_tokens for group in geometry.groups]
        self._one_group = len(geometry.groups) == 1
        self._windowed = any(window is not None for window in self._windows)

    # -- grow ---------------------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence, token_count: int) -> None:
        """Room for `token_count` more tokens in every group; on CapacityError nothing has changed."""
        table = sequence.tables[0]
        if self._one_group and table.advance_in_tail(token_count):
            sequence.written += token_count
            return
        try:
            for table in sequence.tables:
                self._grow_table(sequence, table, token_count)
        except BaseException as error:
            for grown in sequence.tables:
                if grown.capacity_tokens > grown.token_count:
                    self.drop_blocks_ahead(sequence, grown)
            if isinstance(error, CapacityError):
                error.transient = self._mover.in_flight_blocks > 0
                self._upkeep.note_shortage(table.group)
            raise
        for table in sequence.tables:
            table.advance(token_count)
        sequence.written += token_count

    def _grow_table(self, sequence: Sequence, table: BlockTable, token_count: int) -> None:
        if table.token_count % self._block_tokens:
            self._make_tail_writable(sequence, table)
        short = table.token_count + token_count - table.capacity_tokens
        if short <= 0:
            return
        if short <= self._block_tokens:
            fresh = [self._pool.allocate_one(table.group, FULL)]
            table.append_one(fresh[0])
        else:
            ids = self._pool.allocate(table.group, -(-short // self._block_tokens), FULL)
            table.append(ids)
            fresh = ids.tolist() if sequence.exact or self._poison else ids[-1:].tolist()
        if sequence.exact:
            self._pool.hold_exact(fresh)
        if self._poison:
            self._device.poison(table.group, [self._pool.slot_of(one) for one in fresh])
        if short % self._block_tokens:
            # attention masks the unwritten end of the last block, but a mask does not remove NaN
            self._device.zero_tail(table.group, self._pool.slot_of(fresh[-1]), short % self._block_tokens)

    def _make_tail_writable(self, sequence: Sequence, table: BlockTable) -> None:
        if not table.tail_is_shared():
            return
        pool, position = self._pool, table.token_count // self._block_tokens
        source = table.id_at(position)
        if pool.form_of(source) == COLD:
            raise IntegrityError(f"sequence {sequence.sequence_id!r} would write into INT4 block {source}")
        held = sequence.exact or table.group in sequence.held_tails
        if held:
            pool.drop_exact([source])
        try:
            copied = table.writable_tail()
        except CapacityError:
            if held:
                pool.hold_exact([source])
            raise
        if copied is None:
            return
        try:
            self._device.copy(table.group, FULL, copied.source_slot, copied.target_slot)
        except BaseException:
            pool.share([source])  # nothing has asked for room since: the source is still what it was
            table.replace(position, source)
            pool.release([copied.target_id])
            if held:
                pool.hold_exact([source])
            raise
        sequence.held_tails.pop(table.group, None)
        if sequence.exact:
            pool.hold_exact([copied.target_id])
        self._metrics.copied()

    def hold_tails(self, sequence: Sequence) -> None:
        """Keep a sealed block that a rollback or fork left partly filled in full precision: it will be copied and
        written to, and an INT4 block cannot be. Open blocks do not cool, and an exact sequence holds all it has.
        """
        if sequence.exact:
            return
        for table in sequence.tables:
            if table.token_count % self._block_tokens and table.group not in sequence.held_tails:
                tail = table.id_at(table.token_count // self._block_tokens)
                if self._pool.hash_of(tail) is not None:
                    self._pool.hold_exact([tail])
                    sequence.held_tails[table.group] = tail

    def drop_tails(self, sequence: Sequence) -> None:
        """Undo `hold_tails`; to be called before the blocks are released."""
        self._pool.drop_exact(list(sequence.held_tails.values()))
        sequence.held_tails.clear()

    def drop_blocks_ahead(self, sequence: Sequence, table: BlockTable) -> None:
        """Give back blocks that were appended but hold no token."""
        if sequence.exact:
            self._pool.drop_exact(table.ids()[-(-table.token_count // self._block_tokens) :])
        table.truncate(table.token_count)

    def slot_mapping(self, sequence: Sequence, group: int, start: int, count: int) -> npt.NDArray[np.int64]:
        """Places of tokens that are written and not committed; any other token's block may be shared."""
        if not (type(group) is type(start) is type(count) is int):
            group, start, count = whole("group", group, 0), whole("start", start, 0), whole("count", count, 0)
        if not 0 <= group < len(sequence.tables):
            raise UsageError(f"group: got {group!r}; expected 0..{len(sequence.tables) - 1}")
        final = sequence.committed if sequence.state is RUNNING else sequence.loading_tokens
        if count < 0 or start < final or start + count > sequence.written:
            raise UsageError(
                f"slot_mapping of {count} tokens from {start}: sequence {sequence.sequence_id!r} has "
                f"{final} committed, {sequence.written} written; expected tokens between the two"
            )
        return sequence.tables[group].slot_mapping(start, count)

    # -- commit -------------------------------------------------------------------------------------------------

    def commit(self, sequence: Sequence, token_ids: Items[int], media: Items[Media] = ()) -> None:
        count = len(token_ids) if type(token_ids) is list else length(token_ids)
        start = sequence.committed
        if start + count > sequence.written:
            raise self._beyond_written(sequence, count)
        if media:
            chain = sequence.chain.fork()
            chain.truncate(start)
            chain.extend(token_ids, media)
            sequence.chain = chain
        else:
            sequence.chain.settle(start, token_ids)
        self._committed(sequence, start + count)

    def commit_prompt(self, sequence: Sequence, token_count: int) -> None:
        known = sequence.chain.token_count - sequence.committed
        if not 0 < token_count <= known:
            raise UsageError(
                f"commit_prompt of {token_count} tokens: sequence {sequence.sequence_id!r} was admitted with {known} "
                f"tokens that are not committed; expected 1..{known}"
            )
        if sequence.committed + token_count > sequence.written:
            raise self._beyond_written(sequence, token_count)
        self._committed(sequence, sequence.committed + token_count)

    def _beyond_written(self, sequence: Sequence, count: int) -> UsageError:
        return UsageError(
            f"commit of {count} tokens to sequence {sequence.sequence_id!r} passes what was written: "
            f"{sequence.committed} committed, {sequence.written} written; call grow first"
        )

    def _committed(self, sequence: Sequence, committed: int) -> None:
        if sequence.lossy_from is None and sequence.cold_generation != self._mover.cool_generation:
            self._note_cold_reads(sequence)
        self.computed_tokens += committed - sequence.committed
        sequence.committed = committed
        if committed // self._block_tokens > sequence.sealed_blocks:
            self._seal(sequence)
            if self._windowed:
                self._drop_out_of_window(sequence)

    def _note_cold_reads(self, sequence: Sequence) -> None:
        """What is committed next was computed after any block of the sequence that is cold by now."""
        sequence.cold_generation = self._mover.cool_generation
        if any(has_cold(table.entries()) for table in sequence.tables):
            sequence.lossy_from = sequence.committed

    def _seal(self, sequence: Sequence) -> None:
        first, last = sequence.sealed_blocks, sequence.committed // self._block_tokens
        sequence.sealed_blocks = last
        if sequence.private_from is not None:
            last = min(last, sequence.private_from // self._block_tokens)
        if not sequence.shared or first >= last:
            return
        exact_end = last
        if sequence.lossy_from is not None:
            exact_end = min(last, max(first, sequence.lossy_from // self._block_tokens))
        for table in sequence.tables:
            if first < exact_end:
                self._seal_run(sequence, table, first, exact_end, True)
            if exact_end < last:
                self._seal_run(sequence, table, exact_end, last, False)
        self._upkeep.enqueue_cool(sequence)
        self._upkeep.hand_over(sequence, first, last)

    def _seal_run(self, sequence: Sequence, table: BlockTable, start: int, stop: int, exact: bool) -> None:
        if stop - start == 1:
            self._seal_one(sequence, table, start, exact)
            return
        ids = table.ids()[start:stop]
        if self._windows[table.group] is not None and (ids < 0).any():  # parts have left the window already
            for position in (np.flatnonzero(ids >= 0) + start).tolist():
                self._seal_run(sequence, table, position, position + 1, exact)
            return
        hashes = sequence.chain.hashes
        canonical = self._pool.seal_many(ids, hashes[start:stop], exact)
        for offset in np.flatnonzero(canonical != ids).tolist():
            table.replace(start + offset, int(canonical[offset]))
        if self._announcer.heard:
            self._announcer.sealed(table.group, sequence.chain, start, (canonical == ids).tolist(), exact)
        if self._upkeep.names_blocks:
            parents = [hashes[start - 1] if start else None, *hashes[start : stop - 1]]
            self._upkeep.remember(canonical.tolist(), sequence.root, parents)

    def _seal_one(self, sequence: Sequence, table: BlockTable, position: int, exact: bool) -> None:
        """`_seal_run` for one block, as a decode step fills them."""
        block_id = table.id_at(position)
        if block_id < 0:  # has left the window already
            return
        hashes = sequence.chain.hashes
        canonical = self._pool.seal(block_id, hashes[position], exact)
        if canonical != block_id:
            table.replace(position, canonical)
        if self._announcer.heard:
            self._announcer.sealed(table.group, sequence.chain, position, [canonical == block_id], exact)
        if self._upkeep.names_blocks:
            self._upkeep.remember([canonical], sequence.root, [hashes[position - 1] if position else None])

    def _drop_out_of_window(self, sequence: Sequence) -> None:
        """Give back blocks that no later token can attend to; one more is kept, so that a slightly shorter prompt
        still finds the window before its end.
        """
        for table in sequence.tables:
            if sequence.exact:
                self._pool.drop_exact(table.window_surplus(sequence.committed))
            self._retainer.keep_dropped(sequence, table)
            table.drop_window(sequence.committed)

    # -- fork ---------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds, at its end."""
        self._upkeep.reuse.note(sequence)
        self._retainer.keep(sequence)
        self.drop_tails(sequence)
        for table in sequence.tables:
            if sequence.exact:
                self._pool.drop_exact(table.ids())
            table.release()

    def fork(self, parent: Sequence, child_id: str) -> Sequence:
        """A child with holds of its own. UsageError while the parent has written tokens that are not committed."""
        if parent.written != parent.committed:
            raise UsageError(
                f"fork of {parent.sequence_id!r}: {parent.written - parent.committed} written tokens are not "
                "committed; commit or roll them back first"
            )
        child = parent.fork(child_id)
        if child.exact:
            for table in child.tables:
                self._pool.hold_exact(table.ids())
        self.hold_tails(child)
        return child

    # -- rollback -----------------------------------------------------------------------------------------------

    def rollback(self, sequence: Sequence, token_count: int) -> None:
        most = sequence.written - (0 if sequence.state is RUNNING else sequence.loading_tokens)
        if not 0 < token_count <= most:
            raise UsageError(
                f"rollback of {token_count} tokens: sequence {sequence.sequence_id!r} has {most} written; "
                f"expected 1..{most}"
            )
        remaining = sequence.written - token_count
        self.truncate(sequence, remaining)
        sequence.written = remaining
        if remaining < sequence.committed:
            sequence.committed = remaining
            sequence.chain.truncate(remaining)
            sequence.sealed_blocks = min(sequence.sealed_blocks, remaining // self._block_tokens)
            sequence.cool_cursor = min(sequence.cool_cursor, max(1, sequence.sealed_blocks))
            if sequence.lossy_from is not None and sequence.lossy_from > remaining:
                sequence.lossy_from = remaining  # what is computed next still follows whatever was lossy

    def truncate(self, sequence: Sequence, token_count: int) -> None:
        """Cut every table to `token_count` tokens, or raise CannotRollback with nothing changed."""
        cut = token_count % self._block_tokens
        for table in sequence.tables:
            table.check_truncate(token_count)
            if cut and self._pool.form_of(table.id_at(token_count // self._block_tokens)) == COLD:
                raise CannotRollback(
                    f"sequence {sequence.sequence_id!r} cannot be cut to {token_count} tokens: that is inside an INT4 "
                    f"block, which is never written to; cut to a multiple of {self._block_tokens} or compute it again"
                )
        self.drop_tails(sequence)
        for table in sequence.tables:
            if sequence.exact:
                self._pool.drop_exact(table.ids()[-(-token_count // self._block_tokens) :])
            table.truncate(token_count)
        self.hold_tails(sequence)
