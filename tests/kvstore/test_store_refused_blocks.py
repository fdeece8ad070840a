"""Blocks that the codec refuses stay raw and are asked about once, however short memory is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.kvstore.driving import run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16


def test_refused_blocks_are_not_encoded_again_and_again(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=24, codec="int4", residual_tokens=16)
    prompt = list(range(16 * B))
    run_prompt(store, "a", prompt)
    assert store.slab is not None
    for entry in store.tables("a")[0].tolist():
        store.slab.keys_view(0)[entry >> 1, 0, 0, 0, 0] = torch.nan
    store.finish("a")  # idle, and hardly any slot is free: they are cooled under pressure
    for _ in range(20):
        store.step()
    refused = store.metrics.get("kept_raw_blocks", cause="error_bound")
    assert 0 < refused <= 16
    for _ in range(20):
        store.step()
    assert store.metrics.get("kept_raw_blocks", cause="error_bound") == refused
    run_prompt(store, "b", list(range(5000, 5000 + 20 * B)))  # evicts them; ids come back with other blocks
    store.finish("b")
    for _ in range(20):
        store.step()
    assert store.metrics.get("cooled_blocks", cause="pressure") + store.metrics.get("cooled_blocks", cause="age") > 0
    store.check_invariants()
