"""The attention function that reads a StoreCache's blocks in place, full and INT4, padding left out.

Registered with transformers under its own name; it does causality, windows and padding itself, so it refuses a mask.
Which pass a call belongs to travels in a context variable that `StoreCache.update` sets just before.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from allocator import ConfigError, IntegrityError, UsageError
from engine_adapter.attention import AttentionSettings

if TYPE_CHECKING:
    from engine_adapter.transformers_cache.passes import ForwardPass

ATTENTION_NAME = "kvstore_cache"
"""The name under which transformers knows this function."""

current_pass: ContextVar[ForwardPass | None] = ContextVar("kvstore_cache_pass", default=None)


def cache_attention(
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
    """query Tensor[rows, heads, columns, key_dim], key and value [rows, kv_heads, columns, dim] of this pass alone
    (of a latent layer expanded to all heads, and not used: it attends over the latents).

    Returns (Tensor[rows, columns, heads, value_dim], None).
    """
    layer = int(module.layer_idx)
    step = current_pass.get()
    if step is None or step.awaited != layer or step.paged is None or step.backend is None:
        raise UsageError(
            "this model attends over a StoreCache: give it one (ModelStore.cache()), or close its ModelStore first"
        )
    step.awaited = None
    if attention_mask is not None:
        raise IntegrityError("the model passed a mask to paged attention, which does its own masking")
    group, _ = step.cache.place(layer)
    told = kwargs.get("sliding_window")
    if told is not None and told != step.windows[group]:
        raise ConfigError(
            f"layer {layer} attends with a window of {told} tokens; its cache group has {step.windows[group]}"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    latent_dim = None if step.latent is None else int(module.kv_b_proj.weight.shape[1])
    settings = step.settings
    if settings is None or settings.scaling != scaling or settings.softcap != softcap or settings.sinks is not s_aux:
        settings = AttentionSettings(scaling=scaling, softcap=softcap, sinks=s_aux, latent_value_dim=latent_dim)
        step.settings = settings
    plan = step.paged[group]
    if step.latent is None:
        found = step.backend.attend(plan, layer, step.flat(query), step.flat(key), step.flat(value), settings)
        return step.unflat(found), None
    absorbed = _absorb(module, step.flat(query))
    found = step.backend.attend(plan, layer, absorbed, step.flat(step.latent), None, settings)
    return step.unflat(_expand(module, found)), None


def can_absorb(module: Any) -> bool:
    """Whether a latent (MLA) attention module has the parts that `_absorb` and `_expand` work with."""
    return all(hasattr(module, name) for name in ("kv_b_proj", "expand_kv", "qk_nope_head_dim", "v_head_dim"))


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
