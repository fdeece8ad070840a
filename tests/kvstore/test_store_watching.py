"""What a store tells about itself: events of its device blocks, gauges, and poisoned slots for debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvstore import AllCleared, BlockRemoved, BlockStored, HostTier
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
SLOT = full_geometry().full_slot_bytes(0)


def test_case_117_events_follow_the_blocks_of_the_device(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=12, host_blocks=12, load_always=True)
    reader = store.events.subscribe(64)
    prompt = list(range(3 * B + 1))
    hashes = store.prepare(prompt).hashes
    run_prompt(store, "a", prompt, exact=True)
    run_prompt(store, "b", [*prompt, 5])  # takes what is there: nothing new is stored
    known: set[bytes] = set()

    def follow() -> set[bytes]:
        for one in reader.drain():
            event = one.event
            if isinstance(event, BlockStored):
                known.update(event.hashes)
                assert event.parent == (
                    None if event.hashes[0] == hashes[0] else hashes[hashes.index(event.hashes[0]) - 1]
                )
                assert (event.tier, event.group, event.codec, event.exact) == ("device", 0, "raw", True)
            elif isinstance(event, BlockRemoved):
                known.difference_update(event.hashes)
            else:
                known.clear()
        return known

    assert follow() == set(hashes)
    store.preempt("a")
    store.finish("b")
    store.step()
    assert follow() == set(hashes)
    store.pool.drop_all_idle()
    assert follow() == set()
    run_prompt(store, "c", prompt)
    assert follow() == set(hashes)
    store.reset()
    last = store.events.subscribe()
    assert follow() == set()
    compute(store, "c", list(range(700, 700 + B)))
    store.finish("c")
    assert last.drain() == [], "a sequence of before the reset names nothing"
    assert isinstance(AllCleared(), AllCleared)


def test_gauges_say_what_holds_when_they_are_read(make_store: Callable[..., KVStore]) -> None:
    executor = HeldExecutor()
    store = make_store(blocks=12, tiers=[HostTier(12 * SLOT, executor)])
    run_prompt(store, "a", list(range(3 * B)))
    run_prompt(store, "b", list(range(500, 500 + B + 4)))
    store.preempt("a")
    usage = store.usage()
    seen = store.metrics.snapshot()
    assert seen["sequences"] == 1
    assert seen['queue_depth{queue="spilling"}'] == 3
    assert seen['tier_used_bytes{tier="host"}'] == 0
    assert seen['tier_capacity_bytes{tier="host"}'] == 12 * SLOT
    assert seen["resident_tokens"] == usage.resident_tokens == 4 * B + 4
    assert seen["waste_fraction"] == usage.waste_fraction > 0
    name = store.geometry.groups[0].name
    assert seen[f'class_bytes{{class="{name}:full"}}'] == 5 * SLOT
    executor.run()
    store.step()
    text = store.metrics.prometheus_text()
    assert f'kvstore_tier_used_bytes{{tier="host"}} {float(3 * SLOT)}' in text
    assert 'kvstore_queue_depth{queue="spilling"} 0.0' in text
    assert store.metrics.get("transfers", tier="host", kind="put", result="ok") == 1
    assert store.metrics.get("transfer_bytes", tier="host", kind="put") == 3 * SLOT


@pytest.mark.parametrize("poison", [True, False])
def test_poison_shows_a_read_of_what_was_not_written(make_store: Callable[..., KVStore], poison: bool) -> None:
    store = make_store(blocks=8, debug_poison=poison)
    prompt = list(range(B + 4))
    store.admit("a", prompt)
    store.grow("a", len(prompt))
    assert store.slab is not None
    keys = store.slab.keys_view(0)
    first, last = (entry >> 1 for entry in store.tables("a")[0].tolist())
    assert bool(torch.isnan(keys[first]).all()) == poison
    assert not torch.isnan(keys[last, :, :, 4:]).any(), "a mask does not remove NaN"
    store.abort("a")
    run_prompt(store, "b", prompt)
    check_bytes(store, "b", prompt)
