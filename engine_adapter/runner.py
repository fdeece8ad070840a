"""Run a Hugging Face causal language model on a paged cache, through transformers' AttentionInterface.

All tokens of a step are flattened into one [1, tokens] input with explicit positions and no cache of transformers'
own. The attention function (engine_adapter.paged_function) writes this step's K and V into the slab, or the latents
that the model keeps instead, then attends over the blocks that the step's tables name.

A runner is used by one thread at a time.
"""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from allocator import ConfigError, GroupKind, IntegrityError, KVError, KVGeometry, Slab, UsageError
from engine_adapter.attention import AttentionBackend, get_backend
from engine_adapter.batch import SliceError, StepBatch
from engine_adapter.model_geometry import (
    bare_model,
    geometry_from_config,
    kv_sources,
    refuse_media,
    refuse_model,
    refuse_state,
)
from engine_adapter.paged_cache import PagedCache
from engine_adapter.paged_function import PagedPass, borrow, current_pass, give_back, refuse_latents
from engine_adapter.releases import TRANSFORMERS
from engine_adapter.weights_watch import WeightsWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.identity import Adapter
    from quant import BlockCodec


class _Step(PagedPass):
    """A step of a runner: all its tokens are one row. `reached`: layers that have attended."""

    def __init__(
        self, cache: PagedCache, backend: AttentionBackend, sources: Mapping[int, int], batch: StepBatch
    ) -> None:
        super().__init__(cache, sources)
        self.backend = backend
        groups = range(len(cache.geometry.groups))
        self.plans = tuple(backend.plan(cache, group, batch) for group in groups)
        self._writes = tuple(
            cache.write_index(group, np.concatenate([part.slot_mappings[group] for part in batch])) for group in groups
        )
        self._before_layer = batch.before_layer
        self._latents: dict[int, torch.Tensor] = {}
        self.reached: set[int] = set()

    def keep_latent(self, layer: int, latent: torch.Tensor) -> None:
        """latent: Tensor[1, 1, tokens, latent and rope]. The layer attends next."""
        self._latents = {layer: latent}

    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        self.reuse(layer)
        if self._before_layer is not None:
            self._before_layer(layer)
        group, _ = self.cache.place(layer)
        latent = self._latents.get(layer)
        if (latent is not None) != (self.cache.geometry.groups[group].kind is GroupKind.LATENT):
            raise IntegrityError(f"layer {layer} attends to {'a latent' if latent is not None else 'no latent'}")
        if latent is None:
            self.cache.write(layer, self._writes[group], self.flat(key), self.flat(value))
        else:
            self.cache.write(layer, self._writes[group], self.flat(latent), None)
        return latent

    def reuse(self, layer: int) -> None:
        if layer in self.reached:
            raise IntegrityError(f"layer {layer} attends twice in one step; paging it would overwrite its own KV")
        self.reached.add(layer)

    def flat(self, states: torch.Tensor) -> torch.Tensor:
        return states[0].transpose(0, 1)

    def unflat(self, found: torch.Tensor) -> torch.Tensor:
        return found[None]


class _Latents:
    """What a model with latents is given as its cache: it hands them to the step before it expands them."""

    def __init__(self, step: _Step) -> None:
        self._step = step

    def update(
        self, latent: torch.Tensor, rope: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._step.keep_latent(layer_idx, torch.cat((latent, rope), -1))
        return latent, rope

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class HFRunner:
    """A causal language model whose KV lies in a slab.

    model: a transformers model in eval mode. geometry: its KV geometry, made from its config when None (block_tokens
    then applies). backend: attention backend or its name, the best of this machine when None. use_adapter: makes the
    model compute with an adapter, or (None) without; a step with several is one pass for each. A model that carries
    adapters (PEFT's) needs it: nothing else would tell their KV from the plain model's.

    The slab comes with `attach`, since a store is built for a geometry and the geometry comes from the model. While a
    runner holds a model, the model's own `generate` does not work; `release` gives the model back.
    Raises ConfigError for models that cannot be paged. A model that is converted later (`half`, `to`) is refused in the
    next step; weights that change where they lie are not noticed: see KVStore.reset.
    """

    calls_before_layer = True

    def __init__(
        self,
        model: Any,
        *,
        geometry: KVGeometry | None = None,
        block_tokens: int = 16,
        backend: AttentionBackend | str | None = None,
        use_adapter: Callable[[Adapter | None], None] | None = None,
    ) -> None:
        TRANSFORMERS.check(version("transformers"))
        self.model = model = bare_model(model)
        self._use_adapter = use_adapter
        refuse_model(model)
        self._watch = WeightsWatch(model)
        self._check_state()
        self.device: torch.device = model.device
        self.geometry = geometry or geometry_from_config(model.config, model.dtype, block_tokens)
        if backend is None or isinstance(backend, str):
            backend = get_backend(backend, str(self.device))
        self.backend = backend
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self.position_limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        self.cache: PagedCache | None = None
        refuse_latents(model, self.geometry)
        self._sources = kv_sources(model.config)
        self._layers = {layer for group in self.geometry.groups for layer in group.layers} | set(self._sources)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_rows = "logits_to_keep" in parameters
        latents = any(group.kind is GroupKind.LATENT for group in self.geometry.groups)
        self._cache_argument = ("cache" if "cache" in parameters else "past_key_values") if latents else ""
        self._held = False
        _check_modules(model, self._layers)
        borrow(model)
        self._held = True

    @property
    def slab(self) -> Slab | None:
        """What `attach` was given."""
        return None if self.cache is None else self.cache.slab

    @property
    def cold_codec(self) -> BlockCodec | None:
        return None if self.cache is None else self.cache.cold_codec

    @property
    def switches_adapters(self) -> bool:
        return self._use_adapter is not None

    def attach(self, slab: Slab, cold_codec: BlockCodec | None = None) -> PagedCache:
        """Use this slab from now on; cold_codec decodes its INT4 slots. Returns the cache made over it."""
        if not isinstance(slab, Slab):
            raise UsageError(f"slab: got {type(slab).__name__}; expected a store's (store.slab), one with device bytes")
        cache = PagedCache(slab, self.geometry, cold_codec)
        if cache.device != self.device:
            raise ConfigError(f"the slab lies on {cache.device}, the model on {self.device}; expected one device")
        self.cache = cache
        return cache

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Compute a step: write the KV of its tokens, return the logits asked for.

        Returns Tensor[batch.row_count, vocab] in the model's dtype, slice by slice in batch order.
        Raises UsageError for token ids or tables that do not fit; then nothing was written. SliceError for sequences
        whose adapter or media the model does not take. IntegrityError when a layer of the model did not go through
        paged attention.
        """
        adapters = list(dict.fromkeys(part.adapter for part in batch))
        if self._use_adapter is None:
            if adapters != [None]:
                raise UsageError(
                    f"the step asks for the adapters {adapters}; expected HFRunner(use_adapter=...), which switches to "
                    "them, or one adapter for all, in the store's Identity"
                )
            return self._forward(batch)
        rows: dict[str, torch.Tensor] = {}
        for adapter in adapters:
            parts = tuple(part for part in batch if part.adapter == adapter)
            try:
                self._use_adapter(adapter)
            except Exception as error:  # the caller's function: whoever asked for this adapter cannot be served
                said = f"use_adapter({adapter}) raised {type(error).__name__}: {error}"
                raise SliceError([part.sequence_id for part in parts], said) from error
            logits = self._forward(StepBatch(parts, batch.before_layer))
            pieces = logits.split([part.logits_count for part in parts])
            rows |= {part.sequence_id: piece for part, piece in zip(parts, pieces, strict=True)}
        return torch.cat([rows[part.sequence_id] for part in batch])

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        cache = self.cache
        if cache is None or not self._held:
            raise UsageError("the runner has no slab: call attach(slab) first, and not after release()")
        self._check_state()
        token_ids, positions, rows = self._flatten(batch)
        step = _Step(cache, self.backend, self._sources, batch)
        kwargs: dict[str, Any] = {"logits_to_keep": rows} if self._keeps_rows else {}
        if any(part.media for part in batch):
            kwargs["inputs_embeds"] = self._embed(token_ids, batch)
        else:
            kwargs["input_ids"] = token_ids
        if self._cache_argument:
            kwargs[self._cache_argument] = _Latents(step)
        token = current_pass.set(step)
        try:
            with torch.inference_mode():
                logits = self.model(position_ids=positions, use_cache=False, **kwargs).logits[0]
        finally:
            current_pass.reset(token)
        if step.reached != self._layers:
            raise IntegrityError(
                f"layers {sorted(self._layers - step.reached)} of {type(self.model).__name__} never reached the paged "
                "attention function in this step; its output cannot be trusted"
            )
        found: torch.Tensor = logits if self._keeps_rows else logits[rows]
        return found

    def _check_state(self) -> None:
        naming = "HFRunner(use_adapter=...) and Request(adapter=...)"
        refuse_state(self.model, named=self._use_adapter is not None, naming=naming)
        self._watch.check("a new HFRunner, and a store for it whose Identity names the weights as they are")

    def release(self) -> None:
        """Give the model back: once its last runner has released it, it attends as it did before. Idempotent."""
        if self._held:
            self._held = False
            give_back(self.model)

    def _embed(self, token_ids: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        """Embeddings of the step's tokens, Tensor[1, tokens, hidden], with the features of media in their places."""
        try:
            refuse_media(self.model)
        except KVError as error:
            raise SliceError([part.sequence_id for part in batch if part.media], str(error)) from error
        with torch.inference_mode():
            embeds: torch.Tensor = self.model.get_input_embeddings()(token_ids)
            first = 0
            for part in batch:
                for offset, features in part.media:
                    if features.shape[1] != embeds.shape[2]:
                        raise SliceError(
                            [part.sequence_id],
                            f"sequence {part.sequence_id!r} brings media features of {features.shape[1]} values; "
                            f"the model's embeddings have {embeds.shape[2]}",
                        )
                    embeds[0, first + offset : first + offset + len(features)] = features.to(embeds)
                first += part.token_count
        return embeds

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
