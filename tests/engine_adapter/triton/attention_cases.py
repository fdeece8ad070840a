"""The cases that the triton backend must get right, on whichever device it runs: interpreter or card.

Expected values are float64 attention over what the tables name: the slab's own numbers for full blocks, the codec's
decoded float32 for INT4 ones. All other bytes of the slab are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from allocator import Slab
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.attention.triton_paged import TritonPagedAttention
from engine_adapter.paged_cache import PagedCache
from tests.engine_adapter.attention_kit import LAYERS, SINKS, Scene

SHORT = [(0, 1), (5, 1), (15, 1), (16, 1), (100, 1)]
VERIFY = [(40, 8), (0, 3), (33, 1), (15, 16)]
BFLOAT16_ERROR = 5e-3
"""Rounding the output alone is 2e-3, and twice that in the interpreter, which cuts off."""


class TritonScene(Scene):
    """A Scene whose INT4 blocks count as what they decode to in float32, on any device."""

    def __init__(self, lengths: list[tuple[int, int]], *, device: str = "cpu", **settings: Any) -> None:
        super().__init__(lengths, **settings)
        if device != "cpu":
            slab = Slab(self.slab.layout, self.geometry, device)
            slab.bytes.copy_(self.slab.bytes)
            self.slab, self.cache = slab, PagedCache(slab, self.geometry, self.cache.cold_codec)
        self.device = device

    def _cool(self, table: np.ndarray, block: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super()._cool(table, block, keys, values)
        self.cooled.append((int(table[block]) >> 1, block))

    def _make(self, name: str, context: int, new: int) -> Any:
        self.cooled: list[tuple[int, int]] = []
        made = super()._make(name, context, new)
        size, group = self.geometry.block_tokens, self.geometry.groups[0]
        for slot, block in self.cooled:
            payload = self.slab.slot_bytes_view(1, slot)
            keys = torch.empty((LAYERS, group.kv_heads, size, group.key_dim))
            values = torch.empty((LAYERS, group.kv_heads, size, group.value_dim))
            self.codec.decode_into(payload, keys, values if group.value_dim else None)
            span = slice(block * size, block * size + size)
            made.keys[:, :, span], made.values[:, :, span] = keys.double(), values.double()
        return made

    def attend(self, backend: Any, layer: int, settings: AttentionSettings) -> torch.Tensor:
        """float64 on the CPU."""
        plan = backend.plan(self.cache, 0, self.batch())
        dtype = self.cache.dtype
        keys = torch.cat([one.keys[layer, :, one.part.start :].transpose(0, 1) for one in self.sequences])
        values = torch.cat([one.values[layer, :, one.part.start :].transpose(0, 1) for one in self.sequences])
        given = values.to(self.device, dtype) if values.shape[-1] else None
        query = self.query.to(self.device)
        return backend.attend(plan, layer, query, keys.to(self.device, dtype), given, settings).double().cpu()


@dataclass(frozen=True)
class Case:
    """scene: arguments of TritonScene. error: bound on the relative error of the whole output."""

    name: str
    lengths: list[tuple[int, int]]
    scene: dict[str, Any] = field(default_factory=dict)
    settings: AttentionSettings = field(default_factory=lambda: AttentionSettings(0.25))
    error: float = 2e-6


def _dims(key_dim: int, value_dim: int | None = None) -> dict[str, Any]:
    return {"key_dim": key_dim, "value_dim": key_dim if value_dim is None else value_dim, "kv_heads": 2}


_LATENT = {"kv_heads": 1, "value_dim": 0}

CASES = [
    Case("full", SHORT),
    Case("int4", SHORT, {"cold_share": 1.0}),
    Case("mixed", [*SHORT, (130, 1)], {"cold_share": 0.5}),
    Case("one query head a KV head", SHORT, {"cold_share": 0.5, "kv_heads": 6}),
    Case("three query heads a KV head", SHORT, {"cold_share": 0.5, "kv_heads": 2}),
    Case("six query heads, one KV head", VERIFY, {"cold_share": 0.5, "kv_heads": 1}),
    Case("verify slices", VERIFY, {"cold_share": 0.5}),
    Case("prefill beside decode", [(100, 1), (20, 30), (0, 40), (64, 5)], {"cold_share": 0.5}),
    Case("prefill alone", [(20, 30), (0, 17)], {"cold_share": 0.5}),
    Case("window", [*SHORT, *VERIFY], {"cold_share": 0.5, "window": 20}),
    Case("window of one", [*SHORT, *VERIFY], {"cold_share": 0.5, "window": 1}),
    Case("window, nothing cold", [(150, 1), (64, 5)], {"window": 33}),
    Case("sinks", SHORT, {"cold_share": 0.5}, AttentionSettings(0.25, sinks=SINKS)),
    Case("sinks in bfloat16", SHORT, {}, AttentionSettings(0.25, sinks=SINKS.bfloat16())),
    Case("softcap", SHORT, {"cold_share": 0.5}, AttentionSettings(0.3, softcap=2.0)),
    Case(
        "all at once", [(150, 1), *VERIFY], {"cold_share": 0.7, "window": 64},
        AttentionSettings(0.2, softcap=3.0, sinks=SINKS),
    ),
    Case("blocks of two runs", [(100, 1), (64, 5)], {"cold_share": 0.6, "block_tokens": 32}),
    Case("large scores", [(150, 1)], {"cold_share": 0.5}, AttentionSettings(4.0), 2e-5),
    Case("dims 24 and 16", SHORT, {"cold_share": 0.5, **_dims(24, 16)}),
    Case("dims 8", SHORT, {"cold_share": 0.5, **_dims(8)}),
    Case("dims 80", [(100, 1)], {"cold_share": 0.5, **_dims(80)}, AttentionSettings(0.1)),
    Case("dims 96", [(100, 1)], {"cold_share": 0.5, **_dims(96)}, AttentionSettings(0.1)),
    Case("dims 128", [(100, 1), (40, 3)], {"cold_share": 0.5, **_dims(128)}, AttentionSettings(0.1)),
    Case("dims 192 and 128", [(100, 1)], {"cold_share": 0.5, **_dims(192, 128)}, AttentionSettings(0.1)),
    Case("dims 256", [(100, 1)], {"cold_share": 0.5, **_dims(256)}, AttentionSettings(0.1)),
    Case("dims 192, float16", [(100, 1)], {"cold_share": 0.5, **_dims(192), "dtype": "float16"},
         AttentionSettings(0.1), 1e-3),
    Case("dims 512, float16", [(60, 1)], {"cold_share": 0.5, **_dims(512), "dtype": "float16"},
         AttentionSettings(0.05), 1e-3),
    Case("latent", [*SHORT, (64, 5)], {"cold_share": 0.5, "key_dim": 24, **_LATENT},
         AttentionSettings(0.2, latent_value_dim=16)),
    Case("latent, V reaches into the upper half", [(100, 1)], {"cold_share": 1.0, "key_dim": 80, **_LATENT},
         AttentionSettings(0.1, latent_value_dim=64)),
    Case("latent of DeepSeek", [(60, 1)], {"cold_share": 0.5, "key_dim": 576, "dtype": "float16", **_LATENT},
         AttentionSettings(0.05, latent_value_dim=512), 1e-3),
    Case("float16", [*SHORT, *VERIFY], {"cold_share": 0.5, "dtype": "float16"}, AttentionSettings(0.25), 1e-3),
    Case("bfloat16", [*SHORT, *VERIFY], {"cold_share": 0.5, "dtype": "bfloat16"}, AttentionSettings(0.25),
         BFLOAT16_ERROR),
    Case("bfloat16, all INT4", [(120, 1)], {"cold_share": 1.0, "dtype": "bfloat16"}, AttentionSettings(0.25),
         BFLOAT16_ERROR),
]  # fmt: skip


def check_case(case: Case, device: str, backend: TritonPagedAttention) -> None:
    """Raises AssertionError unless the kernels are within the case's error; says so when they did not run at all."""
    scene = TritonScene(case.lengths, device=device, **case.scene)
    if any(new <= 16 for _, new in case.lengths):
        assert backend.plan(scene.cache, 0, scene.batch()).decode is not None, "the kernels were not asked"
    layer = LAYERS - 1
    found, expected = scene.attend(backend, layer, case.settings), scene.expected(layer, case.settings)
    assert found.isfinite().all()
    error = float((found - expected).norm() / expected.norm())
    assert error < case.error, f"relative error {error:.2e}"


def torch_error(case: Case, device: str) -> float:
    """The torch backend's relative error on the same case, to compare with."""
    scene = TritonScene(case.lengths, device=device, **case.scene)
    found, expected = scene.attend(TorchPagedAttention(), 0, case.settings), scene.expected(0, case.settings)
    return float((found - expected).norm() / expected.norm())
