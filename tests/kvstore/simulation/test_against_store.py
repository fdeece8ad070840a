"""The simulator against a real store without bytes: the same requests hit the same blocks, one by one."""

from __future__ import annotations

import pytest

from allocator import LRU, ExtentLayout
from kvstore import Identity, KVStore, KVStoreConfig
from kvstore.simulation import WORKLOADS, generate
from kvstore.simulation.hosts import Host
from kvstore.simulation.trace import each
from tests.kvstore.conftest import full_geometry

B = 16
GEOMETRY = full_geometry()
SLOT_BYTES = GEOMETRY.full_slot_bytes(0)


def store_of(blocks: int) -> KVStore:
    layout = ExtentLayout(blocks * SLOT_BYTES, (SLOT_BYTES,), ())
    settings = KVStoreConfig(
        device_bytes=layout.total_bytes, codec="raw", io_threads="inline", eviction_policy="lru", host_bytes=0
    )
    store = KVStore(GEOMETRY, Identity(model="toy", weights="w", geometry=GEOMETRY), settings, device="absent")
    assert store.pool.available(0) == blocks
    return store


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_request_hits_as_many_blocks_in_the_store_as_in_the_simulator(workload: str) -> None:
    trace = generate(workload, 250, seed=11, block_tokens=B)
    longest = int(trace.full_counts.max())
    capacity = max(longest + 8, trace.capacity_blocks(8))
    host = Host(capacity, LRU)
    token_of: dict[int, int] = {}
    found = []
    with store_of(capacity + 1) as store:  # a prompt's last token is always computed: it has a block of its own here
        for number, keys, names in each(trace):
            prompt = [token_of.setdefault(key, len(token_of)) for key in keys.tolist() for _ in range(B)] + [1 << 31]
            reused = store.admit(str(number), prompt).reused_tokens
            store.grow(str(number), len(prompt) - reused)
            store.commit(str(number), prompt[reused:])
            store.finish(str(number))
            store.step()
            found.append(reused // B)
            assert host.request(keys, names) == found[-1], number
        assert store.pool.evicted_count == host.pool.evicted_count > 0
    assert sum(found) > 0
