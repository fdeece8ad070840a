"""Copies on their way up into device blocks: in pieces, each copy once, for as many sequences as wait for it.

Decisions are made under the store's lock, and so is everything here; bytes move on the tiers' own threads and nothing
here waits.

- A long prefix is asked for in pieces, first blocks first. Deadline and cancellation act on a piece, and what has
  arrived counts although the rest is late.
- A copy that is on its way already is shared: sequences that wait for one block hold the same device block, and each
  is told when the last one of its copies has an outcome. A failure is one for all of them.
- Where an engine computes meanwhile (by_layer), all that a tier brings for a sequence is one piece, which arrives layer
  by layer; it is on the device or a miss as a whole in time, like any other piece.
- A sequence is settled as soon as a copy of a prefix-closed group has failed and all before it are there: what comes
  after cannot be used. A piece that nobody waits for any more is cancelled.

Invariant: a block that a transfer writes is in flight in the pool from before the submit until its completion is seen.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator import GroupKind
from kvstore.tier import ResultCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set
    from collections.abc import Sequence as Items

    from allocator import BlockPool, KVGeometry
    from kvstore.costs import CostModel
    from kvstore.device import BlockBytes
    from kvstore.layer_progress import LayerProgress
    from kvstore.metrics import StoreMetrics
    from kvstore.sequence import PendingCopy, Sequence
    from kvstore.tier import Completion, CopyKey, Tier, Transfer

_PIECE_BLOCKS = 32
_PIECE_BYTES = 16 << 20

_LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Piece:
    tier: Tier
    copies: list[PendingCopy]
    buffers: list[memoryview]
    byte_count: int
    started_seconds: float
    transfer: Transfer | None = None
    abandoned: bool = False


class Fetcher:
    """See the module."""

    def __init__(
        self, geometry: KVGeometry, pool: BlockPool, device: BlockBytes, metrics: StoreMetrics, costs: CostModel
    ) -> None:
        self._closed_groups = {
            index for index, group in enumerate(geometry.groups) if group.kind is not GroupKind.SLIDING
        }
        self._geometry = geometry
        self.layer_end = 1 + max(layer for group in geometry.groups for layer in group.layers)
        self._pool = pool
        self._device = device
        self._metrics = metrics
        self._costs = costs
        self._pieces: dict[Transfer, _Piece] = {}
        self._incoming: dict[CopyKey, tuple[PendingCopy, _Piece]] = {}
        self._on_settled: dict[Sequence, Callable[[Sequence], None]] = {}
        self._touched: dict[Sequence, None] = {}  # waiters of copies that have got an outcome
        self._arrived_bytes: Counter[str] = Counter()  # by tier, since `settle`
        self._busy_since: dict[str, float] = {}  # tier -> when it was last known to have nothing behind it

    @property
    def block_count(self) -> int:
        """Blocks that transfers may still write."""
        return sum(len(piece.copies) for piece in self._pieces.values())

    def queued_bytes(self, tier: str) -> int:
        return sum(piece.byte_count for piece in self._pieces.values() if piece.tier.name == tier)

    def incoming(self, key: CopyKey) -> PendingCopy | None:
        """The copy under that name which is on its way to a device block, to be waited for too."""
        found = self._incoming.get(key)
        return None if found is None else found[0]

    # -- layers -------------------------------------------------------------------------------------------------

    def progress(self, sequence: Sequence, group: int) -> list[LayerProgress] | None:
        """Of the transfers that still bring the sequence copies of a group. None: a copy cannot be read in time."""
        if sequence.pending and not self._device.writes_in_place:
            return None
        found: dict[_Piece, None] = {}
        for copy in sequence.pending:
            if copy.outcome is False:
                return None
            if copy.outcome is None and copy.group == group:
                found[self._incoming[copy.key][1]] = None
        return [piece.transfer.progress for piece in found if piece.transfer is not None]

    def layers_ready(self, sequence: Sequence) -> int:
        """Leading layers of the model whose KV is there for all that the sequence loads; 0 when a copy has failed."""
        ready = self.layer_end
        for index, group in enumerate(self._geometry.groups):
            found = self.progress(sequence, index)
            if found is None or any(one.failed for one in found):
                return 0
            place = min((one.ready(index) for one in found), default=len(group.layers))
            if place < len(group.layers):
                ready = min(ready, *group.layers[place:])
        return ready

    # -- begin --------------------------------------------------------------------------------------------------

    def start(
        self, sequence: Sequence, tiers: Mapping[str, Tier], on_settled: Callable[[Sequence], None], now: float
    ) -> None:
        """Ask for those of the sequence's pending copies that nobody has asked for. tiers: theirs, by name.

        `on_settled` runs once, inside `settle` or `expire`, or here when not one copy could be asked for.
        """
        self._on_settled[sequence] = on_settled
        fresh = []
        for copy in sequence.pending:
            copy.waiters.append(sequence)
            if copy.key not in self._incoming:
                fresh.append(copy)
        sequence.by_layer = sequence.by_layer and self._device.writes_in_place
        in_layers = {name for name, tier in tiers.items() if sequence.by_layer and tier.delivers_layers}
        for name, copies in self._cut(fresh, in_layers):
            self._submit(tiers[name], copies, now, by_layer=name in in_layers)
        self._touched[sequence] = None
        self._tell()

    def _cut(self, copies: list[PendingCopy], whole: Set[str]) -> Iterator[tuple[str, list[PendingCopy]]]:
        """Pieces of one tier each, in the order in which the blocks are needed; of the tiers in `whole` one each."""
        part: dict[str, list[PendingCopy]] = {}
        for copy in sorted(copies, key=lambda copy: copy.position):
            piece = part.setdefault(copy.tier, [])
            piece.append(copy)
            if copy.tier in whole:
                continue
            if len(piece) == _PIECE_BLOCKS or sum(map(self._bytes_of, piece)) >= _PIECE_BYTES:
                yield copy.tier, part.pop(copy.tier)
        yield from part.items()

    def _bytes_of(self, copy: PendingCopy) -> int:
        return self._pool.layout.raw_slot_bytes[2 * copy.group + copy.form]

    def _submit(self, tier: Tier, copies: list[PendingCopy], now: float, *, by_layer: bool) -> None:
        pool = self._pool
        block_ids = [copy.block_id for copy in copies]
        pool.begin_transfer(block_ids)
        try:
            buffers = [self._device.write_buffer(copy.group, copy.form, pool.slot_of(copy.block_id)) for copy in copies]
            items = [(copy.key, buffer) for copy, buffer in zip(copies, buffers, strict=True)]
            transfer = tier.submit_get(items, by_layer=True) if by_layer else tier.submit_get(items)
        except Exception:  # counted: what cannot be asked for is computed
            pool.end_transfer(block_ids)
            for copy in copies:
                copy.outcome = False
            self._metrics.missed("not_submitted", len(copies), tier=tier.name)
            _LOG.exception("kvstore: %d copies from tier %s could not be asked for", len(copies), tier.name)
            return
        piece = _Piece(tier, copies, buffers, sum(buffer.nbytes for buffer in buffers), now, transfer)
        self._busy_since.setdefault(tier.name, now)
        self._pieces[transfer] = piece
        self._incoming.update((copy.key, (copy, piece)) for copy in copies)

    # -- ends ---------------------------------------------------------------------------------------------------

    def finish(self, completion: Completion, now: float) -> int:
        """Take in the end of a transfer; blocks that arrived. One that is not known here changes nothing.

        Who waited is told by `settle`, to be called once the completions of a moment are in.
        """
        piece = self._pieces.pop(completion.transfer, None)
        if piece is None:
            return 0
        name, results = piece.tier.name, completion.results
        self._metrics.transferred(name, "get", results, piece.byte_count, now - piece.started_seconds)
        if all(result is ResultCode.OK for result in results):
            self._arrived_bytes[name] += piece.byte_count
        if piece.abandoned:  # late: the blocks belong to nobody any more and leave with their transfer
            self._pool.end_transfer([copy.block_id for copy in piece.copies])
            return 0
        good = 0
        for place, copy in enumerate(piece.copies):  # a tier that answers for too few keys has missed the rest
            result = results[place] if place < len(results) else ResultCode.FAILED
            cause = result.value if result is not ResultCode.OK else self._write_back(copy, piece.buffers[place])
            copy.outcome = cause is None
            if cause is None:
                good += 1
            else:
                self._metrics.missed(cause, tier=name)
        self._pool.end_transfer([copy.block_id for copy in piece.copies])
        self._metrics.fetched(name, good)
        self._close(piece)
        return good

    def _write_back(self, copy: PendingCopy, buffer: memoryview) -> str | None:
        """Bring fetched bytes to the device; the cause when that failed."""
        try:
            self._device.write_back(copy.group, copy.form, self._pool.slot_of(copy.block_id), buffer)
        except Exception:  # counted: bytes that did not arrive are a miss
            _LOG.exception("kvstore: a copy from tier %s could not be written to the device", copy.tier)
            return "not_written"
        return None

    def expire(self, now: float, deadline_seconds: float) -> int:
        """Give up pieces older than the deadline: their blocks are a miss now, and fenced until the tier lets go."""
        late = [piece for piece in self._pieces.values() if now - piece.started_seconds > deadline_seconds]
        expired = 0
        for piece in late:
            if not piece.abandoned:
                expired += len(piece.copies)
                self._metrics.missed("deadline", len(piece.copies), tier=piece.tier.name)
                self._costs.observe_load(piece.tier.name, piece.byte_count, now - piece.started_seconds)
                self._abandon(piece)
        self._tell()
        return expired

    def leave(self, sequence: Sequence) -> None:
        """The sequence ends: it waits for nothing any more. What nobody else waits for is cancelled."""
        if self._on_settled.pop(sequence, None) is not None:
            self._stop_waiting(sequence)
            self._tell()

    def settle(self, now: float) -> None:
        """Learn what each tier has moved since it was last looked at, and tell sequences that have all they can get.

        Pieces of one tier follow each other, so their bytes are priced together, not each from its submit.
        """
        if self._busy_since:
            still_busy = {piece.tier.name for piece in self._pieces.values()}
            for name in list(self._busy_since):
                arrived = self._arrived_bytes.pop(name, 0)
                if arrived:
                    self._costs.observe_load(name, arrived, now - self._busy_since[name])
                    self._busy_since[name] = now
                if name not in still_busy:
                    del self._busy_since[name]
        self._tell()

    def _abandon(self, piece: _Piece) -> None:
        piece.abandoned = True
        for copy in piece.copies:
            copy.outcome = False
        assert piece.transfer is not None
        piece.transfer.cancel()
        self._close(piece)

    def _close(self, piece: _Piece) -> None:
        """Every copy of the piece has an outcome."""
        for copy in piece.copies:
            del self._incoming[copy.key]
            self._touched.update(dict.fromkeys(copy.waiters))

    def _tell(self) -> None:
        while self._touched:
            sequence, _ = self._touched.popitem()
            if sequence in self._on_settled and self._is_settled(sequence.pending):
                on_settled = self._on_settled.pop(sequence)
                self._stop_waiting(sequence)
                on_settled(sequence)

    def _is_settled(self, pending: Items[PendingCopy]) -> bool:
        failed = [copy.position for copy in pending if copy.outcome is False and copy.group in self._closed_groups]
        end = min(failed, default=None)
        return all(copy.outcome is not None or (end is not None and copy.position > end) for copy in pending)

    def _stop_waiting(self, sequence: Sequence) -> None:
        unwanted: dict[_Piece, None] = {}
        for copy in sequence.pending:
            copy.waiters.remove(sequence)
            if not copy.waiters and copy.key in self._incoming:
                unwanted[self._incoming[copy.key][1]] = None
        for piece in unwanted:
            if not any(copy.waiters for copy in piece.copies):
                self._abandon(piece)
