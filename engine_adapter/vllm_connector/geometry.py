"""From vLLM's config to the geometry of the store: the same that transformers' adapters have, so that they share.

All but latents: vLLM keeps their rope part interleaved, transformers in halves.
"""

from __future__ import annotations

from typing import Any

from allocator import ConfigError, KVGeometry
from engine_adapter.model_geometry import dtype_name, position_scheme
from kvstore.planning.model_config import cache_groups

_FP8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def stored_dtype(vllm_config: Any) -> str:
    """Of a value in vLLM's cache. ConfigError for one that the store does not know."""
    model, cache = dtype_name(vllm_config.model_config.dtype), vllm_config.cache_config.cache_dtype
    if cache in ("auto", model):
        return model
    if cache not in _FP8:
        raise ConfigError(f"kv_cache_dtype: got {cache!r}; expected auto or one of {', '.join(_FP8)}")
    return _FP8[cache]


def engine_geometry(vllm_config: Any, kv_cache_config: Any, block_tokens: int, scales: str = "") -> KVGeometry:
    """Groups from the model's own config, checked against vLLM's cache groups. ConfigError where they differ.

    scales: names the scales of an FP8 cache, which are part of who its blocks are.
    """
    text = vllm_config.model_config.hf_text_config
    geometry = KVGeometry(
        groups=cache_groups(text),
        block_tokens=block_tokens,
        dtype=stored_dtype(vllm_config),
        position=position_scheme(text, latent_rope="interleaved"),
        scale_identity=scales,
    )
    for group in geometry.groups:
        if group.value_dim not in (0, group.key_dim):
            raise ConfigError(
                f"{group.name!r} has key dim {group.key_dim}, value dim {group.value_dim}: not supported yet"
            )
    layers = sum(len(group.layers) for group in geometry.groups)
    engine_layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    if layers != engine_layers:
        raise ConfigError(f"vLLM caches {engine_layers} layers, the model's config has {layers}: not supported")
    return geometry
