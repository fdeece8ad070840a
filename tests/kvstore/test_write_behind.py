"""Write-behind: what is computed goes down in the background, once, bounded, and holds no device block meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore import HostTier
from kvstore.spill_queue import QueueLimits, SpillQueue, Waiting
from kvstore.staging import Staging
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.driving import check_bytes, compute, run_prompt
from tests.kvstore.writing_kit import SLOT, B, distant, offered, prompt, serve, settle
from tests.servers import Server
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore import KVStore


def test_what_was_computed_goes_to_every_slower_tier_without_pressure(make_store: Callable[..., KVStore]) -> None:
    disk, disk_work = distant()
    remote, remote_work = distant(name="remote")
    host = HostTier(64 * SLOT)
    store = make_store(blocks=200, tiers=[host, disk, remote], spill_policy="everything", load_always=True)
    serve(store, "a", prompt(1, 8))
    disk_work.run()
    remote_work.run()
    store.step()
    assert (host.copy_count, disk.copy_count, remote.copy_count) == (0, 8, 8)
    assert store.metrics.get("spilled_blocks", tier="disk") == 8
    store.pool.drop_all_idle()
    host.close()
    assert store.lookup(prompt(1, 8)).by_tier == {"disk": 8 * B}
    disk_work.run()
    store.admit("b", prompt(1, 8))
    disk_work.run()
    store.step()
    check_bytes(store, "b", prompt(1, 8)[: 8 * B])


def test_no_device_block_waits_for_a_slow_tier(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=10, tiers=[disk], spill_policy="everything")
    run_prompt(store, "a", prompt(1, 8))
    store.preempt("a")
    assert store._parts.upkeep.writes.under_way_blocks == 8
    assert store._parts.upkeep.mover.in_flight_blocks == 0
    run_prompt(store, "b", prompt(2, 9))  # needs every block there is, while nothing has been written yet
    assert work.tasks
    work.run()
    store.step()
    assert disk.copy_count == 8
    store.finish("b")
    store.pool.drop_all_idle()
    assert store.metrics.get("staged_bytes") == 0
    store.admit("again", prompt(1, 8))
    work.run()
    store.step()
    check_bytes(store, "again", prompt(1, 8)[: 8 * B])


def test_a_block_that_is_queued_or_stored_is_not_queued_again(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=64, tiers=[disk], spill_policy="everything")
    for name in "abc":
        serve(store, name, prompt(1, 8))
    assert len(work.tasks) == 1
    work.run()
    serve(store, "d", prompt(1, 8))
    assert work.tasks == []
    assert offered(store, "disk") == {"admitted": 8, "refused": 0, "coalesced": 8 * 8}  # sealed, prompt, end


def test_a_put_that_failed_is_tried_again_when_it_is_offered_again(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant(blocks=1)
    store = make_store(blocks=64, tiers=[disk], spill_policy="everything")
    pinned = serve(store, "first", prompt(9, 1))
    work.run()
    assert pinned == 0
    key = store._parts.residency.copy_key(store.identity.root(), 0, store.prepare(prompt(9, 1)).hashes[0], 0, True)
    assert disk.pin([key]) == [True]  # the tier is full and nothing may go
    serve(store, "a", prompt(1, 1))
    work.run()
    store.step()
    assert store.metrics.get("dropped_blocks", tier="disk", cause="full") == 1
    disk.unpin([key])
    serve(store, "b", prompt(1, 1))
    work.run()
    store.step()
    assert store.lookup(prompt(1, 1)).tokens == B
    assert store.metrics.get("spilled_blocks", tier="disk") == 2


def test_a_block_that_is_somebody_elses_by_its_turn_is_passed_by(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=12, tiers=[disk], spill_policy="everything", spill_blocks_per_step=0)
    serve(store, "first", prompt(1, 2))
    serve(store, "b", prompt(2, 3))  # waits: a put is under way, and three are no batch
    assert store._parts.upkeep.writes.waiting_blocks == 3
    store.pool.drop_all_idle()
    run_prompt(store, "c", prompt(3, 11))  # their ids, sealed and named, with other bytes
    for _ in range(3):
        work.run()
        store.step()
    assert store.metrics.get("dropped_blocks", tier="disk", cause="gone") == 3
    store.finish("c")
    store.pool.drop_all_idle()
    assert store.lookup(prompt(2, 3)).tokens == 0
    store.admit("again", prompt(3, 11))
    work.run()
    store.step()
    check_bytes(store, "again", prompt(3, 11)[: store.fetch("again").ready_tokens])
    assert store.fetch("again").ready_tokens == 11 * B


def test_the_host_copy_is_read_where_there_is_one(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    host = HostTier(64 * SLOT)
    store = make_store(blocks=10, tiers=[host, disk], spill_policy="everything")
    run_prompt(store, "a", prompt(1, 8))
    store.preempt("a")  # to the host at once; the disk is for later
    store.step()
    assert (host.copy_count, disk.copy_count) == (8, 0)
    store._parts.upkeep.offer(store.pool.match(0, store.prepare(prompt(1, 8)).hashes), [disk])
    store.pool.drop_all_idle()
    store.step()
    assert store._parts.upkeep.writes.staged_bytes == 0
    assert store._parts.upkeep.writes.under_way_blocks == 8
    for seed in range(2, 20):  # pushes everything out of the host that may go
        run_prompt(store, "b", prompt(seed, 9))
        store.preempt("b")
        store.step()
    assert host.counters()["evicted"] > 0
    work.run()
    host.clear()
    store.pool.drop_all_idle()
    store.step()
    store.admit("again", prompt(1, 8))
    work.run()
    store.step()
    check_bytes(store, "again", prompt(1, 8)[: 8 * B])


def test_a_full_queue_drops_the_coldest_and_keeps_fronts(make_store: Callable[..., KVStore]) -> None:
    disk, work = distant()
    store = make_store(blocks=200, tiers=[disk], spill_policy="everything", spill_queue_blocks=12)
    for seed in range(1, 5):
        serve(store, f"s{seed}", prompt(seed, 6))
        store.check_invariants()
    assert store.metrics.get("dropped_blocks", tier="disk", cause="queue_full") == 12
    for _ in range(4):
        work.run()
        store.step()
    store.pool.drop_all_idle()
    found = [store.lookup(prompt(seed, 6)).tokens // B for seed in range(1, 5)]
    assert found == [6, 0, 0, 6], "the first was under way; the newest is the warmest"


def test_queue_limits_and_order() -> None:
    tier, _ = distant()

    def run(first: int, count: int) -> list[Waiting]:
        return [Waiting(key_of(first + index), None, 100) for index in range(count)]

    queue = SpillQueue(tier, QueueLimits(blocks=6, bytes=500))
    assert queue.add(run(0, 3), urgent=False) == (3, 0)
    assert queue.add(run(10, 4), urgent=False) == (4, 2), "500 bytes: the tail of the first run makes room"
    queue.check([])
    assert queue.add(run(20, 9), urgent=True) == (5, 9), "what is about to be lost goes before all that can wait"
    queue.check([])
    assert queue.waiting_blocks == 5
    assert [copy.key for copy in queue.take_urgent(2)] == [key_of(20), key_of(21)]
    begun = queue.take(9)
    assert begun == []
    queue.finish(run(20, 2))
    assert queue.add(run(0, 3), urgent=False) == (2, 1)
    assert queue.add(run(5, 1), urgent=False) == (1, 1)
    taken = queue.take(1)
    assert [copy.key for copy in taken] == [key_of(0)]
    queue.put_back(taken)
    queue.check([])
    assert queue.clear() == 5
    assert queue.queued_bytes == 0


def test_staging_is_bounded_and_reused() -> None:
    staging = Staging(1000)
    rows = [staging.take(400), staging.take(400)]
    assert staging.take(400) is None
    assert staging.used_bytes == 800
    for row in rows:
        assert row is not None
        staging.give_back(row)
    again = staging.take(400)
    assert any(again is row for row in rows)
    assert again is not None
    staging.give_back(again)
    large = staging.take(5000)
    assert large is not None, "one block larger than the limit can still move"
    assert staging.take(1) is None


def test_steps_and_device_memory_are_free_while_a_real_server_hangs(make_store: Callable[..., KVStore]) -> None:
    with Server() as server:
        store = make_store(blocks=24, redis_url=server.url, io_threads="thread", spill_policy="everything")
        serve(store, "warm", prompt(90, 4))
        settle(store)
        with server.hung(), Stopwatch() as watch:
            calls = []
            for seed in range(1, 30):
                while True:  # told to ask again while the server is being asked; no call waits for it
                    started = watch.seconds
                    asked = store.admit("s", prompt(seed, 9)).ask_again
                    store.step()
                    calls.append(watch.seconds - started)
                    if not asked:
                        break
                    store.wait(0.01)
                started = watch.seconds
                compute(store, "s", prompt(seed, 9))
                store.prefill_done("s")
                store.finish("s")
                store.step()
                while store._parts.upkeep.mover.in_flight_blocks:  # fenced for a memcpy
                    store.step()
                calls.append(watch.seconds - started)
            assert store._parts.upkeep.writes.staged_bytes <= 64 << 20
            store.check_invariants()
        # Half the server's timeout: what a busy machine may take once or twice, a wait for the server may not.
        assert sorted(calls)[-3] < 0.25
        store.close()


def test_a_disk_directory_is_written_behind(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True, "spill_policy": "everything"}
    store = make_store(blocks=200, host_blocks=8, io_threads="thread", **settings)
    serve(store, "a", prompt(1, 8))
    settle(store)
    assert store.metrics.get("spilled_blocks", tier="disk") == 8
    assert store.tiers[1].used_bytes <= 8 << 20


@pytest.mark.parametrize("when", ["waiting", "staged", "under_way"])
def test_nothing_from_before_a_reset_is_written_after_it(make_store: Callable[..., KVStore], when: str) -> None:
    disk, work = distant()
    store = make_store(blocks=200, tiers=[disk], spill_policy="everything")
    copying = work.__class__()
    if when == "staged":
        store._parts.upkeep.writes._executor = copying
    queue = store._parts.upkeep.writes._queues[0]
    run_prompt(store, "a", prompt(1, 8))
    if when == "waiting":
        queue.put_back(queue.begin([Waiting(key_of(1, group=0), None, SLOT)]))
    store.finish("a")
    if when != "waiting":
        store.step()
    chain = store.prepare(prompt(1, 8))
    store.reset()
    for _ in range(4):
        copying.run()
        work.run()
        store.step()
        store.check_invariants()
    assert disk.copy_count == 0
    assert store.lookup_hashes(chain.root, chain.hashes, chain.token_count).tokens == 0
    assert store._parts.upkeep.writes.staged_bytes == 0
