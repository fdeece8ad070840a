"""Run a Hugging Face causal language model on a paged cache, through transformers' AttentionInterface.

All tokens of a step are flattened into one [1, tokens] input with explicit positions and no cache of transformers'
own. One attention function is registered for the process; which runner a call belongs to travels in a context
variable, so runners in several threads do not see each other. The function writes this step's K and V into the slab,
then attends over the blocks that the step's tables name.

A runner is used by one thread at a time.
"""

from __future__ import annotations

import inspect
import threading
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from allocator import ConfigError, IntegrityError, KVGeometry, UsageError
from engine_adapter.attention import AttentionBackend, AttentionSettings, get_backend
from engine_adapter.batch import StepBatch
from engine_adapter.model_geometry import geometry_from_config, refuse_model
from engine_adapter.paged_cache import PagedCache, RowIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from allocator import Slab
    from quant import BlockCodec

ATTENTION_NAME = "kvstore_paged"
"""The name under which transformers knows our attention function."""


@dataclass(slots=True)
class _Step:
    """What the attention function needs of the step that is running; per cache group a plan and a write index."""

    cache: PagedCache
    backend: AttentionBackend
    plans: tuple[Any, ...]
    writes: tuple[RowIndex, ...]
    windows: tuple[int | None, ...]
    before_layer: Callable[[int], None] | None = None
    reached: set[int] = field(default_factory=set)
    settings: AttentionSettings | None = None  # of the last layer; most models have the same for all


_running: ContextVar[_Step | None] = ContextVar("kvstore_paged_step", default=None)
_borrowed: WeakKeyDictionary[Any, tuple[str, int]] = WeakKeyDictionary()
_borrow_lock = threading.Lock()


class HFRunner:
    """A causal language model whose KV lies in a slab.

    model: a transformers model in eval mode. geometry: its KV geometry, made from its config when None (block_tokens
    then applies). backend: attention backend or its name, the best of this machine when None.

    The slab comes with `attach`, since a store is built for a geometry and the geometry comes from the model. While a
    runner holds a model, the model's own `generate` does not work; `release` gives the model back.
    Raises ConfigError for models that cannot be paged.
    """

    calls_before_layer = True

    def __init__(
        self,
        model: Any,
        *,
        geometry: KVGeometry | None = None,
        block_tokens: int = 16,
        backend: AttentionBackend | str | None = None,
    ) -> None:
        refuse_model(model)
        self.model = model
        self.device: torch.device = model.device
        self.geometry = geometry or geometry_from_config(model.config, model.dtype, block_tokens)
        if backend is None or isinstance(backend, str):
            backend = get_backend(backend, str(self.device))
        self.backend = backend
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self.position_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.cache: PagedCache | None = None
        self._layers = {layer for group in self.geometry.groups for layer in group.layers}
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._held = False
        _check_modules(model, self._layers)
        _borrow(model)
        self._held = True

    def attach(self, slab: Slab, cold_codec: BlockCodec | None = None) -> PagedCache:
        """Use this slab from now on; cold_codec decodes its INT4 slots. Returns the cache made over it."""
        self.cache = PagedCache(slab, self.geometry, cold_codec)
        if self.cache.device != self.device:
            raise ConfigError(f"the slab lies on {self.cache.device}, the model on {self.device}; expected one device")
        return self.cache

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute a step: write the KV of its tokens, return the logits asked for.

        Returns Tensor[batch.row_count, vocab] in the model's dtype, slice by slice in batch order.
        Raises UsageError for token ids or tables that do not fit; then nothing was written. IntegrityError when a
        layer of the model did not go through paged attention.
        """
        cache = self.cache
        if cache is None or not self._held:
            raise UsageError("the runner has no slab: call attach(slab) first, and not after release()")
        token_ids, positions, rows = self._flatten(batch)
        step = self._plan(cache, batch)
        kwargs: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_rows else {}
        token = _running.set(step)
        try:
            with torch.inference_mode():
                logits = self.model(input_ids=token_ids, position_ids=positions, use_cache=False, **kwargs).logits[0]
        finally:
            _running.reset(token)
        if step.reached != self._layers:
            raise IntegrityError(
                f"layers {sorted(self._layers - step.reached)} of {type(self.model).__name__} never reached the paged "
                "attention function in this step; its output cannot be trusted"
            )
        found: torch.Tensor = logits if self._keeps_rows else logits[rows]
        return found

    def release(self) -> None:
        """Give the model back: once its last runner has released it, it attends as it did before. Idempotent."""
        if self._held:
            self._held = False
            _give_back(self.model)

    def _flatten(self, batch: StepBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for part in batch:
            if min(part.token_ids) < 0 or max(part.token_ids) >= self.vocab_size:
                raise UsageError(
                    f"sequence {part.sequence_id!r} holds token ids {min(part.token_ids)}..{max(part.token_ids)}; "
                    f"the model's vocabulary is 0..{self.vocab_size - 1}"
                )
            if len(part.tables) != len(self.geometry.groups):
                raise UsageError(
                    f"sequence {part.sequence_id!r} brings {len(part.tables)} tables; "
                    f"the model has {len(self.geometry.groups)} cache groups"
                )
            token_ids.extend(part.token_ids)
            positions.extend(range(part.start, part.end))
            rows.extend(range(len(token_ids) - part.logits_count, len(token_ids)))
        tensor = torch.tensor([token_ids, positions], dtype=torch.int64, device=self.device)
        return tensor[:1], tensor[1:], torch.tensor(rows, dtype=torch.int64, device=self.device)

    def _plan(self, cache: PagedCache, batch: StepBatch) -> _Step:
        import numpy as np

        plans, writes = [], []
        for group in range(len(self.geometry.groups)):
            plans.append(self.backend.plan(cache, group, batch))
            mapping = np.concatenate([part.slot_mappings[group] for part in batch])
            writes.append(cache.write_index(group, mapping))
        windows = tuple(group.window_tokens for group in self.geometry.groups)
        return _Step(cache, self.backend, tuple(plans), tuple(writes), windows, batch.before_layer)


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer: query [1, heads, tokens, key_dim], key and value [1, kv_heads, ...].

    Returns ([1, tokens, heads, value_dim], None).
    """
    step = _running.get()
    if step is None:
        raise UsageError(
            "this model's attention belongs to a paged runner; call runner.release() before using the model itself"
        )
    if attention_mask is not None:
        raise IntegrityError("the model passed a mask to paged attention, which does its own masking")
    layer = int(module.layer_idx)
    group, _ = step.cache.place(layer)
    if layer in step.reached:
        raise IntegrityError(f"layer {layer} attends twice in one step; paging it would overwrite its own KV")
    step.reached.add(layer)
    if step.before_layer is not None:
        step.before_layer(layer)
    told = kwargs.get("sliding_window")
    if told is not None and told != step.windows[group]:
        raise ConfigError(
            f"layer {layer} attends with a window of {told} tokens; its cache group has {step.windows[group]}"
        )
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    step.cache.write(layer, step.writes[group], keys, values)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    settings = step.settings
    if settings is None or settings.scaling != scaling or settings.softcap != softcap or settings.sinks is not s_aux:
        settings = step.settings = AttentionSettings(scaling=scaling, softcap=softcap, sinks=s_aux)
    found = step.backend.attend(step.plans[group], layer, query[0].transpose(0, 1), keys, values, settings)
    return found[None], None


def _check_modules(model: Any, layers: set[int]) -> None:
    """Raise ConfigError unless exactly one causal attention module stands for each layer."""
    found: dict[int, int] = {}
    for name, module in model.named_modules():
        layer = getattr(module, "layer_idx", None)
        if layer is None or not hasattr(module, "is_causal"):
            continue
        if not module.is_causal:
            raise ConfigError(f"attention module {name} does not attend causally; it cannot be paged")
        found[int(layer)] = found.get(int(layer), 0) + 1
    if found and (set(found) != layers or max(found.values()) > 1):
        raise ConfigError(
            f"{type(model).__name__} has attention modules for layers {sorted(found)}; "
            f"the geometry expects one for each of {sorted(layers)}"
        )


def _borrow(model: Any) -> None:
    """Route the model's attention to paged_attention, remembering how it attended before."""
    from transformers import AttentionInterface

    with _borrow_lock:
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        original, count = _borrowed.get(model, (model.config._attn_implementation, 0))
        _borrowed[model] = (original, count + 1)
        if count == 0:
            model.set_attn_implementation(ATTENTION_NAME)


def _give_back(model: Any) -> None:
    with _borrow_lock:
        original, count = _borrowed[model]
        if count > 1:
            _borrowed[model] = (original, count - 1)
            return
        del _borrowed[model]
        model.set_attn_implementation(original)
