"""From a transformers config to the KV geometry of the model, and a refusal where paging would be silently wrong.

How a config's fields become cache groups is in kvstore.planning.model_config, which plans with them too.

Pure reading of a config; called once per model by whoever builds a store for it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from allocator import ConfigError, KVGeometry, UsageError
from kvstore.planning.foreign_layers import FULL_ATTENTION, SLIDING_ATTENTION
from kvstore.planning.model_config import cache_groups

if TYPE_CHECKING:
    import torch

_POSITION_FIELDS = (
    "rope_parameters",
    "partial_rotary_factor",
    "no_rope_layers",
    "no_rope_layer_interval",
    "position_embedding_type",
    "rotary_pct",
    "rotary_dim",
)


def geometry_from_config(config: Any, dtype: torch.dtype | str, block_tokens: int = 16) -> KVGeometry:
    """KV geometry of a causal language model: a group of full layers, a group per sliding window, or both; or one of
    latents (MLA), one of kv_lora_rank + qk_rope_head_dim values a token and layer.

    config: a transformers config (of a multimodal model: its text part is taken).
    dtype: dtype of the stored KV, torch.bfloat16 or "bfloat16".
    Layers that reuse another's KV (see `kv_sources`) are in no group.
    Raises ConfigError for models whose KV cannot be kept correctly, saying why.
    """
    text = config.get_text_config(decoder=True)
    refuse_config(text)
    reusing = kv_sources(text)
    groups = tuple(
        replace(group, layers=layers)
        for group in cache_groups(text)
        if (layers := tuple(layer for layer in group.layers if layer not in reusing))
    )
    return KVGeometry(groups=groups, block_tokens=block_tokens, dtype=dtype_name(dtype), position=position_scheme(text))


def kv_sources(config: Any) -> dict[int, int]:
    """Layers that keep no KV, and the layer whose KV each attends to: the last of its kind that lends its own."""
    text = config.get_text_config(decoder=True)
    lenders: dict[str, int] = {}
    found = {}
    for layer, mode in enumerate(getattr(text, "kv_sharing_modes", None) or ()):
        kind = text.layer_types[layer]
        if mode == "store":
            lenders[kind] = layer
        elif mode is not None:
            if mode != "reuse" or kind not in lenders:
                raise ConfigError(
                    f"layer {layer} ({kind}) has the sharing mode {mode!r} and lenders before it are {lenders}; "
                    "expected reuse, behind a layer of its kind that lends its KV"
                )
            found[layer] = lenders[kind]
    return found


def position_scheme(text: Any, latent_rope: str = "halves") -> str:
    """How positions enter K, as one canonical string: part of the KV's identity, so engines and releases must agree.

    What says nothing is left out (None, a whole partial factor), numbers are floats, keys are sorted. latent_rope: how
    the engine lays out the rope part of a latent: transformers in "halves", vLLM "interleaved". Same weights, other
    bytes: they must not share.
    """
    found = {name: _canonical(getattr(text, name, None)) for name in _POSITION_FIELDS}
    if getattr(text, "kv_lora_rank", None):
        found["latent_rope"] = latent_rope
    told = {name: value for name, value in found.items() if value is not None}
    if told.get("partial_rotary_factor") == 1.0:
        del told["partial_rotary_factor"]
    return "rope:" + json.dumps(told, sort_keys=True, separators=(",", ":"), default=str)


def _canonical(value: Any) -> Any:
    """Floats for numbers, so that 10000 and 10000.0 are one; mappings without what says nothing."""
    if isinstance(value, Mapping):
        kept = {str(name): _canonical(one) for name, one in value.items() if one is not None}
        return {name: one for name, one in kept.items() if (name, one) != ("partial_rotary_factor", 1.0)}
    if isinstance(value, list | tuple):
        return [_canonical(one) for one in value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def dtype_name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_config(text: Any) -> None:
    """Raise ConfigError for a config whose attention a paged runner would get wrong without any error."""
    name = getattr(text, "model_type", type(text).__name__)
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
    if getattr(text, "num_kv_shared_layers", 0) and not hasattr(text, "kv_sharing_modes"):
        raise ConfigError(f"{name} shares KV across layers and does not say whose (kv_sharing_modes): not here yet")
    if getattr(text, "use_bidirectional_attention", False) or getattr(text, "is_encoder_decoder", False):
        raise ConfigError(f"{name} does not attend causally; only causal language models can be paged")


def refuse_model(model: Any) -> None:
    """Raise ConfigError for a model class that takes the name of an attention function and then never calls it."""
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"{type(model).__name__} does not route attention through transformers' AttentionInterface "
            "(_supports_attention_backend is false), so its KV cannot be paged from outside"
        )


def bare_model(model: Any) -> Any:
    """The model inside PEFT's wrapper. ConfigError for adapters that are no layers of it, such as learned prompts."""
    if not hasattr(model, "get_base_model"):
        return model
    inside = model.get_base_model()
    if not getattr(inside, "peft_config", None):
        raise ConfigError(f"{type(model).__name__} learned prompts instead of layers; expected adapters such as LoRA")
    return inside


def refuse_state(model: Any, *, named: bool, naming: str) -> None:
    """Raise for a model whose KV is not now what its weights say. named: its adapters are; naming: how to do that."""
    if model.training:
        raise UsageError("the model is in training mode, where dropout changes its KV; call model.eval() first")
    if not named and (adapters := getattr(model, "peft_config", None)):
        raise ConfigError(
            f"{type(model).__name__} carries adapters {sorted(adapters)}: name the active one with {naming}, "
            "or its KV would be taken for the plain model's"
        )


def refuse_media(model: Any, *, masks_itself: bool = False) -> None:
    """Raise ConfigError for a model whose media are more than so many tokens.

    masks_itself: the model attends by itself, over masks of its own, which may let an image's tokens see each other.
    """
    text = model.config.get_text_config(decoder=True)
    told = json.dumps(getattr(text, "rope_parameters", None), default=str)
    both_ways = not {"token_type_ids", "mm_token_type_ids"}.isdisjoint(inspect.signature(model.forward).parameters)
    if "mrope_section" in told or (both_ways and not masks_itself):
        raise ConfigError(
            f"{type(model).__name__} attends to images in both directions, or counts their positions in two "
            "dimensions; expected a model that takes media as so many tokens, such as LLaVA"
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
