"""The attention function that reads paged KV, for every forward pass over a slab: a runner's or a `StoreCache`'s.

One function is registered with transformers for the process; which pass a call belongs to travels in a context
variable, so passes in several threads do not see each other. It does causality, windows and padding itself and refuses
a mask. Layers that reuse another's KV read that layer's blocks; layers with latents (MLA) attend to them absorbed.

Used by the thread that runs the model; `borrow` and `give_back` from any thread.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from allocator import ConfigError, GroupKind, IntegrityError, UsageError
from engine_adapter.attention import AttentionSettings

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.attention import AttentionBackend
    from engine_adapter.paged_cache import PagedCache

ATTENTION_NAME = "kvstore_paged"
"""The name under which transformers knows our attention function."""

current_pass: ContextVar[PagedPass | None] = ContextVar("kvstore_paged_pass", default=None)

_borrowed: WeakKeyDictionary[Any, tuple[dict[str, str], int]] = WeakKeyDictionary()
_borrow_lock = threading.Lock()


class PagedPass(ABC):
    """One forward pass. plans: of the backend, per cache group. sources: layers that reuse KV, and whose they reuse."""

    def __init__(self, cache: PagedCache, sources: Mapping[int, int]) -> None:
        self.cache = cache
        self.windows = tuple(group.window_tokens for group in cache.geometry.groups)
        self.backend: AttentionBackend | None = None
        self.plans: tuple[Any, ...] = ()
        self._sources = sources
        self._lenders = frozenset(sources.values())
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._settings: AttentionSettings | None = None  # of the last layer; most models have the same for all

    @abstractmethod
    def take(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
        """A layer with KV of its own attends: it must lie in its blocks now. Returns its latents, if it keeps them."""

    @abstractmethod
    def reuse(self, layer: int) -> None:
        """A layer without KV of its own attends."""

    @abstractmethod
    def flat(self, states: torch.Tensor) -> torch.Tensor:
        """Tensor[rows, heads, columns, dim] -> Tensor[tokens, heads, dim], padding left out."""

    @abstractmethod
    def unflat(self, found: torch.Tensor) -> torch.Tensor:
        """Tensor[tokens, heads, dim] -> Tensor[rows, columns, heads, dim]."""

    def attend(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, asked: AttentionSettings
    ) -> torch.Tensor:
        """Tensors as transformers has them; asked: what the layer wants beside them."""
        layer = int(module.layer_idx)
        source = self._sources.get(layer, layer)
        group, _ = self.cache.place(source)
        latent = None
        if source == layer:
            latent = self.take(layer, key, value)
            if layer in self._lenders:
                self._lent[layer] = key, value
        else:
            self.reuse(layer)
            lent = self._lent.get(source)
            if lent is None or lent[0].data_ptr() != key.data_ptr() or lent[1].data_ptr() != value.data_ptr():
                raise IntegrityError(f"layer {layer} does not attend to the KV of layer {source}, as its config says")
        assert self.backend is not None
        plan, settings = self.plans[group], self._settled(module, latent, asked)
        if latent is None:
            found = self.backend.attend(plan, source, self.flat(query), self.flat(key), self.flat(value), settings)
            return self.unflat(found)
        absorbed = _absorb(module, self.flat(query))
        found = self.backend.attend(plan, source, absorbed, self.flat(latent), None, settings)
        return self.unflat(_expand(module, found))

    def check_window(self, layer: int, told: int | None) -> None:
        """told: the window that the layer passes on, None where it says nothing."""
        group, _ = self.cache.place(self._sources.get(layer, layer))
        if told is not None and told != self.windows[group]:
            raise ConfigError(
                f"layer {layer} attends with a window of {told} tokens; its cache group has {self.windows[group]}"
            )

    def _settled(self, module: Any, latent: torch.Tensor | None, asked: AttentionSettings) -> AttentionSettings:
        """The same object as long as layers ask for the same; sinks are compared by identity."""
        last, dim = self._settings, None if latent is None else int(module.kv_b_proj.weight.shape[1])
        if (
            last is None
            or (last.scaling, last.softcap, last.latent_value_dim) != (asked.scaling, asked.softcap, dim)
            or last.sinks is not asked.sinks
        ):
            self._settings = last = AttentionSettings(asked.scaling, asked.softcap, asked.sinks, dim)
        return last


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
    """What transformers calls in each layer: query Tensor[rows, heads, columns, key_dim], key and value
    [rows, kv_heads, columns, dim] of this pass alone (of a latent layer expanded to all heads, and not used).

    Returns (Tensor[rows, columns, heads, value_dim], None).
    """
    step = current_pass.get()
    if step is None:
        raise UsageError(
            "this model attends over paged KV: give it a cache of its ModelStore (or close that), or call "
            "runner.release() before using the model itself"
        )
    if attention_mask is not None:
        raise IntegrityError("the model passed a mask to paged attention, which does its own masking")
    step.check_window(int(module.layer_idx), kwargs.get("sliding_window"))
    asked = AttentionSettings(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    return step.attend(module, query, key, value, asked), None


def borrow(model: Any) -> None:
    """Route the attention of the model's text part to `paged_attention`, remembering how it attended before.

    Encoders of images and sound that the model holds keep their own.
    """
    from transformers import AttentionInterface

    with _borrow_lock:
        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        before, count = _borrowed.get(model, ({}, 0))
        if count == 0:
            config, part = model.config, _text_part(model)
            before = {part: str(getattr(config, part)._attn_implementation if part else config._attn_implementation)}
            _attend_by(model, {part: ATTENTION_NAME})
        _borrowed[model] = (before, count + 1)


def give_back(model: Any) -> None:
    """Undo one `borrow`: after the last one the model attends as it did before."""
    with _borrow_lock:
        before, count = _borrowed[model]
        if count > 1:
            _borrowed[model] = (before, count - 1)
            return
        del _borrowed[model]
        _attend_by(model, before)


def _text_part(model: Any) -> str:
    """Name of the config inside a multimodal model's config that holds the text part; "" for a text model."""
    text = model.config.get_text_config(decoder=True)
    return next((name for name in model.config.sub_configs if getattr(model.config, name, None) is text), "")


def _attend_by(model: Any, names: dict[str, str]) -> None:
    model.set_attn_implementation(names.get("", names))


# ---- latents


def refuse_latents(model: Any, geometry: KVGeometry) -> None:
    """ConfigError for a model with latents whose attention modules are not built as the absorbed form expects."""
    if not any(group.kind is GroupKind.LATENT for group in geometry.groups):
        return
    modules = [module for module in model.modules() if hasattr(module, "is_causal") and hasattr(module, "layer_idx")]
    names = ("kv_b_proj", "expand_kv", "qk_nope_head_dim", "v_head_dim")
    if not modules or not all(hasattr(module, name) for module in modules for name in names):
        raise ConfigError(
            f"{type(model).__name__} keeps latents, and its attention is not built like DeepSeek's (kv_b_proj, "
            "expand_kv): open a ModelStore with paged=False, which keeps latents too"
        )


def _weights(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """From the latent to K without position and to V: Tensor[heads, nope or value dim, latent]."""
    weight = module.kv_b_proj.weight
    both = weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
    return both[:, : module.qk_nope_head_dim], both[:, module.qk_nope_head_dim :]


def _absorb(module: Any, query: torch.Tensor) -> torch.Tensor:
    """Queries as the latents see them: Tensor[tokens, heads, nope + rope] -> Tensor[tokens, heads, latent + rope].

    K is never expanded: q . (W c) is (W' q) . c, and the rope part is shared by all heads.
    """
    nope = module.qk_nope_head_dim
    to_keys, _ = _weights(module)
    return torch.cat((torch.einsum("thn,hnl->thl", query[..., :nope], to_keys), query[..., nope:]), -1)


def _expand(module: Any, found: torch.Tensor) -> torch.Tensor:
    """Attended latents to values: Tensor[tokens, heads, latent] -> Tensor[tokens, heads, value_dim]."""
    return torch.einsum("thl,hvl->thv", found, _weights(module)[1])
