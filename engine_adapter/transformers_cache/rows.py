"""The rows of a batch as sequences of the store: admit, grow, commit, cut, fork, end.

A row is a sequence with some columns of left padding before it. Tokens fed to the model are *pending* until the next
step begins (or the cache ends): until then drafts may be cut off again, and a forward pass that failed leaves nothing.
Only then are they committed, so only final tokens are ever named.

Used by one thread, the one that runs the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from allocator import CannotRollback, CapacityError, UsageError

if TYPE_CHECKING:
    from engine_adapter.paged_cache import PagedCache
    from engine_adapter.transformers_cache.recording import CacheRecording
    from kvstore import Identity, KVStore
    from kvstore.identity import Media

_numbers = itertools.count()
_WAIT_SECONDS = 0.02


@dataclass(slots=True)
class Row:
    """pad: columns before its first token. ids: tokens fed, the pending ones included. reused: found in the store.

    by_tier: where the reused ones, and those that a batch gave back, came from, the device first.
    media: their places count without the padding.
    """

    pad: int = 0
    ids: list[int] = field(default_factory=list)
    sequence_id: str | None = None
    committed: int = 0
    reused: int = 0
    by_tier: dict[str, int] = field(default_factory=dict)
    prefilled: bool = False
    media: tuple[Media, ...] = ()

    @property
    def pending(self) -> list[int]:
        return self.ids[self.committed :]


class Rows:
    """All rows of one cache. `columns`: what transformers calls the cache's length, padding included."""

    def __init__(
        self,
        store: KVStore,
        paged: PagedCache,
        *,
        exact: bool,
        identity: Identity | None,
        media: Sequence[Sequence[Media]] = (),
        recording: CacheRecording | None = None,
    ) -> None:
        """media: of each prompt; beams and several answers of a prompt are rows side by side."""
        self._store = store
        self._paged = paged
        self._exact = exact
        self.identity = identity
        self._recording = recording
        self.media = media
        self.media_to_come = False  # some lie behind what was found in the store
        self._block_tokens = store.geometry.block_tokens
        self.rows: list[Row] = []
        self.columns = 0
        self.failed = ""  # why this cache can no longer be used
        self._in_pass = False

    @property
    def by_tier(self) -> dict[str, int]:
        """Reused tokens of all rows, by the tier that had them."""
        found: dict[str, int] = {}
        for row in self.rows:
            left = row.reused
            for tier, tokens in row.by_tier.items():
                if taken := min(left, tokens):
                    found[tier] = found.get(tier, 0) + taken
                left -= taken
        return found

    @property
    def is_closed(self) -> bool:
        return self._store.closed

    # ---- steps

    def settle(self) -> None:
        """Make the tokens of the last pass final, or void them if it did not come to its end; then let the store work.

        Tables are no longer valid afterwards.
        """
        if self.failed:
            raise UsageError(f"this cache cannot be used any more: {self.failed}; make a new one")
        for row in self.rows:
            pending = row.pending
            if not pending or row.sequence_id is None:
                continue
            if self._in_pass:
                self._store.rollback(row.sequence_id, len(pending))
                del row.ids[row.committed :]
                continue
            started = [one for one in row.media if row.committed <= one.start < len(row.ids)]
            self._store.commit(row.sequence_id, pending, started)
            row.committed = len(row.ids)
            if not row.prefilled:
                row.prefilled = True
                self._store.prefill_done(row.sequence_id)
        self._in_pass = False
        self._store.step()

    def admit(self, prompts: Sequence[list[int]], pads: Sequence[int], most_columns: int) -> int:
        """Begin all rows; returns how many columns need not be computed, `most_columns` at most.

        prompts: tokens of each row, padding left out. A batch is computed from one column on, so it reuses what its
        least lucky row can; the others give back what they have beyond.
        """
        if self.media and len(pads) % len(self.media):
            raise UsageError(f"media of {len(self.media)} prompts for a batch of {len(pads)} rows; expected one each")
        share = len(pads) // max(1, len(self.media))
        self.rows = [
            Row(pad, media=tuple(self.media[at // share]) if self.media else ()) for at, pad in enumerate(pads)
        ]
        if self._recording is not None:
            self._recording.begin(prompts, [row.media for row in self.rows])
        try:
            return self._admit_all(prompts, most_columns)
        except BaseException:
            for row in self.rows:
                self._end(row, "abort")
            self.rows = []
            raise

    def _admit_all(self, prompts: Sequence[list[int]], most_columns: int) -> int:
        for row, prompt in zip(self.rows, prompts, strict=True):
            if prompt:
                self._admit(row, prompt if most_columns > 0 else prompt[:1])
        column = max(0, min([most_columns, *(row.pad + len(row.ids) for row in self.rows if row.sequence_id)]))
        column = self._clear_of_media(column)
        try:
            for row in self.rows:
                self._keep(row, max(0, column - row.pad))
        except CannotRollback:  # a window begins later than the column: nothing of this batch is reused
            for row, prompt in zip(self.rows, prompts, strict=True):
                self._end(row, "abort")
                if prompt:
                    self._admit(row, prompt[:1])
            column = 0
        self.media_to_come = any(row.pad + one.stop > column for row in self.rows for one in row.media)
        for row in self.rows:
            row.reused = len(row.ids)
        self.columns = column
        return column

    def _clear_of_media(self, column: int) -> int:
        """The model is given all media of a batch or none, so computing begins behind the last or before the first."""
        spans = [(row.pad + row.media[0].start, row.pad + row.media[-1].stop) for row in self.rows if row.media]
        return column if all(column >= stop for _, stop in spans) else min(column, *(start for start, _ in spans))

    def begin_pass(self, tokens: Sequence[list[int]]) -> None:
        """Room for the next tokens of every row, or for none (CapacityError)."""
        grown: list[tuple[str, int]] = []
        try:
            for row, fed in zip(self.rows, tokens, strict=True):
                if not fed:
                    continue
                if row.sequence_id is None:
                    self._admit(row, fed[:1])
                assert row.sequence_id is not None
                self._grow(row.sequence_id, len(fed))
                grown.append((row.sequence_id, len(fed)))
        except BaseException:
            for sequence_id, count in grown:
                self._store.rollback(sequence_id, count)
            raise
        for row, fed in zip(self.rows, tokens, strict=True):
            row.ids += fed
        self._in_pass = True

    def end_pass(self, columns: int) -> None:
        """The forward pass came to its end: the KV of `columns` more columns is there."""
        self._in_pass = False
        self.columns += columns

    # ---- what transformers asks of a cache

    def cut(self, columns: int) -> None:
        """Drop the last `columns`. CannotRollback, with nothing changed, where a window has lost what is needed."""
        if self._in_pass:
            self.settle()
        columns = min(columns, self.columns)
        for index, row in enumerate(self.rows):
            remove = min(columns, len(row.ids))
            try:
                self._keep(row, len(row.ids) - remove)
            except (CannotRollback, CapacityError) as error:
                if index or self.failed:
                    self.failed = self.failed or f"a rollback failed in the middle of a batch ({error})"
                raise
            row.pad -= columns - remove
        self.columns -= columns

    def take(self, sources: Sequence[int]) -> None:
        """Row i becomes what row sources[i] was: forks share blocks, rows that nobody takes end."""
        if any(not 0 <= source < len(self.rows) for source in sources):
            raise UsageError(f"rows {list(sources)} of a batch of {len(self.rows)}; expected 0..{len(self.rows) - 1}")
        self.settle()
        taken: set[int] = set()
        made = []
        for source in sources:
            row = self.rows[source]
            if source in taken:
                copied = (row.committed, row.reused, row.by_tier, row.prefilled, row.media)
                row = Row(row.pad, list(row.ids), None, *copied)
                parent = self.rows[source].sequence_id
                if parent is not None:
                    row.sequence_id = _new_id()
                    self._store.fork(parent, row.sequence_id)
            taken.add(source)
            made.append(row)
        for index, row in enumerate(self.rows):
            if index not in taken:
                self._end(row, "abort")
        self.rows = made

    def finish(self) -> None:
        """End all rows: what they computed stays findable. Idempotent."""
        if not self._store.closed:
            if not self.failed:
                self.settle()
            if self._recording is not None:
                self._recording.end([row.ids for row in self.rows], failed=bool(self.failed))
            for row in self.rows:
                self._end(row, "abort" if self.failed else "finish")
        self.rows = []
        self.columns = 0

    # ---- one row

    def _admit(self, row: Row, prompt: list[int]) -> None:
        store = self._store
        sequence_id = _new_id()
        media = [one for one in row.media if one.start < len(prompt)]
        while True:
            try:
                given = store.admit(sequence_id, prompt, exact=self._exact, identity=self.identity, media=media)
                if not given.ask_again:
                    break
            except CapacityError as error:
                if not error.transient:
                    raise
            self._let_work()
        row.sequence_id = sequence_id
        while not (state := store.fetch(sequence_id)).done:
            self._let_work()
        row.ids = prompt[: state.ready_tokens]
        row.committed = state.ready_tokens
        row.by_tier = dict(given.by_tier)

    def _let_work(self) -> None:
        self._store.wait(_WAIT_SECONDS)
        self._store.step()

    def _grow(self, sequence_id: str, count: int) -> None:
        while True:
            try:
                self._store.grow(sequence_id, count)
                return
            except CapacityError as error:
                if not error.transient:
                    raise
            self._let_work()  # transfers under way will free room

    def _end(self, row: Row, how: str) -> None:
        if row.sequence_id is None:
            return
        if how == "finish":
            self._store.finish(row.sequence_id)
        else:
            self._store.abort(row.sequence_id)
        row.sequence_id, row.ids, row.committed = None, [], 0

    def _keep(self, row: Row, count: int) -> None:
        """Cut a row to its first `count` tokens."""
        if count == len(row.ids) or row.sequence_id is None:
            return
        try:
            self._store.rollback(row.sequence_id, len(row.ids) - count)
        except CannotRollback:
            self._keep_cold(row, row.sequence_id, count)
        del row.ids[count:]
        row.committed = min(row.committed, count)

    def _keep_cold(self, row: Row, sequence_id: str, count: int) -> None:
        """Cut inside an INT4 block: its first tokens are decoded once, into a block of their own that counts as lossy.

        The other blocks stay as they are, never encoded a second time.
        """
        store, edge = self._store, count - count % self._block_tokens
        if edge == count:
            raise CannotRollback(f"the window of a sliding layer no longer reaches back to {count} tokens")
        tail = self._read_tail(sequence_id, edge, count)
        store.commit(sequence_id, [])  # notes what was read cold, before the cut hides it
        store.rollback(sequence_id, len(row.ids) - edge)
        try:
            if edge < count:
                self._grow(sequence_id, count - edge)
        except CapacityError:
            self.failed = "no room for the tail of a block that was cut"
            raise
        for group, layers in enumerate(tail):
            index = self._paged.write_index(group, store.slot_mapping(sequence_id, group, edge, count - edge))
            for layer, keys, values in layers:
                self._paged.write(layer, index, keys, values)
        store.commit(sequence_id, row.ids[edge:count], [one for one in row.media if edge <= one.start < count])

    def _read_tail(
        self, sequence_id: str, edge: int, count: int
    ) -> list[list[tuple[int, torch.Tensor, torch.Tensor | None]]]:
        """Per group, (layer, keys Tensor[tokens, kv_heads, dim], values) of the tokens from `edge` on."""
        found = []
        for entries, group in zip(self._store.tables(sequence_id), self._store.geometry.groups, strict=True):
            place = edge // self._block_tokens
            if entries[place] < 0:
                raise CannotRollback(f"sequence {sequence_id!r}: the window dropped the block of token {edge}")
            layers: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []
            for layer in group.layers:
                keys, values = self._paged.gather(layer, entries[place : place + 1])
                keys, values = (part[:, : count - edge].transpose(0, 1).contiguous() for part in (keys, values))
                layers.append((layer, keys, values if group.value_dim else None))
            found.append(layers)
        return found


def _new_id() -> str:
    return f"generate-{next(_numbers)}"
