"""From a transformers config to the KV geometry of the model, and a refusal where paging would be silently wrong.

Pure reading of a config; called once per model by whoever builds a store for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from allocator import CacheGroup, ConfigError, GroupKind, KVGeometry

if TYPE_CHECKING:
    import torch

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"

_POSITION_FIELDS = (
    "rope_parameters",
    "partial_rotary_factor",
    "no_rope_layers",
    "no_rope_layer_interval",
    "position_embedding_type",
    "rope_interleave",
    "rotary_pct",
    "rotary_dim",
)


def geometry_from_config(
    config: Any, dtype: torch.dtype | str, block_tokens: int = 16, *, latent: bool = False
) -> KVGeometry:
    """KV geometry of a causal language model: a group of full layers, a group per sliding window, or both.

    config: a transformers config (of a multimodal model: its text part is taken).
    dtype: dtype of the stored KV, torch.bfloat16 or "bfloat16".
    latent: the caller can keep MLA's latents, one of kv_lora_rank + qk_rope_head_dim values a token and layer.
    Raises ConfigError for models whose KV this runner cannot keep correctly, saying why.
    """
    text = config.get_text_config(decoder=True)
    rank = getattr(text, "kv_lora_rank", None) if latent else None
    refuse_config(text, latent=latent)
    if rank:
        return KVGeometry.latent(
            layers=int(text.num_hidden_layers),
            latent_dim=int(rank),
            rope_dim=int(text.qk_rope_head_dim),
            dtype=dtype_name(dtype),
            block_tokens=block_tokens,
            position=position_scheme(text),
        )
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    key_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    value_dim = int(getattr(text, "v_head_dim", None) or key_dim)
    windows = layer_windows(text)
    groups = []
    for window in sorted(set(windows), key=lambda tokens: (tokens is not None, tokens or 0)):
        groups.append(
            CacheGroup(
                kind=GroupKind.FULL if window is None else GroupKind.SLIDING,
                layers=tuple(layer for layer, found in enumerate(windows) if found == window),
                kv_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                window_tokens=window,
            )
        )
    return KVGeometry(
        groups=tuple(groups), block_tokens=block_tokens, dtype=dtype_name(dtype), position=position_scheme(text)
    )


def layer_windows(text: Any) -> list[int | None]:
    """Per layer, the sliding window in tokens (the token itself counted), or None for full attention.

    Mistral-style configs have no layer_types: every layer has the window.
    """
    count = int(text.num_hidden_layers)
    window = getattr(text, "sliding_window", None)
    if getattr(text, "use_sliding_window", True) is False:
        window = None
    types = getattr(text, "layer_types", None)
    if types is None:
        return [int(window) if window else None] * count
    if len(types) != count:
        raise ConfigError(f"config lists {len(types)} layer types for {count} layers")
    if SLIDING_ATTENTION in types and not window:
        raise ConfigError(f"config has sliding layers but sliding_window is {window!r}; expected a count of tokens")
    return [int(window) if kind == SLIDING_ATTENTION and window else None for kind in types]


def position_scheme(text: Any) -> str:
    """How positions enter K, as one canonical string: part of the KV's identity."""
    found = {name: getattr(text, name) for name in _POSITION_FIELDS if getattr(text, name, None) is not None}
    return "rope:" + json.dumps(found, sort_keys=True, separators=(",", ":"), default=str)


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_config(text: Any, *, latent: bool = False) -> None:
    """Raise ConfigError for a config whose attention a paged runner would get wrong without any error."""
    name = getattr(text, "model_type", type(text).__name__)
    if getattr(text, "kv_lora_rank", None) and not latent:
        raise ConfigError(f"{name} keeps latent KV (MLA, kv_lora_rank={text.kv_lora_rank}): not in this runner yet")
    if getattr(text, "index_topk", None):
        raise ConfigError(
            f"{name} keeps the keys of a sparse-attention indexer beside its KV (index_topk): not here yet"
        )
    for where, rope_type in _rope_types(getattr(text, "rope_parameters", None)):
        if "dynamic" in rope_type or rope_type == "longrope":
            raise ConfigError(
                f"{name} has rope type {rope_type!r}{where}: it scales by the longest sequence of a batch, so the "
                "same tokens get different keys beside other neighbours and shared prefixes would be wrong; "
                "expected a rope with fixed frequencies"
            )
    allowed = {FULL_ATTENTION, SLIDING_ATTENTION}
    if strange := sorted(set(getattr(text, "layer_types", None) or ()) - allowed):
        raise ConfigError(f"{name} has layers of type {strange}; this runner pages {sorted(allowed)}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(f"{name} shares KV across layers (num_kv_shared_layers): not in this runner yet")
    if getattr(text, "use_bidirectional_attention", False) or getattr(text, "is_encoder_decoder", False):
        raise ConfigError(f"{name} does not attend causally; only causal language models can be paged")


def refuse_model(model: Any) -> None:
    """Raise ConfigError for a model class that takes the name of an attention function and then never calls it."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{type(model).__name__} does not route attention through transformers' AttentionInterface "
            "(_supports_attention_backend is false), so its KV cannot be paged from outside"
        )


def _rope_types(parameters: Any) -> list[tuple[str, str]]:
    """(where, rope type) pairs of flat parameters, or of parameters nested by layer type."""
    if not isinstance(parameters, Mapping):
        return []
    if "rope_type" in parameters:
        return [("", str(parameters["rope_type"]))]
    return [
        (f" on {kind} layers", str(nested["rope_type"]))
        for kind, nested in parameters.items()
        if isinstance(nested, Mapping) and "rope_type" in nested
    ]
