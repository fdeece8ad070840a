"""From a Hugging Face config to cache groups and to what computing with the model costs.

Two kinds of input: a transformers config object (the engine's runner; it has every field), and the `config.json`
itself, which leaves out what the model's class fills in. `read_config` fills in the few of those that decide the KV, so
that both meet in `cache_groups`. Pure reading; any thread. Refusals say which field, what was given and expected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from allocator import CacheGroup, ConfigError, GroupKind, KVGeometry
from kvstore.planning.foreign_layers import FULL_ATTENTION, SLIDING_ATTENTION, refuse_foreign

_REQUIRED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_COUNTS = (
    *_REQUIRED,
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "num_local_experts",
    "n_routed_experts",
    "num_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "max_position_embeddings",
)
_NEVER_ZERO = (*_REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
_LATENT_TYPES = ("deepseek_v2", "deepseek_v3")
_COUNT_LIMIT = 1 << 24
_LAYERS_LIMIT = 2048
# Every n-th layer is full, the others have the window, where a config of that type does not list its layers.
_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}
_QWEN2 = {"use_sliding_window": False, "max_window_layers": 28, "num_key_value_heads": 32}
_QWEN2_VL = {"use_sliding_window": False, "max_window_layers": 80, "num_key_value_heads": 8}
_FILLED_IN: dict[str, dict[str, Any]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
                    "vocab_size": 262208, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128},
    "qwen2": _QWEN2,
    "qwen2_moe": {**_QWEN2, "num_key_value_heads": 16},
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": {**_QWEN2, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"sliding_window": 4096, "tie_word_embeddings": True},
    "starcoder2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
}  # fmt: skip
_TWO_MATRICES = ("starcoder2", "gpt_neox", "phi")  # feed-forward layers without a gate


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts: `parameters` are those of one routed expert over all `layers` that have experts."""

    layers: int
    count: int
    per_token: int
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model as a planner sees it.

    groups: its cache groups, unsharded. score_dim, value_dim: width of a head's product with a key and with a value
    when a prompt is computed (MLA: of the expanded heads). base_parameters: all weights but embeddings and routed
    experts. embedding_parameters: one table; `tied` says that it is also the output layer. quantization: how
    the weights are published, where that is not in 16 bits.
    """

    name: str
    groups: tuple[CacheGroup, ...]
    dtype: str
    hidden_size: int
    query_heads: int
    score_dim: int
    value_dim: int
    base_parameters: int
    embedding_parameters: int
    tied: bool
    experts: Experts | None
    context_limit: int | None
    quantization: str | None = None

    @property
    def layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def parameters(self) -> int:
        """All of them."""
        routed = self.experts.parameters * self.experts.count if self.experts else 0
        return self.base_parameters + self.embedding_parameters * (1 if self.tied else 2) + routed

    @property
    def active_parameters(self) -> int:
        """Those that one token is multiplied with in all layers; the output layer is not among them."""
        routed = self.experts.parameters * self.experts.per_token if self.experts else 0
        return self.base_parameters + routed

    def geometry(self, block_tokens: int, dtype: str) -> KVGeometry:
        return KVGeometry(groups=self.groups, block_tokens=block_tokens, dtype=dtype)


def cache_groups(text: Any) -> tuple[CacheGroup, ...]:
    """A group of full (or latent) layers, a group per sliding window, or both, from a config's attributes."""
    heads = int(text.num_attention_heads)
    windows = layer_windows(text)
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        if any(windows):
            raise ConfigError(f"sliding_window: got {text.sliding_window!r} beside kv_lora_rank; expected one of them")
        return (
            CacheGroup(
                kind=GroupKind.LATENT,
                layers=tuple(range(len(windows))),
                kv_heads=1,
                key_dim=int(latent) + int(text.qk_rope_head_dim),
                value_dim=0,
            ),
        )
    key_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return tuple(
        CacheGroup(
            kind=GroupKind.FULL if window is None else GroupKind.SLIDING,
            layers=tuple(layer for layer, found in enumerate(windows) if found == window),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            key_dim=key_dim,
            value_dim=int(getattr(text, "v_head_dim", None) or key_dim),
            window_tokens=window,
        )
        for window in sorted(set(windows), key=lambda tokens: (tokens is not None, tokens or 0))
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


def load_shape(path: str | Path) -> ModelShape:
    """The shape of a `config.json`, or of the folder that has one. ConfigError says what is wrong with it."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}); expected a model's config.json") from error
    except (ValueError, RecursionError) as error:  # JSON, its encoding, or its depth
        raise ConfigError(f"{file}: not JSON ({error}); expected a model's config.json") from error
    try:
        return read_config(config, name=file.resolve().parent.name if file.name == "config.json" else file.stem)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def read_config(config: object, name: str) -> ModelShape:
    """The shape of a parsed `config.json` (of a multimodal model: of its text part)."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"got {type(config).__name__}; expected an object with a model's fields")
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config: got {type(text).__name__}; expected an object with a model's fields")
    text = dict(text)
    kind = str(text.get("model_type") or config.get("model_type") or "")
    kind = "gemma3_text" if kind == "gemma3" else kind
    filled = {**_FILLED_IN.get(kind, {}), **text}  # null is an answer too: Mistral's "no window"
    filled.setdefault("quantization_config", config.get("quantization_config"))  # of a multimodal model: outside
    fields = {key: value for key, value in filled.items() if value is not None}
    refuse_foreign(
        fields, kind, is_part=bool(config.get("text_config"))
    )  # first: such a model has no use for other fields
    _check_fields(fields)
    _list_layers(fields, kind)
    view = SimpleNamespace(**fields)
    groups = cache_groups(view)
    return _shape(fields, groups, name)


def _check_fields(fields: Mapping[str, Any]) -> None:
    for field in _REQUIRED:
        if field not in fields:
            raise ConfigError(f"{field}: missing; expected a count (model_type {fields.get('model_type')!r})")
    for field in _COUNTS:
        value = fields.get(field)
        if field not in fields or (value == 0 and field not in _NEVER_ZERO):
            continue
        limit = _LAYERS_LIMIT if field == "num_hidden_layers" else _COUNT_LIMIT
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ConfigError(f"{field}: got {value!r}; expected an integer in [1, {limit}]")
    if fields.get("model_type") in _LATENT_TYPES and not fields.get("kv_lora_rank"):
        raise ConfigError(f"kv_lora_rank: got {fields.get('kv_lora_rank')!r}; expected a count in a model with MLA")
    heads, kv_heads = fields["num_attention_heads"], fields.get("num_key_value_heads")
    if kv_heads and heads % kv_heads:
        raise ConfigError(f"num_key_value_heads: got {kv_heads}; expected a divisor of num_attention_heads, {heads}")
    if not fields.get("head_dim") and not fields.get("kv_lora_rank") and fields["hidden_size"] % heads:
        raise ConfigError(
            f"hidden_size: got {fields['hidden_size']} for {heads} heads and no head_dim; expected a multiple"
        )
    if fields.get("kv_lora_rank"):
        for field in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"):
            if not fields.get(field):
                raise ConfigError(f"{field}: got {fields.get(field)!r}; expected a count beside kv_lora_rank")


def _list_layers(fields: dict[str, Any], kind: str) -> None:
    """Write out `layer_types` where the config leaves them to the model's class."""
    count = fields["num_hidden_layers"]
    given = fields.get("layer_types")
    if given is not None:
        if not isinstance(given, list) or len(given) != count:
            raise ConfigError(f"layer_types: got {given!r:.80}; expected a list of {count}, one a layer")
        return
    pattern = fields.get("sliding_window_pattern", _PATTERNS.get(kind))
    if pattern is not None:
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise ConfigError(f"sliding_window_pattern: got {pattern!r}; expected a count of layers")
        fields["layer_types"] = [
            SLIDING_ATTENTION if (layer + 1) % pattern else FULL_ATTENTION for layer in range(count)
        ]
    elif fields.get("use_sliding_window") and fields.get("sliding_window"):
        first = fields.get("max_window_layers", 0)
        if isinstance(first, bool) or not isinstance(first, int):
            raise ConfigError(f"max_window_layers: got {first!r}; expected a count of layers")
        fields["layer_types"] = [FULL_ATTENTION if layer < first else SLIDING_ATTENTION for layer in range(count)]


def _shape(fields: Mapping[str, Any], groups: tuple[CacheGroup, ...], name: str) -> ModelShape:
    hidden, layers, heads = fields["hidden_size"], fields["num_hidden_layers"], fields["num_attention_heads"]
    if fields.get("kv_lora_rank"):
        score_dim = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        value_dim = fields["v_head_dim"]
    else:
        score_dim, value_dim = groups[0].key_dim, groups[0].value_dim
    dense_layers, experts, shared = _feed_forward(fields)
    matrices = 2 if fields.get("model_type") in _TWO_MATRICES else 3
    feed_forward = matrices * hidden * (fields.get("intermediate_size") or 4 * hidden) * dense_layers + shared
    attention = layers * _attention_parameters(fields, score_dim, value_dim)
    return ModelShape(
        name=name,
        groups=groups,
        dtype=str(fields.get("torch_dtype") or fields.get("dtype") or "bfloat16"),
        hidden_size=hidden,
        query_heads=heads,
        score_dim=score_dim,
        value_dim=value_dim,
        base_parameters=attention + feed_forward + 2 * hidden * layers,
        embedding_parameters=fields["vocab_size"] * hidden,
        tied=bool(fields.get("tie_word_embeddings", False)),
        experts=experts,
        context_limit=fields.get("max_position_embeddings"),
        quantization=_quantization(fields),
    )


def _quantization(fields: Mapping[str, Any]) -> str | None:
    given = fields.get("quantization_config")
    return str(given.get("quant_method") or "a method without a name") if isinstance(given, Mapping) else None


def _attention_parameters(fields: Mapping[str, Any], score_dim: int, value_dim: int) -> int:
    """Of one layer, biases apart."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    output = heads * value_dim * hidden
    if latent := fields.get("kv_lora_rank"):
        rank = fields.get("q_lora_rank")
        query = rank * (hidden + heads * score_dim) if rank else hidden * heads * score_dim
        expanded = heads * (fields["qk_nope_head_dim"] + value_dim)
        return int(query + hidden * (latent + fields["qk_rope_head_dim"]) + latent * expanded + output)
    kv_heads = fields.get("num_key_value_heads") or heads
    return int(hidden * (heads * score_dim + kv_heads * (score_dim + value_dim)) + output)


def _feed_forward(fields: Mapping[str, Any]) -> tuple[int, Experts | None, int]:
    """(layers without experts, routed experts, parameters of shared experts and routers)."""
    hidden, layers = fields["hidden_size"], fields["num_hidden_layers"]
    count = fields.get("n_routed_experts") or fields.get("num_local_experts") or fields.get("num_experts")
    if not count:
        return layers, None, 0
    width = fields.get("moe_intermediate_size") or fields.get("intermediate_size") or 4 * hidden
    per_token = fields.get("num_experts_per_tok")
    if type(per_token) is not int or not 0 < per_token <= count:
        raise ConfigError(f"num_experts_per_tok: got {per_token!r}; expected a count up to {count}, the experts")
    dense = int(fields.get("first_k_dense_replace") or 0) + len(fields.get("mlp_only_layers") or ())
    with_experts = layers - dense
    shared_width = (fields.get("n_shared_experts") or 0) * width + (fields.get("shared_expert_intermediate_size") or 0)
    shared = with_experts * (3 * hidden * shared_width + hidden * count)
    one = 3 * hidden * width * with_experts
    return dense, Experts(layers=with_experts, count=count, per_token=per_token, parameters=one), shared
