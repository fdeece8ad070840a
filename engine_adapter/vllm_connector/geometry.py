"""From vLLM's config to the geometry of the store: the same that transformers' adapters have, so that they share.

All but latents: vLLM keeps their rope part interleaved, transformers in halves.
"""

from __future__ import annotations

from typing import Any

from allocator import ConfigError, KVGeometry
from engine_adapter.model_geometry import dtype_name, position_scheme
from kvstore.planning.model_config import cache_groups


def engine_geometry(vllm_config: Any, kv_cache_config: Any, block_tokens: int) -> KVGeometry:
    """Groups from the model's own config, checked against vLLM's cache groups. ConfigError where they differ."""
    text = vllm_config.model_config.hf_text_config
    if vllm_config.cache_config.cache_dtype not in ("auto", dtype_name(vllm_config.model_config.dtype)):
        raise ConfigError(
            f"kv_cache_dtype: got {vllm_config.cache_config.cache_dtype!r}; expected auto: scales of FP8 caches are "
            "not part of the identity yet"
        )
    geometry = KVGeometry(
        groups=cache_groups(text),
        block_tokens=block_tokens,
        dtype=dtype_name(vllm_config.model_config.dtype),
        position=position_scheme(text, latent_rope="interleaved"),
    )
    for group in geometry.groups:
        if group.value_dim != group.key_dim:
            raise ConfigError(
                f"{group.name!r} has key dim {group.key_dim}, value dim {group.value_dim}: not supported yet"
            )
    layers = sum(len(group.layers) for group in geometry.groups)
    engine_layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
    if layers != engine_layers:
        raise ConfigError(f"vLLM caches {engine_layers} layers, the model's config has {layers}: not supported")
    return geometry
