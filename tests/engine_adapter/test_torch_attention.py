"""What only the torch backend does: buckets, and reading a shared INT4 block once."""

from __future__ import annotations

from dataclasses import replace

import torch

from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.torch_paged import TorchPagedAttention
from tests.engine_adapter.attention_kit import MIXED_LENGTHS, Scene


def test_small_buckets_give_the_same() -> None:
    scene = Scene(MIXED_LENGTHS, cold_share=0.5)
    settings = AttentionSettings(0.25)
    torch.testing.assert_close(
        scene.run(TorchPagedAttention(1), 1, settings), scene.run(TorchPagedAttention(), 1, settings), rtol=0, atol=2e-6
    )


def test_shared_int4_blocks_are_read_once() -> None:
    scene = Scene([(160, 1), (160, 1)], cold_share=1.0)
    first, second = scene.sequences
    table = second.part.tables[0].copy()
    table[:5] = first.part.tables[0][:5]
    second.keys[:, :, :80], second.values[:, :, :80] = first.keys[:, :, :80], first.values[:, :, :80]
    second.part = replace(second.part, tables=(table,))
    plan = TorchPagedAttention().plan(scene.cache, 0, scene.batch())
    assert plan.cold_slots is not None
    assert len(plan.cold_slots) == 15
    scene.check(TorchPagedAttention())
