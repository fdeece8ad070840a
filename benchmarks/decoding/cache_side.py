"""transformers' own caches as a side of the `decode` suite: a batched decode step over `DynamicCache` and its kin.

Imports torch and transformers only, so that it also runs in a peer's environment.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch


def cache_argument(model: Any) -> str:
    """How a model's forward calls its cache: transformers 5.24 changed the name, and warns of the old one."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class PreparedContext(Protocol):
    """What is needed of a recording: see `benchmarks.decoding.recording.Recording`."""

    @property
    def continuation(self) -> list[int]: ...

    @property
    def keys(self) -> Sequence[torch.Tensor]: ...

    @property
    def values(self) -> Sequence[torch.Tensor]: ...


@contextmanager
def _heads_as_rows(chosen: bool) -> Iterator[None]:
    """transformers' SDPA with the query heads of a KV head packed as rows, instead of enable_gqa.

    Both are its own code. It takes enable_gqa where there is no mask, which is several times slower on a CPU; a
    baseline gets the faster one. Does nothing where this version of transformers has no such choice.
    """
    from transformers.integrations import sdpa_attention

    choice = getattr(sdpa_attention, "use_gqa_in_sdpa", None)
    if choice is None or not chosen:
        yield
        return
    sdpa_attention.use_gqa_in_sdpa = lambda *_, **__: False
    try:
        yield
    finally:
        sdpa_attention.use_gqa_in_sdpa = choice


TRIAL_STEPS = 4
"""Steps that the first call of `CacheSide.decode` takes beyond those asked for."""


class CacheSide:
    """`model` (with an attention of transformers' own) over `cache`, filled with the contexts of `sequences`.

    The contexts are of one length, so that the batch has no padding. Each step feeds the next token of each
    continuation and takes the argmax, as a greedy loop does. The first call tries both forms of transformers' SDPA,
    two steps each; the faster one stays.
    """

    def __init__(self, model: Any, cache: Any, sequences: Sequence[PreparedContext]) -> None:
        self._model = model
        self._cache = cache
        self._continuations = torch.tensor([one.continuation for one in sequences])
        self._fed = 0
        self.heads_as_rows: bool | None = None
        self._cache_argument = cache_argument(model)
        self.keep: Callable[[int, torch.Tensor], None] | None = None
        with torch.inference_mode():
            for layer in range(len(sequences[0].keys)):
                keys = torch.stack([one.keys[layer] for one in sequences])
                values = torch.stack([one.values[layer] for one in sequences])
                cache.update(keys, values, layer)

    def decode(self, steps: int) -> float:
        """Wall seconds of one decode step, averaged over `steps`. The first call also chooses the form."""
        if self.heads_as_rows is None:
            tried = [(self._decode(1, packed), packed) for packed in (False, True, False, True)]
            self.heads_as_rows = min(tried[2:])[1]  # the first of each pays for warming up
        return self._decode(steps, self.heads_as_rows)

    def _decode(self, steps: int, heads_as_rows: bool) -> float:
        with _heads_as_rows(heads_as_rows):
            return self._feed(steps)

    def _feed(self, steps: int) -> float:
        seconds = 0.0
        for _ in range(steps):
            token_ids = self._continuations[:, self._fed : self._fed + 1]
            started = time.perf_counter()
            with torch.inference_mode():
                logits = self._model(**{self._cache_argument: self._cache}, input_ids=token_ids, use_cache=True).logits
                logits = logits[:, -1]
                logits.argmax(-1).tolist()
            seconds += time.perf_counter() - started
            self._fed += 1
            if self.keep is not None:
                for number, row in enumerate(logits):
                    self.keep(number, row)
        return seconds / steps
