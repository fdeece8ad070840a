"""A store for one transformers model, and the caches over it that `generate` takes.

The model gets two forward hooks that act only on passes with one of our caches. Before the pass: the tokens fed are
read from its arguments, since K and V alone would not say what they are; for a fresh cache, what the store has of the
prompt is taken over and cut off the arguments. After it: every layer must have updated the cache.

Used by one thread, the one that runs the model.
"""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from allocator import ConfigError, IntegrityError, UsageError
from engine_adapter.attention import AttentionBackend, get_backend
from engine_adapter.model_geometry import (
    bare_model,
    geometry_from_config,
    kv_sources,
    refuse_media,
    refuse_model,
    refuse_state,
)
from engine_adapter.paged_cache import PagedCache
from engine_adapter.paged_function import borrow, current_pass, give_back, refuse_latents
from engine_adapter.request import other_identity
from engine_adapter.transformers_cache.arguments import read_arguments
from engine_adapter.transformers_cache.passes import ForwardPass
from engine_adapter.transformers_cache.recording import CacheRecording
from engine_adapter.transformers_cache.rows import Rows
from engine_adapter.transformers_cache.store_cache import StoreCache
from engine_adapter.weights_watch import WeightsWatch
from kvstore import Identity, KVStore, KVStoreConfig
from kvstore.trace_recorder import TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.identity import Media

_NOT_ABOUT_KV = ("transformers_version", "_name_or_path", "architectures", "use_cache", "pad_token_id")
_PREFILL_COLUMNS = 16  # a pass of fewer tokens a row is decoding, or checks drafts
_CACHE_ARGUMENTS = ("cache", "past_key_values")
_NAMING = "adapter=(name, id, digest)"


class ModelStore:
    """Opens a store for `model`; `cache()` makes what `model.generate(..., cache=...)` takes.

    model: a causal language model of transformers, in eval mode, or PEFT's around one. config: memory, tiers and codec,
    as everywhere. paged: attend over the blocks where they lie, INT4 included, instead of gathering for the model's
    own attention; until `close` the model then needs a cache of ours. name, weights: of the identity. By default the
    name is that of the folder or repository that the model came from, and weights a SHA-256 over all that is in memory
    and the model's config, once: right also for merged weights. A model that is converted later (`half`, `to`) is
    refused; weights changed where they lie are not noticed (see `KVStore.reset`). Other engines name them otherwise
    (see docs/how-to/transformers.md). adapter, tenant: see Identity.

    Raises ConfigError, naming the model, where reuse would be silently wrong.
    """

    def __init__(
        self,
        model: Any,
        config: KVStoreConfig | None = None,
        *,
        block_tokens: int = 16,
        paged: bool = False,
        name: str = "",
        weights: str | None = None,
        adapter: object = None,
        tenant: str | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"model: got {model!r:.120} ({type(model).__name__}); expected a model of transformers")
        self.model = model = bare_model(model)
        self._watch = WeightsWatch(model)
        self.geometry = geometry_from_config(model.config, model.dtype, block_tokens)
        self._sources = kv_sources(model.config)
        self._backend: AttentionBackend | None = None
        if paged:
            refuse_model(model)
            refuse_latents(model, self.geometry)
            self._backend = get_backend(None, str(model.device))
        self.identity = Identity(
            model=name or source_name(model),
            weights=weights or weights_in_memory(model),
            geometry=self.geometry,
            adapter=adapter,
            tenant=tenant,
        )
        refuse_state(model, named=adapter is not None, naming=_NAMING)
        self._placeholder_ids = placeholders(model.config)
        self.store = KVStore(
            self.geometry, self.identity, config, device=str(model.device), placeholder_ids=self._placeholder_ids
        )
        if self.store.slab is None:
            raise ConfigError("the store has no device memory: give config.device_bytes")
        told = self.identity.model
        self._recorder = TraceRecorder.from_environment(
            self.identity.root(), block_tokens, told if isinstance(told, str) else ""
        )
        self._watched_epoch = self.store.identity.epoch
        self._paged = PagedCache(self.store.slab, self.geometry, self.store.cold_codec)
        self._windows = {layer: group.window_tokens for group in self.geometry.groups for layer in group.layers}
        self._layer_count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._caches: weakref.WeakSet[StoreCache] = weakref.WeakSet()
        self._dropped: deque[Rows] = deque()
        if paged:
            borrow(model)
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        ]

    def cache(
        self,
        *,
        exact: bool = False,
        adapter: object = None,
        tenant: str | None = None,
        media: Sequence[Sequence[Media]] = (),
    ) -> StoreCache:
        """A fresh cache, for one call of `generate` or one conversation.

        exact: reuse only what was computed in full precision, and keep it so. adapter, tenant: others than the store's.
        media: for each prompt the media whose placeholders it holds, which the model is given in its first pass.
        """
        if type(exact) is not bool:
            raise UsageError(f"exact: got {exact!r}; expected True or False")
        if not isinstance(media, list | tuple) or not all(isinstance(one, list | tuple) for one in media):
            raise UsageError(f"media: got {media!r:.120}; expected a list of Media for each prompt")
        self._end_dropped()
        if any(media):
            refuse_media(self.model, masks_itself=self._backend is None)
        identity = other_identity(self.identity, adapter, tenant)
        self._check_state(identity or self.identity)
        recording = None
        if self._recorder is not None:
            recording = CacheRecording(self._recorder, identity or self.identity, self.geometry.block_tokens)
        rows = Rows(self.store, self._paged, exact=exact, identity=identity, media=media, recording=recording)
        cache = StoreCache(rows, self._windows, self._layer_count)
        self._caches.add(cache)
        ending = weakref.finalize(cache, self._dropped.append, rows)
        ending.atexit = False
        return cache

    def close(self) -> None:
        """End all caches, write down what is worth it, give the model its own attention back. Idempotent."""
        for cache in list(self._caches):
            cache.finish()
        self._end_dropped()
        for hook in self._hooks:
            hook.remove()
        if self._hooks and self._backend is not None:
            give_back(self.model)
        self._hooks = []
        if self._recorder is not None:
            self._recorder.close()
        self.store.close()

    def __enter__(self) -> ModelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_dropped(self) -> None:
        while self._dropped:
            self._dropped.popleft().finish()

    def _check_state(self, identity: Identity) -> None:
        refuse_state(self.model, named=identity.adapter is not None, naming=_NAMING)
        if (epoch := self.store.identity.epoch) != self._watched_epoch:  # a reset: other weights are meant
            self._watched_epoch, self._watch = epoch, self._watch.renewed(self.model)
        self._watch.check("a new ModelStore, or KVStore.reset() where weights of the same dtype were put in place")

    # ---- hooks

    def _ours(self, kwargs: dict[str, Any]) -> StoreCache | None:
        """The cache of a call, if this ModelStore made it; others have hooks of their own."""
        given = next((kwargs[name] for name in _CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
        return given if isinstance(given, StoreCache) and given in self._caches else None

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        cache = self._ours(kwargs)
        if cache is None:
            return None
        rows = cache.rows
        self._check_state(rows.identity or self.identity)
        self._end_dropped()
        rows.settle()
        given = read_arguments(args, kwargs, rows.columns, rows.rows, any(rows.media), bool(self._placeholder_ids))
        if not rows.rows:
            given.cut(rows.admit(given.tokens(), given.pads, given.reusable_columns()), rows.media_to_come)
        for row, pad in zip(rows.rows, given.pads, strict=True):
            if not row.ids:
                row.pad = pad
        tokens = given.tokens()
        rows.begin_pass(tokens)
        fed = [len(part) for part in tokens]
        columns = (rows.columns, given.columns)
        cache.running = ForwardPass(self.store, self._paged, rows.rows, fed, columns, self._backend, self._sources)
        if self._backend is not None:
            current_pass.set(cache.running)
        return given.args, given.kwargs

    def _after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = self._ours(kwargs)
        if cache is None or cache.running is None:
            return
        step, cache.running = cache.running, None
        current_pass.set(None)
        if output is None:  # the pass failed: the next step takes back what it wrote
            return
        missing = sorted(set(self._windows) - step.reached)
        if missing:
            cache.rows.failed = f"layers {missing} of {type(model).__name__} never updated it"
            raise IntegrityError(f"layers {missing} of {type(model).__name__} never updated the cache in this pass")
        cache.rows.end_pass(step.new_columns)
        if step.new_columns >= _PREFILL_COLUMNS:
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # enqueued so far; whoever wants the next token waits as well
            self.store.observe_prefill(step.fed_tokens, time.perf_counter() - step.began_seconds)


def placeholders(config: Any) -> set[int]:
    """Token ids that stand for media, as a config names them."""
    names = ("image_token_id", "video_token_id", "audio_token_id", "image_token_index")
    found = {getattr(config, name, None) for name in names}
    return {one for one in found if isinstance(one, int) and one >= 0}


def source_name(model: Any) -> str:
    """The last part of the folder or repository that the model was loaded from, as load_model and vLLM name it."""
    return Path(getattr(model.config, "_name_or_path", "") or "").name or type(model).__name__


def weights_in_memory(model: Any) -> str:
    """SHA-256 (hex) over all weights as they are now, and over what the config says of how they are used."""
    told = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_ABOUT_KV}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()
