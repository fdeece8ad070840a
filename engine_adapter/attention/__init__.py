"""Attention over paged KV: the one interface that every implementation meets, and the one place that chooses one.

A backend is asked in two steps. Once per step and cache group it plans: which blocks each sequence reads, in which
order, with which mask. Then it attends once per layer with that plan. Torch is the reference and the fallback;
native and Triton backends register under their own names and pass the same tests.

A backend object belongs to one runner and is used by the thread that runs the model; it may keep scratch memory.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from allocator import ConfigError
from engine_adapter.attention.choice import best_backend, offer_attention

if TYPE_CHECKING:
    import torch

    from engine_adapter.batch import StepBatch
    from engine_adapter.paged_cache import PagedCache

__all__ = [
    "AttentionBackend",
    "AttentionSettings",
    "backend_names",
    "get_backend",
    "register_backend",
]


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """What a layer asks for beside its tensors.

    scaling: factor on the scores (not always key_dim ** -0.5).
    softcap: scores become softcap * tanh(score / softcap), before the mask.
    sinks: Tensor[query_heads], a logit per head that takes probability and gives nothing; any float dtype.
    latent_value_dim: for latent groups, V is the first so many dims of K; None elsewhere.
    """

    scaling: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    latent_value_dim: int | None = None


class AttentionBackend(Protocol):
    """Attention of one step over the blocks of a PagedCache."""

    @property
    def name(self) -> str:
        """Name in the registry, in metrics and in `doctor`."""

    def plan(self, cache: PagedCache, group: int, batch: StepBatch) -> Any:
        """Prepare a step for the layers of a group; the result is opaque to the caller and lives for the step.

        Raises UsageError for tables that miss a block which the step must read.
        """

    def attend(
        self,
        plan: Any,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor | None,
        settings: AttentionSettings,
    ) -> torch.Tensor:
        """Causal attention of all tokens of the step, each over its own sequence; KV of the step is written already.

        layer: the model's layer number. query: Tensor[tokens, query_heads, key_dim], any strides.
        keys, values: Tensor[tokens, kv_heads, key_dim or value_dim], this step's own, in case reading them beats
        reading them back. Returns Tensor[tokens, query_heads, value_dim] in query's dtype.
        """


_BUILT_IN: dict[str, tuple[str, str]] = {
    "native": ("engine_adapter.attention.native_paged", "NativePagedAttention"),
    "torch": ("engine_adapter.attention.torch_paged", "TorchPagedAttention"),
    "triton": ("engine_adapter.attention.triton_paged", "TritonPagedAttention"),
}
_registered: dict[str, Callable[[], AttentionBackend]] = {}


def register_backend(name: str, factory: Callable[[], AttentionBackend]) -> None:
    """Make `factory()` reachable as get_backend(name). Raises ConfigError when the name is taken."""
    if name in _BUILT_IN or name in _registered:
        raise ConfigError(f"attention backend {name!r} is registered already; known: {', '.join(backend_names())}")
    _registered[name] = factory


def backend_names() -> tuple[str, ...]:
    return tuple(sorted({*_BUILT_IN, *_registered}))


def get_backend(name: str | None = None, device: str = "cpu") -> AttentionBackend:
    """A new backend object: the named one, or the best that runs on `device`. Raises ConfigError if unknown."""
    wanted = best_backend(device) if name is None else name
    if wanted in _registered:
        return _registered[wanted]()
    if wanted not in _BUILT_IN:
        raise ConfigError(f"unknown attention backend {wanted!r}; known: {', '.join(backend_names())}")
    module, attribute = _BUILT_IN[wanted]
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend


offer_attention()
