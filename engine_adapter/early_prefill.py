"""Computing a prompt's first chunk while the tokens before it are still on their way, layer by layer.

The rules: such a chunk is a step of its own, of one stream, and only where the loop has nothing else to do, since it
waits inside the model for each layer: no decode step waits with it. Nothing of it is committed before the load has
ended with every token that was expected; otherwise it is thrown away, its room too, and computed again behind what did
arrive. One attempt a load. Called by the decode loop's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from allocator.errors import CapacityError
from engine_adapter.batch import SequenceSlice, SliceError, StepBatch
from engine_adapter.scheduler import Phase, PlannedSlice, Scheduler, Stream

if TYPE_CHECKING:
    from engine_adapter.adapter import StoreAdapter


class _LayerMissingError(Exception):
    """Ends a step inside the model: a layer is late, or does not come."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """start: where its tokens stand. logits: None where the attempt failed."""

    part: PlannedSlice
    start: int
    logits: Tensor | None


class EarlyPrefill:
    """forward: the runner's. slice_of: (part, start) -> the slice with its tables and places."""

    def __init__(
        self,
        adapter: StoreAdapter,
        scheduler: Scheduler,
        forward: Callable[[StepBatch], Tensor],
        slice_of: Callable[[PlannedSlice, int], SequenceSlice],
        step_tokens: int,
    ) -> None:
        self._adapter, self._scheduler = adapter, scheduler
        self._forward, self._slice_of = forward, slice_of
        self._step_tokens = step_tokens
        self._layer_end = 1 + max(layer for group in adapter.store.geometry.groups for layer in group.layers)
        self._chunks: dict[Stream, _Chunk] = {}

    def compute(self) -> int:
        """Compute the chunk of the oldest loading stream of which a layer has arrived; its tokens."""
        store = self._adapter.store
        for stream in self._scheduler.loading:
            if stream in self._chunks:
                continue
            state = store.fetch(stream.sequence_id)
            if not state.done and 0 < state.layers_ready < self._layer_end:  # all: the load ends with the next step
                return self._compute(stream, state.expected_tokens)
        return 0

    def _compute(self, stream: Stream, start: int) -> int:
        count = min(self._step_tokens, len(stream.tokens) - start)
        part = PlannedSlice(stream, stream.tokens[start : start + count], 0, int(start + count == len(stream.tokens)))
        self._chunks[stream] = _Chunk(part, start, None)
        end = time.monotonic() + self._adapter.store.config.fetch_deadline_seconds

        def before_layer(layer: int) -> None:
            if not self._adapter.wait_layer(stream.sequence_id, layer, max(0.0, end - time.monotonic())):
                raise _LayerMissingError

        try:
            self._adapter.allocate(stream.sequence_id, count)
        except CapacityError:
            return 0
        done = False
        try:
            logits = self._forward(StepBatch((self._slice_of(part, start),), before_layer))
            self._chunks[stream] = _Chunk(part, start, logits)
            done = True
        except (_LayerMissingError, SliceError):  # refused again, and ended, once it runs
            return 0
        finally:
            if not done:
                self._adapter.rollback(stream.sequence_id, count)
        return count

    def take(self) -> Iterator[tuple[PlannedSlice, Tensor]]:
        """Chunks, and their logits, whose load has ended well, each once; others that load no more are forgotten."""
        for stream, chunk in list(self._chunks.items()):
            if stream.phase is not Phase.LOADING:
                del self._chunks[stream]
                if stream.phase is Phase.RUNNING and stream.computed == chunk.start and chunk.logits is not None:
                    yield chunk.part, chunk.logits
