"""The device's eviction policy in a live store: what it is told, what it gains, and that it costs no call anything."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from allocator.eviction_learned import Learned
from kvstore import ConfigError, Identity, KVStore, KVStoreConfig
from kvstore.reuse_notes import _NOTES_MAX, NOTES_PER_STEP
from tests.kvstore.conftest import full_geometry

B = 16
GEOMETRY = full_geometry()


def make(policy: str, blocks: int = 480) -> KVStore:
    slot_bytes = -(-GEOMETRY.full_slot_bytes(0) // 64) * 64
    config = KVStoreConfig(device_bytes=blocks * slot_bytes, codec="raw", io_threads="inline", eviction_policy=policy)
    return KVStore(GEOMETRY, Identity(model="toy", weights="w", geometry=GEOMETRY), config, device="absent")


def serve(store: KVStore, name: str, prompt: list[int]) -> int:
    reused = store.admit(name, prompt).reused_tokens
    store.grow(name, len(prompt) - reused)
    store.commit(name, prompt[reused:])
    store.finish(name)
    store.step()
    return reused


def documents_and_one_offs(store: KVStore, requests: int = 2400) -> int:
    """Half of the requests ask about 60 documents of 12 blocks, half are prompts of 30 that never come back."""
    numbers, reused = random.Random(3), 0
    for number in range(requests):
        if number % 2:
            document = numbers.randrange(60)
            prompt = [1000 + document] * (12 * B) + [number]
        else:
            prompt = [number] * (30 * B)
        reused += serve(store, f"r{number}", prompt)
    store.check_invariants()
    return reused


def test_what_comes_back_is_kept_longer_than_by_lru_and_always_the_same() -> None:
    found = {}
    for policy in ("lru", "learned"):
        with make(policy) as store:
            found[policy] = documents_and_one_offs(store)
            if policy == "learned":
                (first, *_) = store.pool.policies
                assert isinstance(first, Learned)
                assert not first.follows_recency
    assert found["learned"] > 1.5 * found["lru"]
    with make("learned") as store:
        assert documents_and_one_offs(store) == found["learned"]


def test_learning_waits_for_the_step_and_is_bounded() -> None:
    with make("learned") as store:
        notes = store._upkeep.reuse
        for number in range(_NOTES_MAX + 20):
            store.admit(f"r{number}", [number] * (2 * B + 1))
            store.grow(f"r{number}", 2 * B + 1)
            store.commit(f"r{number}", [number] * (2 * B + 1))
            store.finish(f"r{number}")
        assert len(notes._notes) == _NOTES_MAX
        store.step()
        assert len(notes._notes) == _NOTES_MAX - NOTES_PER_STEP


def test_lru_is_told_nothing() -> None:
    with make("lru") as store:
        serve(store, "a", [1] * (3 * B))
        assert not store._upkeep.reuse._notes


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"eviction_policy: got 'mru' .*; expected lru or learned"):
        KVStoreConfig(eviction_policy="mru")


def test_a_block_with_a_copy_on_disk_is_cheaper_to_lose_by_what_was_measured(tmp_path: Path) -> None:
    config = KVStoreConfig(
        device_bytes=64 * GEOMETRY.full_slot_bytes(0), codec="raw", io_threads="inline", disk_path=str(tmp_path)
    )
    with KVStore(GEOMETRY, Identity(model="toy", weights="w", geometry=GEOMETRY), config) as store:
        prompt = [5] * (6 * B + 1)
        chain = store.prepare(prompt)
        prices = store._upkeep.reuse.prices
        assert prices is not None
        serve(store, "a", prompt[: 3 * B + 1])
        for again in ("b", "c"):  # seen twice: written
            serve(store, again, prompt[: 3 * B + 1])
        store.observe_prefill(1600, 1.0)
        store._parts.costs.tier("disk").bytes_per_second = GEOMETRY.full_slot_bytes(0) * 1000.0
        (disk,) = store.tiers
        assert disk.contains([store._parts.residency.copy_key(chain.root, 0, chain.hashes[2], 0, True)]) == [True]
        found = prices.of(chain.root, chain.hashes)
        assert found is not None
        assert found.tolist() == pytest.approx([0.001] * 3 + [0.01] * 3, rel=0.05)


def test_where_host_memory_takes_what_the_device_drops_every_loss_costs_alike() -> None:
    config = KVStoreConfig(device_bytes=1 << 20, codec="raw", io_threads="inline", host_bytes=1 << 20)
    with KVStore(GEOMETRY, Identity(model="toy", weights="w", geometry=GEOMETRY), config) as store:
        prices = store._upkeep.reuse.prices
        assert prices is not None
        assert prices.of(b"r" * 32, [b"h" * 32]) is None
