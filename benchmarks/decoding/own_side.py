"""Our decode loop as a side of the `decode` suite: sequences with a prepared context, then decode steps.

`Clock` splits a step in two: transformers' forward with attention, and the loop's own work (everything else).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.decoding.recording import RecordedRunner, Recording
from benchmarks.rows import Stopwatch
from engine_adapter.attention import get_backend
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.paged_function import ATTENTION_NAME, paged_attention
from engine_adapter.request import Request
from engine_adapter.runner import HFRunner
from kvstore import Identity, KVStore, KVStoreConfig

BLOCK_TOKENS = 16
_COOL_BLOCKS_A_STEP = 128
_SETTLE_SECONDS = 120.0


@dataclass(slots=True)
class Clock:
    """Seconds inside the model, and inside it: in our attention function, and in the backend's `attend`."""

    model_seconds: float = 0.0
    function_seconds: float = 0.0
    attend_seconds: float = 0.0

    def own_seconds(self, step_seconds: float) -> float:
        """A step without transformers' forward and attention: scheduling, tables, plans, KV writes, sampling."""
        return step_seconds - self.model_seconds + (self.function_seconds - self.attend_seconds)


class _TimedModel:
    """The model, its calls timed."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self.model, self.clock = model, clock

    def __call__(self, **arguments: Any) -> Any:
        started = time.perf_counter()
        found = self.model(**arguments)
        self.clock.model_seconds += time.perf_counter() - started
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


class _TimedBackend:
    """An attention backend, its `attend` timed; `plan` is the loop's own work."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.name: str = backend.name
        self.plan = backend.plan
        self.clock = Clock()

    def attend(self, *arguments: Any) -> Any:
        started = time.perf_counter()
        found = self.backend.attend(*arguments)
        self.clock.attend_seconds += time.perf_counter() - started
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


class OwnSide:
    """`DecodeLoop` over `model`, with one sequence for each of `recordings`.

    codec: "int4" for cold blocks read in place, "raw" for full precision. sequences: recording of each. The blocks of
    two sequences are never shared: their first tokens are made to differ (their keys and values are the recording's).
    """

    def __init__(self, model: Any, name: str, codec: str, sequences: Sequence[Recording], new_tokens: int) -> None:
        self.backend = _TimedBackend(get_backend())
        self.runner = HFRunner(model, block_tokens=BLOCK_TOKENS, backend=self.backend)
        geometry = self.runner.geometry
        tokens = sum(one.token_count + new_tokens + 2 * BLOCK_TOKENS for one in sequences)
        config = KVStoreConfig(
            device_bytes=int(1.25 * tokens * geometry.token_bytes) + (8 << 20),
            codec=codec,
            cool_blocks_per_step=_COOL_BLOCKS_A_STEP,
            cool_under_pressure=False,
        )
        self.store = KVStore(geometry, Identity(model=name, weights="bench", geometry=geometry), config)
        assert self.store.slab is not None
        self.runner.attach(self.store.slab, self.store.cold_codec)
        self._recorded = RecordedRunner(self.runner)
        prompts = sum(one.token_count for one in sequences)
        self.loop = DecodeLoop(
            self._recorded, self.store, max_batch_sequences=len(sequences), step_tokens=prompts + len(sequences)
        )
        self.sequence_count = len(sequences)
        self.keep: Callable[[int, torch.Tensor], None] | None = None
        self._prepare(sequences, new_tokens)

    def _prepare(self, sequences: Sequence[Recording], new_tokens: int) -> None:
        for number, recording in enumerate(sequences):
            self._recorded.assigned[str(number)] = recording
            prompt = [number, *recording.token_ids[1:]]
            forced = recording.continuation[: new_tokens + 1]
            self.loop.submit(
                Request(str(number), prompt, len(forced), forced_token_ids=forced, keep_logits=self._keeper(number))
            )
        outcome = self.loop.step()
        if outcome.output_tokens != len(sequences):
            raise RuntimeError(f"the first step put out {outcome.output_tokens} tokens, expected {len(sequences)}")
        self._let_cool()

    def _keeper(self, number: int) -> Callable[[int, int, torch.Tensor], None]:
        def keep(_branch: int, position: int, logits: torch.Tensor) -> None:
            if self.keep is not None and position:  # the first token follows the recorded prompt
                self.keep(number, logits)

        return keep

    def _let_cool(self) -> None:
        """Give the store the steps in which it encodes what is old enough, as a long prefill would."""
        quiet, started = 0, time.perf_counter()
        while quiet < 3:
            quiet = 0 if self.store.step().cooled_blocks else quiet + 1
            self.store.wait(2.0)
            if time.perf_counter() - started > _SETTLE_SECONDS:
                raise RuntimeError(f"cooling has not ended after {_SETTLE_SECONDS:.0f} s")

    def cold_share(self) -> float:
        """Share of the blocks that lie in INT4."""
        entries = torch.cat([torch.from_numpy(self.store.tables(name)[0]) for name in self.store.sequence_ids()])
        return float((entries & 1).double().mean())

    def decode(self, steps: int) -> float:
        """Wall seconds of one decode step, averaged over `steps`."""
        return self._steps(steps) / steps

    def decode_split(self, steps: int) -> tuple[float, float]:
        """(wall seconds, the loop's own seconds) of one decode step, averaged over `steps`."""
        with self._timed() as clock:
            seconds = self._steps(steps)
        return seconds / steps, clock.own_seconds(seconds) / steps

    def _steps(self, steps: int) -> float:
        watch = Stopwatch()
        with watch:
            for _ in range(steps):
                outcome = self.loop.step()
                if outcome.output_tokens != self.sequence_count:
                    raise RuntimeError(
                        f"a step put out {outcome.output_tokens} tokens, expected {self.sequence_count}: "
                        "the prepared continuation is used up"
                    )
        return watch.seconds

    @contextmanager
    def _timed(self) -> Iterator[Clock]:
        from transformers import AttentionInterface

        clock = Clock()
        model = self.runner.model

        def timed_attention(*arguments: Any, **settings: Any) -> Any:
            started = time.perf_counter()
            found = paged_attention(*arguments, **settings)
            clock.function_seconds += time.perf_counter() - started
            return found

        self.backend.clock = clock
        self.runner.model = _TimedModel(model, clock)
        AttentionInterface.register(ATTENTION_NAME, timed_attention)
        try:
            yield clock
        finally:
            AttentionInterface.register(ATTENTION_NAME, paged_attention)
            self.runner.model = model
            self.backend.clock = Clock()

    def close(self) -> None:
        """Give the model and the memory back."""
        self.runner.release()
        self.store.close()
