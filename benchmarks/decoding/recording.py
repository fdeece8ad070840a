"""Contexts that are ready at once: keys and values of a prompt, computed or drawn, written where a cache wants them.

A context is prefilled once by the model itself (or drawn, where only speed counts) and then copied into every
sequence's own blocks, so that a bench of eight sequences does not begin with eight prefills a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.decoding.cache_side import cache_argument

if TYPE_CHECKING:
    from allocator import KVGeometry, Slab
    from engine_adapter.batch import StepBatch
    from engine_adapter.runner import HFRunner

_PREFILL_CHUNK_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class Recording:
    """A prompt of one cache group's model, and what follows it.

    token_ids: the prompt. continuation: tokens to feed after it.
    keys, values: one Tensor[kv_heads, tokens, dim] a layer.
    """

    token_ids: list[int]
    continuation: list[int]
    keys: Sequence[torch.Tensor]
    values: Sequence[torch.Tensor]

    @property
    def token_count(self) -> int:
        return len(self.token_ids)


def recorded(model: Any, token_ids: Sequence[int], context_tokens: int) -> Recording:
    """The first `context_tokens` tokens prefilled by `model` (transformers' own cache); the rest continues them."""
    from transformers import DynamicCache

    cache, argument = DynamicCache(config=model.config), cache_argument(model)
    with torch.inference_mode():
        for start in range(0, context_tokens, _PREFILL_CHUNK_TOKENS):
            piece = torch.tensor([list(token_ids[start : min(start + _PREFILL_CHUNK_TOKENS, context_tokens)])])
            model(**{argument: cache}, input_ids=piece, use_cache=True, logits_to_keep=1)
    return Recording(
        list(token_ids[:context_tokens]),
        list(token_ids[context_tokens:]),
        [layer.keys[0] for layer in cache.layers],
        [layer.values[0] for layer in cache.layers],
    )


def drawn(geometry: KVGeometry, context_tokens: int, new_tokens: int, vocab_size: int, seed: int) -> Recording:
    """Random keys and values of unit variance: for speed only. One pair of tensors stands for all layers."""
    generator = torch.Generator().manual_seed(seed)
    group = geometry.groups[0]
    dtype = getattr(torch, geometry.dtype)
    keys = torch.randn((group.kv_heads, context_tokens, group.key_dim), generator=generator).to(dtype)
    values = torch.randn((group.kv_heads, context_tokens, group.value_dim), generator=generator).to(dtype)
    tokens = torch.randint(0, vocab_size, (context_tokens + new_tokens,), generator=generator).tolist()
    count = len(group.layers)
    return Recording(tokens[:context_tokens], tokens[context_tokens:], [keys] * count, [values] * count)


class RecordedRunner:
    """A `Runner` whose prefill copies a recording; every other step is the real runner's.

    inner: the paged runner, with its slab attached. assigned: the recording of each sequence, by sequence id.
    """

    def __init__(self, inner: HFRunner) -> None:
        self.inner = inner
        self.assigned: dict[str, Recording] = {}
        self.geometry = inner.geometry
        self.vocab_size = inner.vocab_size
        self.position_limit = inner.position_limit

    @property
    def slab(self) -> Slab | None:
        return self.inner.slab

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See `engine_adapter.Runner`. A step prefills or decodes, never both."""
        if all(part.token_count == 1 for part in batch):
            return self.inner.forward(batch)
        cache = self.inner.cache
        assert cache is not None
        (group,) = self.geometry.groups
        for part in batch:
            recording = self.assigned[part.sequence_id]
            if part.end > recording.token_count:
                raise RuntimeError(f"sequence {part.sequence_id!r} computes beyond its recording in a prefill step")
            index = cache.write_index(0, part.slot_mappings[0])
            for layer, keys, values in zip(group.layers, recording.keys, recording.values, strict=True):
                span = slice(part.start, part.end)
                cache.write(layer, index, keys[:, span].transpose(0, 1), values[:, span].transpose(0, 1))
        return torch.zeros((batch.row_count, self.vocab_size))
