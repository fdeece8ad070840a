"""Blocks out of vLLM's pages into the tiers: copied at once, encoded and written behind that.

`save` and `before_step` come from vLLM's worker; encoding runs on a thread of its own, writing on the tiers'. On a card
the copy is enqueued behind the step that filled the blocks, the thread waits for its end, and the next step's writes
come after it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from allocator import COLD, FULL
from engine_adapter.vllm_connector.copier import DONE
from kvstore.executor import ThreadExecutor
from kvstore.staging import Staging

if TYPE_CHECKING:
    from engine_adapter.tiers_below import TiersBelow
    from engine_adapter.vllm_connector.copier import Copier, Fence
    from engine_adapter.vllm_connector.forms import Forms
    from engine_adapter.vllm_connector.layout import PagesShape
    from engine_adapter.vllm_connector.orders import SaveOrder, Tables
    from engine_adapter.vllm_connector.shards import ShardResidency
    from kvstore.tier import ByteRow, CopyKey, ResultCode, Tier

_LOG = logging.getLogger(__name__)
_CHUNK_BLOCKS = 32


@dataclass(frozen=True, slots=True)
class _Save:
    """raw_key: under which a block is stored whose values the codec cannot carry."""

    key: CopyKey
    raw_key: CopyKey
    parent: bytes | None
    tables: Tables
    position: int


@dataclass(slots=True)
class _Chunk:
    """Staging buffers that `tiers` read from: given back when the last of them has ended."""

    tiers: Sequence[Tier]
    rows: list[ByteRow] = field(default_factory=list)
    readers: int = 1

    @property
    def size_bytes(self) -> int:
        return sum(row.nbytes for row in self.rows)


class Saver:
    """staging_bytes: most that waits to be written, half of it for one slow tier."""

    def __init__(
        self, below: TiersBelow, residency: ShardResidency, forms: Forms, staging_bytes: int, copier: Copier
    ) -> None:
        self._below = below
        self._residency = residency
        self._forms = forms
        self._copier = copier
        self._last_fence: Fence = DONE
        self.staging = Staging(staging_bytes, copier.row)
        self._chunk_count = 0
        self._under_way_bytes: Counter[str] = Counter()
        is_all_at_once = forms.codec is None and copier.is_immediate
        self._encoder = None if is_all_at_once else ThreadExecutor("kvstore-vllm-encode")

    @property
    def is_idle(self) -> bool:
        """Nothing is on its way to a tier."""
        with self._below.lock:
            return not self._chunk_count

    def save(self, orders: Sequence[SaveOrder], groups: Sequence[PagesShape]) -> None:
        """Copy blocks out of vLLM's pages as they are after the last step, and have them written."""
        self._copier.mark()
        for group, pages in enumerate(groups):
            if not self._tiers_of(group):
                continue
            for cold in (False, True):
                wanted = [one for one in self._wanted(orders, group, pages) if (one.key != one.raw_key) is cold]
                for at in range(0, len(wanted), _CHUNK_BLOCKS):
                    self._save_chunk(group, pages, wanted[at : at + _CHUNK_BLOCKS], cold)

    def before_step(self) -> None:
        """vLLM is about to write to pages that blocks may still be copied out of."""
        self._copier.hold(self._last_fence)

    def close(self) -> None:
        if self._encoder is not None:
            self._encoder.close()

    def _tiers_of(self, group: int) -> Sequence[Tier]:
        """Where this rank stores: what all ranks have goes to shared tiers once, and to each rank's own memory."""
        is_stored = self._residency.shards[group].is_stored
        return [tier for tier in self._below.tiers if is_stored or tier.private_memory]

    def _wanted(self, orders: Sequence[SaveOrder], group: int, pages: PagesShape) -> list[_Save]:
        """What some tier lacks, of what vLLM still has."""
        found: dict[CopyKey, _Save] = {}
        for order in orders:
            raw_keys, keys = self._keys(order, group)
            with self._below.lock:
                flags = [tier.contains(keys) for tier in self._tiers_of(group)]
            parents = [order.parent, *order.hashes]
            for index, key in enumerate(keys):
                position = order.start + index
                if not all(flag[index] for flag in flags) and pages.is_there(order.tables, position):
                    one = _Save(key, raw_keys[index], parents[index], order.tables, position)
                    found.setdefault(key, one)
        return list(found.values())

    def _keys(self, order: SaveOrder, group: int) -> tuple[list[CopyKey], list[CopyKey]]:
        """Keys of raw copies, and of the form that is wanted: a prompt's first block is never encoded."""
        first = order.hashes[0]
        raw, cold = (self._residency.copy_key(order.root, group, first, form, order.is_exact) for form in (FULL, COLD))
        raw_keys = raw.with_hashes(order.hashes)
        if order.is_raw or self._forms.codec is None:
            return raw_keys, raw_keys
        keys = cold.with_hashes(order.hashes)
        return raw_keys, [*raw_keys[:1], *keys[1:]] if order.start == 0 else keys

    def _save_chunk(self, group: int, pages: PagesShape, saves: Sequence[_Save], cold: bool) -> None:
        chunk = _Chunk(self._tiers_of(group))
        payload_bytes = self._forms.payload_bytes(group, COLD, self._forms.own[group])
        sizes = [_CHUNK_BLOCKS * pages.block_bytes, _CHUNK_BLOCKS * payload_bytes][: 2 if cold else 1]
        try:
            with self._below.lock:
                chunk.rows = self._take(sizes)
                self._chunk_count += bool(chunk.rows)
        except (MemoryError, RuntimeError):  # the system's or, for pinned memory, the card's refusal
            _LOG.exception("kvstore: no memory for blocks of vLLM")
            return self._below.count("saves_failed", len(saves))
        if not chunk.rows:
            return self._below.count("saves_dropped_staging", len(saves))
        row = chunk.rows[0]
        try:
            fence = self._copier.gather(pages, [(one.tables, one.position) for one in saves], row)
        except Exception:  # the engine goes on without these copies
            _LOG.exception("kvstore: blocks of vLLM could not be copied")
            return self._fail(chunk, saves)
        self._last_fence = fence
        if self._encoder is None or (not cold and self._copier.is_immediate):
            self._put(chunk, [self._item(one.key, one, row, index) for index, one in enumerate(saves)])
        else:
            self._encoder.submit(partial(self._finish, group, chunk, saves, fence))
        self._below.drain()

    def _take(self, sizes: Sequence[int]) -> list[ByteRow]:
        """A staging buffer of each size; none at all where one has no room."""
        rows: list[ByteRow] = []
        try:
            while len(rows) < len(sizes) and (row := self.staging.take(sizes[len(rows)])) is not None:
                rows.append(row)
            return rows if len(rows) == len(sizes) else []
        finally:
            if len(rows) < len(sizes):
                for row in rows:
                    self.staging.give_back(row)

    def _finish(self, group: int, chunk: _Chunk, saves: Sequence[_Save], fence: Fence) -> None:
        """When the copy is there."""
        try:
            fence.wait()
        except Exception:  # a card that fails: its blocks are no copies; the executor logs what it was
            self._fail(chunk, saves)
            raise
        if len(chunk.rows) > 1:
            return self._encode(group, chunk, saves)
        self._put(chunk, [self._item(one.key, one, chunk.rows[0], index) for index, one in enumerate(saves)])

    def _encode(self, group: int, chunk: _Chunk, saves: Sequence[_Save]) -> None:
        row, encoded = chunk.rows
        size = encoded.nbytes // _CHUNK_BLOCKS
        try:
            accepted = self._forms.encode(group, row, len(saves), encoded[: len(saves) * size])
        except Exception:  # its blocks are no copies; the executor logs what it was
            self._fail(chunk, saves)
            raise
        items = [
            self._item(one.key, one, encoded, index) if accepted[index] else self._item(one.raw_key, one, row, index)
            for index, one in enumerate(saves)
        ]
        self._below.count("blocks_too_lossy", accepted.count(False))
        if all(accepted):
            with self._below.lock:
                self.staging.give_back(chunk.rows.pop(0))
        self._put(chunk, items)

    def _item(self, key: CopyKey, save: _Save, row: ByteRow, index: int) -> tuple[CopyKey, list[ByteRow], bytes | None]:
        size = row.nbytes // _CHUNK_BLOCKS
        return key, [row[index * size : (index + 1) * size]], save.parent

    def _put(self, chunk: _Chunk, items: Sequence[tuple[CopyKey, list[ByteRow], bytes | None]]) -> None:
        with self._below.lock:
            for tier in chunk.tiers:
                waiting = self._under_way_bytes[tier.name]
                size = chunk.size_bytes
                if not tier.private_memory and waiting and waiting + size > self.staging.limit_bytes // 2:
                    self._below.count(f"saves_dropped_{tier.name}", len(items))
                    continue
                chunk.readers += 1
                self._under_way_bytes[tier.name] += size
                self._below.begin(partial(tier.submit_put, items), partial(self._end_put, tier, chunk, size))
            self._below.count("saved_blocks", len(items))
            self._end(chunk)

    def _end_put(self, tier: Tier, chunk: _Chunk, size: int, results: Sequence[ResultCode]) -> None:
        self._under_way_bytes[tier.name] -= size
        self._end(chunk)

    def _fail(self, chunk: _Chunk, saves: Sequence[_Save]) -> None:
        """Counted, and its buffers are free again."""
        with self._below.lock:
            self._below.count("saves_failed", len(saves))
            self._end(chunk)

    def _end(self, chunk: _Chunk) -> None:
        chunk.readers -= 1
        if not chunk.readers:
            self._chunk_count -= 1
            for row in chunk.rows:
                self.staging.give_back(row)
