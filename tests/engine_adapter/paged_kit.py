"""A small engine for tests of the runner: block tables by hand over scattered slots, no store, no pool.

Slots are drawn at random so that a table is never in order, and the slab is filled with NaN first: whatever reads a
place that nobody wrote shows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from allocator import ExtentLayout, KVGeometry, Slab
from engine_adapter.attention import AttentionBackend
from engine_adapter.batch import SequenceSlice, StepBatch
from engine_adapter.runner import HFRunner
from quant import BlockCodec, BlockShape, get_codec

torch.set_num_threads(1)


def make_slab(
    geometry: KVGeometry, blocks: int, *, cold: bool = False, codec: BlockCodec | None = None
) -> tuple[Slab, list[list[int]]]:
    """A slab with room for `blocks` in each class, every byte 0xff (NaN), and the slot numbers of each class.

    Classes (2 * group + form) lie in extents of their own, as the pool would have it: slots never overlap.
    """
    groups = range(len(geometry.groups))
    full = tuple(geometry.full_slot_bytes(group) for group in groups)
    codec = codec or get_codec("int4")
    shapes = [
        BlockShape(len(g.layers), g.kv_heads, geometry.block_tokens, g.key_dim, g.value_dim) for g in geometry.groups
    ]
    records = tuple(codec.encoded_bytes(shape, geometry.dtype) for shape in shapes) if cold else ()
    extent_bytes = 2 * math.lcm(*(-(-size // 64) * 64 for size in full))
    classes = 2 * len(full)
    per_class = -(-blocks * max(full) // extent_bytes) + 1
    slab = Slab(ExtentLayout(per_class * classes * extent_bytes, full, records, extent_bytes), geometry)
    slab.bytes.fill_(0xFF)
    slots = []
    for number in range(classes):
        per_extent = slab.layout.per_extent[number]
        first = number * per_class * per_extent
        slots.append(list(range(first, first + blocks)) if per_extent else [])
    return slab, slots


class Paged:
    """One runner over one slab; sequences are names with a table per group."""

    def __init__(
        self,
        model: Any,
        *,
        blocks: int = 64,
        seed: int = 0,
        backend: AttentionBackend | None = None,
        cold: bool = False,
        geometry: KVGeometry | None = None,
    ) -> None:
        self.runner = HFRunner(model, backend=backend, geometry=geometry)
        self.geometry = self.runner.geometry
        self.slab, self.free = make_slab(self.geometry, blocks, cold=cold)
        self.cache = self.runner.attach(self.slab, get_codec("int4") if cold else None)
        draw = random.Random(seed)
        for slots in self.free:
            draw.shuffle(slots)
        self.tables: dict[str, list[list[int]]] = {}
        self.lengths: dict[str, int] = {}

    def slice(self, name: str, token_ids: Sequence[int], rows: int = 1) -> SequenceSlice:
        """The next tokens of a sequence, with room made for them and blocks behind each window dropped."""
        size = self.geometry.block_tokens
        tables = self.tables.setdefault(name, [[] for _ in self.geometry.groups])
        start = self.lengths.get(name, 0)
        end = start + len(token_ids)
        self.lengths[name] = end
        mappings = []
        for group, table in enumerate(tables):
            while len(table) * size < end:
                table.append(self.free[2 * group].pop() << 1)
            window = self.geometry.groups[group].window_tokens
            self.drop(table, max(0, start - window + 1) // size if window else 0)
            positions = np.arange(start, end)
            slots = np.array(table, np.int64) >> 1
            mappings.append(slots[positions // size] * size + positions % size)
        return SequenceSlice(
            name, tuple(token_ids), start, rows, tuple(np.array(table, np.int64) for table in tables), tuple(mappings)
        )

    def drop(self, table: list[int], count: int) -> None:
        """The first `count` blocks have left the window."""
        table[:count] = [-1] * count

    def step(self, *parts: SequenceSlice) -> torch.Tensor:
        """Logits, float32[rows, vocab]."""
        return self.runner.forward(StepBatch(parts)).float()

    def prefill(self, name: str, token_ids: Sequence[int], chunk: int = 1 << 20) -> torch.Tensor:
        """Logits float32[vocab] of the last token."""
        for at in range(0, len(token_ids), chunk):
            last = self.step(self.slice(name, token_ids[at : at + chunk], int(at + chunk >= len(token_ids))))
        return last[-1]

    def generate(self, name: str, token_ids: Sequence[int], count: int, chunk: int = 1 << 20) -> list[int]:
        """Greedy tokens."""
        found = [int(self.prefill(name, token_ids, chunk).argmax())]
        while len(found) < count:
            found.append(int(self.step(self.slice(name, found[-1:]))[-1].argmax()))
        return found

    def rewind(self, name: str, length: int) -> None:
        """Forget the tokens of a sequence from `length` on; blocks are kept."""
        self.lengths[name] = length


def reference_tokens(model: Any, token_ids: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of transformers' own generate, which never stops early here."""
    ids = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, min_new_tokens=count,
            pad_token_id=0,
        )  # fmt: skip
    return [int(token) for token in found[0, ids.shape[1] :]]


def reference_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """float32[tokens, vocab] of one plain forward pass."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits
    return logits[0].float()


def tiny_config(family: str) -> Any:
    """A config of a family, small enough to run in milliseconds: window 20 where it has one, scores of some size."""
    import transformers as hf

    common: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.35,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    make: dict[str, Callable[[], Any]] = {
        "llama": lambda: hf.LlamaConfig(**common),
        "mistral": lambda: hf.MistralConfig(**common, sliding_window=20),
        "qwen3": lambda: hf.Qwen3Config(**common),
        "gemma2": lambda: hf.Gemma2Config(
            **common, sliding_window=20, query_pre_attn_scalar=24, attn_logit_softcapping=5.0
        ),
        "gemma3": lambda: hf.Gemma3TextConfig(
            **common, sliding_window=20, query_pre_attn_scalar=24, sliding_window_pattern=3
        ),
        "gpt_oss": lambda: hf.GptOssConfig(
            **common, sliding_window=20, num_local_experts=2, num_experts_per_tok=1,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "deepseek_v3": lambda: hf.DeepseekV3Config(
            **{**common, "head_dim": 8, "num_key_value_heads": 4}, moe_intermediate_size=32, n_routed_experts=4,
            num_experts_per_tok=2, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=2,
            kv_lora_rank=24, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        ),
        "gemma3n": lambda: hf.Gemma3nTextConfig(
            **{**common, "num_hidden_layers": 6}, sliding_window=20, num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 3, vocab_size_per_layer_input=97,
            hidden_size_per_layer_input=8, laurel_rank=8, activation_sparsity_pattern=[0.0] * 6,
        ),
        "mha": lambda: hf.LlamaConfig(**{**common, "num_key_value_heads": 4}),
        "mqa": lambda: hf.LlamaConfig(**{**common, "num_key_value_heads": 1}),
    }  # fmt: skip
    return make[family]()


def tiny_model(family: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random-weight model of a family, float32, eager or sdpa attention as transformers picks it."""
    import transformers as hf

    config = tiny_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # A norm of weight one and sinks of zero would hide a mistake; so would logits that never change.
            if "sinks" in name:
                parameter.normal_(0.0, 2.0)
    return model
