"""A slower tier that hangs takes nothing from its neighbour: no buffer, no place in the queue, no time at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import write_behind
from tests.kvstore.driving import run_prompt
from tests.kvstore.writing_kit import SLOT, DistantTier, distant, prompt, serve

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore


def test_a_hung_tier_does_not_hold_the_buffers_of_another(
    make_store: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_behind, "_STAGED_BYTES", 8 * SLOT)
    hung, _ = distant(name="hung")
    disk = DistantTier(64 * SLOT, name="disk")
    store = make_store(blocks=100, tiers=[hung, disk], spill_policy="everything")
    serve(store, "a", prompt(1, 20))
    for _ in range(10):
        store.step()
    assert disk.copy_count == 20
    store.check_invariants()


def test_a_full_queue_of_a_hung_tier_does_not_keep_a_close_from_another(make_store: Callable[..., KVStore]) -> None:
    hung, _ = distant(name="hung", blocks=256)
    disk = DistantTier(256 * SLOT, name="disk")
    store = make_store(blocks=200, tiers=[hung, disk], spill_queue_blocks=20, spill_policy="everything")
    run_prompt(store, "a", prompt(1, 90))
    store.close(drain_seconds=0.5)
    assert disk.copy_count == 90
    lost = [
        store.metrics.get("dropped_blocks", tier="hung", cause=cause) for cause in ("queue_full", "close", "cancelled")
    ]
    assert sum(lost) >= 90 - 20
