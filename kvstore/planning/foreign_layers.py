"""Refuses configs some of whose layers keep something else than a key and a value a head and token.

A planner that takes a state, a convolution or another layer's KV for attention gives plausible numbers, all wrong. So
what is not known to attend is refused: model types by name, lists of what each layer is by their values, and fields
that only such layers have. Pure reading of what a person may have written: any value may be of any type.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from allocator import ConfigError

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
_ATTENDING = "layers that all attend in full or in a window"
_KV_HEADS = "num_key_value_heads"

_STATES = frozenset(
    {
        "mamba", "mamba2", "falcon_mamba", "codestral_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "retnet",
        "gla", "hgrn", "hgrn2", "delta_net", "gated_deltanet", "stripedhyena",
    }
)  # fmt: skip
_MIXED = frozenset(
    {
        "recurrent_gemma", "jamba", "zamba", "zamba2", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "hymba",
        "plamo2", "lfm2", "lfm2_moe", "lfm3", "minimax_text_01", "minimax_m1", "kimi_linear", "qwen3_next", "qwen3_5",
        "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid", "bailing_hybrid", "bailing_moe_linear",
        "zaya", "phi4flash", "samba", "griffin",
    }
)  # fmt: skip
_ENCODERS = frozenset(
    {
        "bert", "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "distilbert", "albert", "electra", "deberta",
        "deberta-v2", "mpnet", "modernbert", "nomic_bert", "eurobert", "neobert", "ernie", "esm", "big_bird",
        "mobilebert", "megatron-bert", "roformer", "rembert", "roc_bert", "longformer", "layoutlm", "xmod", "vit",
        "clip", "siglip",
    }
)  # fmt: skip
_ENCODER_DECODERS = frozenset(
    {"t5", "mt5", "umt5", "longt5", "t5gemma", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper", "led"}
)

# Fields that tell by being there (and not null, false, 0 or empty), with what was expected instead.
_FOREIGN = {
    "full_attention_interval": _ATTENDING,
    "attn_layer_period": _ATTENDING,
    "layers_block_type": _ATTENDING,
    "layer_group_size": _ATTENDING,
    "attention_chunk_size": _ATTENDING,
    "attention_window_size": "sliding_window",
    "cross_attention_layers": "layers that attend to the text",
    "num_kv_shared_layers": "layers with KV of their own",
    "kv_reuse_group": "layers with KV of their own",
    "use_cla": "layers with KV of their own",
    "index_topk": "layers without keys of an index",
    "index_n_heads": "layers without keys of an index",
    "per_layer_config": "layers that are all alike",
    "block_configs": "layers that are all alike",
    "global_head_dim": "one head_dim for all layers",
    "swa_head_dim": "one head_dim for all layers",
    "num_global_key_value_heads": f"one {_KV_HEADS} for all layers",
    "swa_num_key_value_heads": f"one {_KV_HEADS} for all layers",
    "attention_k_eq_v": "a value beside each key",
    "multi_query": _KV_HEADS,
    "multi_query_attention": _KV_HEADS,
    "multi_query_group_num": _KV_HEADS,
    "num_kv_heads": _KV_HEADS,
}
_TELLTALE = re.compile(
    r"mamba|ssm|conv(\d|_|$)|(use_)?short_conv|rwkv|lru_|time_(step|mix|decay)|recurrent|retention|lightning|hyena|"
    r"linear_(attn|attention|num|key|value|head|conv)|[ms]lstm|state_size|d_state|kda_|gdn_|delta_rule|"
    r"(full|global|local|linear)_att(n|ention)_(idx|ind|layer)|att(n|ention)_layer_(idx|ind|offset)|.*hybrid"
)
_KINDS = re.compile(r"(?=.*(layer|block|attn|attention|mixer))(.*_)?(types?|kinds?|pattern)(_|$)")
_OTHER_KINDS = re.compile(r"(mtp|mlp|moe|ffn|rope)_|.*norm")
"""Lists that say nothing of attention: feed-forward layers, and those that predict more than the next token."""


def refuse_foreign(fields: Mapping[str, Any], kind: str, *, is_part: bool = False) -> None:
    """ConfigError where a layer keeps something else, or nothing. is_part: of a model that also sees or hears."""
    _refuse_type(fields, kind)
    for name, value in fields.items():
        if (kinds := _strange_kinds(name, value)) and name == "layer_types":
            raise ConfigError(f"layer_types: got {kinds}; expected {FULL_ATTENTION} and {SLIDING_ATTENTION}")
        if expected := _ATTENDING if kinds else _expected(name, value):
            raise ConfigError(f"{name}: got {value!r:.80}; expected {expected} (model_type {kind!r})")
    _refuse_width(fields, kind)
    _refuse_encoder(fields, kind, is_part)


def _refuse_type(fields: Mapping[str, Any], kind: str) -> None:
    if kind in _STATES or kind in _MIXED or (kind == "minimax" and not fields.get("attn_type_list")):
        what = "recurrent" if kind in _STATES else "hybrid"
        where = "instead of KV" if kind in _STATES else "instead of KV, or beside it"
        raise ConfigError(
            f"model_type: got {kind!r}, which is {what}: layers keep a state {where}; expected {_ATTENDING}"
        )


def _strange_kinds(name: str, value: object) -> list[str]:
    """Of a list of what each layer is: those that are not known to attend as the planner counts it."""
    if not _KINDS.match(name) or _OTHER_KINDS.match(name):
        return []
    is_told = isinstance(value, list | tuple | dict) or ("pattern" in name and isinstance(value, str))
    found = set(_leaves(value)) if is_told else set()
    if name == "attn_type_list":  # MiniMax: 1 attends in full, 0 keeps a state
        return sorted(found - {"1"})
    return sorted(found - {FULL_ATTENTION, SLIDING_ATTENTION} if name == "layer_types" else found)


def _leaves(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield str(value)


def _expected(name: str, value: object) -> str:
    """What a field's being there contradicts; "" where nothing."""
    return "" if not value else _FOREIGN.get(name, _ATTENDING if _TELLTALE.match(name) else "")


def _refuse_width(fields: Mapping[str, Any], kind: str) -> None:
    """A head's width under a name that is not read, and is another than the one that would be taken."""
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    derived = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    for name in ("kv_channels", "hidden_size_per_head", "attention_head_dim"):
        given = fields.get(name)
        if given and given != fields.get("head_dim", derived):
            raise ConfigError(f"{name}: got {given!r:.80}; expected head_dim (model_type {kind!r})")


def _refuse_encoder(fields: Mapping[str, Any], kind: str, is_part: bool) -> None:
    if fields.get("is_encoder_decoder") or kind in _ENCODER_DECODERS:
        raise ConfigError(f"is_encoder_decoder: got a model of type {kind!r}; expected a decoder")
    named = fields.get("architectures")
    encodes = (
        kind in _ENCODERS
        or bool(fields.get("type_vocab_size"))  # segments of a text, as only BERT's family has
        or fields.get("is_causal") is False
        or (fields.get("use_bidirectional_attention") is True and not is_part)
        or (isinstance(named, list) and any(str(one).endswith("ForMaskedLM") for one in named))
    )
    if encodes and not fields.get("is_decoder"):
        raise ConfigError(f"model_type: got {kind!r}, an encoder, which keeps no KV between steps; expected a decoder")
    if fields.get("global_attn_every_n_layers") and not fields.get("layer_types"):
        raise ConfigError(
            f"layer_types: missing beside global_attn_every_n_layers; expected {FULL_ATTENTION} or "
            f"{SLIDING_ATTENTION} for each layer"
        )
