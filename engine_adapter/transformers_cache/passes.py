"""One forward pass over the rows of a cache: where its KV is written, and what each layer has to see.

Everything that is the same for all layers of a cache group is worked out once, when the pass begins. Used by the
thread that runs the model; lives as long as the pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from allocator import ConfigError, GroupKind, UsageError
from engine_adapter.batch import Int64Array, SequenceSlice, StepBatch
from engine_adapter.paged_function import PagedPass

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_adapter.attention import AttentionBackend
    from engine_adapter.paged_cache import PagedCache, RowIndex
    from engine_adapter.transformers_cache.rows import Row
    from kvstore import KVStore


@dataclass(frozen=True, slots=True)
class _Read:
    """What the layers of a group see: per row its entries, the first block's first token, and the tokens [low, high).

    columns: width of the result. shifts: per row, the result's column of token 0. full: set when one gather serves.
    """

    entries: tuple[Int64Array, ...]
    starts: tuple[int, ...]
    lows: tuple[int, ...]
    highs: tuple[int, ...]
    shifts: tuple[int, ...]
    columns: int
    full: RowIndex | None


class ForwardPass(PagedPass):
    """rows: with the pass's tokens already counted in. fed: tokens of each row in this pass. columns: past and new.

    backend: of paged attention, None where the model attends by itself. sources: layers that reuse another's KV.
    """

    def __init__(
        self,
        store: KVStore,
        cache: PagedCache,
        rows: list[Row],
        fed: list[int],
        columns: tuple[int, int],
        backend: AttentionBackend | None,
        sources: Mapping[int, int],
    ) -> None:
        super().__init__(cache, sources)
        self.past_columns, self.new_columns = columns
        self.fed_tokens = sum(fed)
        self.began_seconds = time.perf_counter()
        self.reached: set[int] = set()
        self._awaited: int | None = None  # layer whose attention comes next, in paged attention
        self._latent: torch.Tensor | None = None  # of the awaited layer: Tensor[rows, 1, columns, latent and rope]
        self._batch = len(rows)
        alive = [(row, count) for row, count in zip(rows, fed, strict=True) if count]
        self.places = self._places(fed)
        slices = [_slice(store, row, count) for row, count in alive]
        self._writes = []
        for group in range(len(self.windows)):
            mapping = np.concatenate([part.slot_mappings[group] for part in slices])
            self._writes.append(cache.write_index(group, mapping))
        self.backend = backend
        self._reads: list[_Read | None] = []
        if backend is not None:
            batch = StepBatch(tuple(slices))
            self.plans = tuple(backend.plan(cache, group, batch) for group in range(len(self.windows)))
        else:
            tables = [None if row.sequence_id is None else store.tables(row.sequence_id) for row in rows]
            self._reads = [self._read(group, rows, tables) for group in range(len(self.windows))]

    def kind_of(self, layer: int) -> GroupKind:
        return self.cache.geometry.groups[self.cache.place(layer)[0]].kind

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | Any]:
        """Write one layer's KV, Tensor[rows, kv_heads, columns, dim] each; returns what the layer has to see."""
        if tuple(keys.shape[:3:2]) != (self._batch, self.new_columns):
            raise ConfigError(
                f"layer {layer} brings keys {list(keys.shape)}; "
                f"expected {self._batch} rows of {self.new_columns} tokens"
            )
        if keys.dtype != self.cache.dtype:
            raise ConfigError(f"layer {layer} brings KV of {keys.dtype}; the store keeps {self.cache.dtype}")
        group, _ = self.cache.place(layer)
        self.cache.write(layer, self._writes[group], self.flat(keys), None if values is None else self.flat(values))
        self._awaited, self._latent = layer, keys if values is None else None
        if self.backend is not None or not self.past_columns:
            return keys, values
        read = self._reads[group]
        assert read is not None
        return self._gather(layer, read, keys, values)

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        if self._awaited != layer:
            raise UsageError(f"layer {layer} attends, but has not updated the cache just before")
        self._awaited = None
        return self._latent

    def reuse(self, layer: int) -> None:
        """Nothing to do: the cache knows nothing of such layers."""

    def flat(self, states: torch.Tensor) -> torch.Tensor:
        """Tensor[rows, heads, columns, dim] -> Tensor[tokens, heads, dim], padding left out."""
        flat = states[0].transpose(0, 1) if self._batch == 1 else states.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def unflat(self, found: torch.Tensor) -> torch.Tensor:
        """Tensor[tokens, heads, dim] -> Tensor[rows, columns, heads, dim], zeros where there is padding."""
        shape = (self._batch, self.new_columns, *found.shape[1:])
        if self.places is None:
            return found.reshape(shape)
        spread = found.new_zeros((self._batch * self.new_columns, *found.shape[1:]))
        spread[self.places] = found
        return spread.view(shape)

    def _places(self, fed: list[int]) -> torch.Tensor | None:
        """Which of the pass's rows x columns hold a token: int64[tokens]; None for all."""
        columns = self.new_columns
        if min(fed) == columns:
            return None
        grid = np.arange(columns)[None, :] >= columns - np.array(fed)[:, None]
        return self.cache.tensor(np.flatnonzero(grid))

    def _read(self, group: int, rows: list[Row], tables: list[Any]) -> _Read | None:
        if not self.past_columns:
            return None
        size, window = self.cache.geometry.block_tokens, self.windows[group]
        first = 0 if window is None else max(self.past_columns - window + 1, 0)
        entries, starts, lows, highs, shifts = [], [], [], [], []
        for row, table in zip(rows, tables, strict=True):
            low, high = max(0, first - row.pad), len(row.ids)
            block = low // size
            found = np.empty(0, np.int64) if table is None else table[group][block : -(-high // size)]
            entries.append(np.asarray(found, np.int64))
            starts.append(block * size)
            lows.append(low)
            highs.append(high)
            shifts.append(row.pad - first)
        columns = self.past_columns + self.new_columns - first
        even = all(low == lows[0] and high - low == columns for low, high in zip(lows, highs, strict=True))
        full = None
        if even and not any((found & 1).any() for found in entries):
            full = self.cache.full_index(group, self.cache.tensor(np.stack(entries) >> 1))
        return _Read(tuple(entries), tuple(starts), tuple(lows), tuple(highs), tuple(shifts), columns, full)

    def _gather(
        self, layer: int, read: _Read, keys: torch.Tensor, values: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if read.full is not None:
            found_keys, found_values = self.cache.read_full(layer, read.full, (self._batch, len(read.entries[0])))
            part = slice(read.lows[0] - read.starts[0], read.highs[0] - read.starts[0])
            return found_keys[:, :, part], None if values is None else found_values[:, :, part]
        found_keys, found_values = self.cache.gather_batch(layer, read.entries)
        seen = self._align(found_keys, read, keys)
        return seen, None if values is None else self._align(found_values, read, values)

    def _align(self, found: torch.Tensor, read: _Read, like: torch.Tensor) -> torch.Tensor:
        """Put every row's tokens at its columns: Tensor[rows, kv_heads, columns, dim], zeros where there is padding."""
        seen = like.new_zeros((self._batch, found.shape[1], read.columns, found.shape[3]))
        for row in range(self._batch):
            low, high, shift = read.lows[row], read.highs[row], read.shifts[row]
            start = read.starts[row]
            seen[row, :, low + shift : high + shift] = found[row, :, low - start : high - start]
        return seen


def _slice(store: KVStore, row: Row, count: int) -> SequenceSlice:
    assert row.sequence_id is not None
    start = len(row.ids) - count
    return SequenceSlice(
        sequence_id=row.sequence_id,
        token_ids=tuple(row.ids[start:]),
        start=start,
        logits_count=0,
        tables=store.tables(row.sequence_id),
        slot_mappings=tuple(
            store.slot_mapping(row.sequence_id, group, start, count) for group in range(len(store.geometry.groups))
        ),
    )
