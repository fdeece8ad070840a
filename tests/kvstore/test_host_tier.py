"""The host tier beyond the contract: its arena, sizes that change, leaves, fences, orphans, threads."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import ConfigError, CopyKey, GetItem, HostTier, IntegrityError, PutItem, ResultCode, UsageError
from kvstore.executor import InlineExecutor, ThreadExecutor, make_executor
from kvstore.testing import SteppedExecutor
from kvstore.tier import Job
from tests.stopwatch import Stopwatch

OK, MISS = ResultCode.OK, ResultCode.MISS


def key(number: int, codec: str = "raw", *, group: int = 0, exact: bool = True) -> CopyKey:
    return CopyKey(b"\x07" * 32, group, number.to_bytes(32, "big"), codec, exact, (0, 2), (0, 4))


def parent_of(number: int) -> bytes | None:
    return key(number - 1).hash if number else None


def put(tier: HostTier, one: CopyKey, size: int, parent: bytes | None = None) -> ResultCode:
    tier.submit_put([PutItem(one, [np.full(size, one.hash[-1], np.uint8)], parent)])
    (done,) = tier.poll()
    tier.check_invariants()
    assert tier.used_bytes <= tier.capacity_bytes
    return done.results[0]


def get(tier: HostTier, one: CopyKey, size: int) -> ResultCode:
    buffer = np.zeros(size, np.uint8)
    tier.submit_get([GetItem(one, buffer)])
    (done,) = tier.poll()
    assert done.results[0] is not OK or (buffer == one.hash[-1]).all()
    return done.results[0]


# sizes ---------------------------------------------------------------------------------------------------------------


def test_an_arena_full_of_one_size_makes_way_for_another() -> None:
    tier = HostTier(16 * 3072, slot_bytes=(3072, 1024))
    for number in range(16):
        assert put(tier, key(number), 3072) is OK
    for number in range(100, 140):
        assert put(tier, key(number, "int4"), 1024) is OK
    stored = sum(tier.contains([key(n, "int4") for n in range(100, 140)]))
    assert stored >= 30, "the newer size gets the room that the older, unused one held"
    for number in range(200, 216):
        assert put(tier, key(number), 3072) is OK
    assert sum(tier.contains([key(n) for n in range(200, 216)])) >= 12
    assert tier.counters()["extents_emptied"] > 0


def test_sizes_in_use_keep_their_room() -> None:
    tier = HostTier(32 * 3072, slot_bytes=(3072, 1024))
    hot = [key(n) for n in range(8)]
    for one in hot:
        put(tier, one, 3072)
    for number in range(100, 400):
        tier.touch(hot)
        assert put(tier, key(number, "int4"), 1024) is OK
    assert tier.contains(hot) == [True] * 8


def test_a_copy_larger_than_an_extent_takes_neighbours() -> None:
    tier = HostTier(64 << 10, slot_bytes=(1024,))
    for number in range(64):
        put(tier, key(number), 1024)
    assert put(tier, key(200), 20_000) is OK
    assert get(tier, key(200), 20_000) is OK
    assert put(tier, key(201), 64 << 10) is OK
    assert get(tier, key(201), 64 << 10) is OK
    assert tier.copy_count == 1
    assert put(tier, key(202), (64 << 10) + 1) is ResultCode.TOO_LARGE
    assert put(tier, key(203), 1024) is OK


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 1000])
def test_the_smallest_arenas_refuse_politely(capacity: int) -> None:
    tier = HostTier(capacity)
    expected = OK if capacity >= 64 else ResultCode.TOO_LARGE
    assert put(tier, key(1), 10) is expected
    assert put(tier, key(2), 2000) is ResultCode.TOO_LARGE
    assert tier.used_bytes <= capacity


def test_an_empty_payload_is_a_payload() -> None:
    tier = HostTier(1024)
    assert put(tier, key(1), 0) is OK
    assert get(tier, key(1), 0) is OK


def test_a_large_arena_is_cut_into_few_extents() -> None:
    tier = HostTier(8 << 30, slot_bytes=(368_640, 109_440))  # reserved, not touched
    room = tier._index._room
    assert room.fits(368_640)
    assert 16 <= len(room.extents) <= 256
    wasted = max(room.extent_bytes % size / room.extent_bytes for size in (368_640, 109_440))
    assert wasted < 0.01
    tier.close()


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, None, "1 GiB"])
def test_a_budget_is_a_number_of_bytes(capacity: object) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes: got"):
        HostTier(capacity)  # type: ignore[arg-type]


# parents -------------------------------------------------------------------------------------------------------------


def test_case_124_orphans_are_counted_and_collected() -> None:
    tier = HostTier(64 << 10, slot_bytes=(1024,))
    for number in range(8):
        put(tier, key(number), 1024, parent_of(number))
    assert tier.orphan_count == 0
    tier.delete([key(2)])
    tier.check_invariants()
    assert tier.orphan_count == 1
    assert put(tier, key(2), 1024, parent_of(2)) is OK
    assert tier.orphan_count == 0, "the parent came back"
    tier.delete([key(2), key(5)])
    assert tier.orphan_count == 2
    assert tier.collect_orphans() == 4
    tier.check_invariants()
    assert tier.contains([key(n) for n in range(8)]) == [True, True] + [False] * 6
    assert tier.counters()["orphans_collected"] == 4


def test_a_parent_may_come_after_its_children_and_in_another_form() -> None:
    tier = HostTier(64 << 10, slot_bytes=(1024,))
    put(tier, key(2), 1024, parent_of(2))
    put(tier, key(1, "int4"), 512, parent_of(1))
    assert tier.orphan_count == 1, "block 1 has no parent here, block 2 has one, as INT4"
    put(tier, key(0, exact=False), 1024)
    assert tier.orphan_count == 0
    tier.delete([key(1, "int4")])
    assert tier.orphan_count == 1
    put(tier, key(1), 1024)  # its parent is not said this time
    assert tier.orphan_count == 0
    put(tier, key(1, "int4"), 512, parent_of(1))
    tier.delete([key(0, exact=False)])
    tier.check_invariants()
    assert tier.orphan_count == 2, "both copies of block 1"


def test_the_root_is_nobodys_missing_parent_and_groups_are_apart() -> None:
    tier = HostTier(64 << 10, slot_bytes=(1024,))
    put(tier, key(0), 1024, b"\x07" * 32)
    assert tier.orphan_count == 0
    put(tier, key(1, group=1), 1024, key(0).hash)
    assert tier.orphan_count == 1, "block 0 of group 0 is not the parent of a block of group 1"


def test_a_copy_with_a_twin_may_go_before_its_children() -> None:
    tier = HostTier(8 * 1024, slot_bytes=(1024,))
    put(tier, key(0), 1024)
    put(tier, key(0, "int4"), 1024)
    put(tier, key(1), 1024, parent_of(1))
    for number in range(100, 106):
        put(tier, key(number), 1024)
    assert tier.contains([key(0), key(0, "int4"), key(1)]) == [False, True, True]


def test_a_chain_with_a_pinned_end_stays_whole_and_full_is_said() -> None:
    tier = HostTier(4 * 1024, slot_bytes=(1024,))
    for number in range(4):
        put(tier, key(number), 1024, parent_of(number))
    tier.pin([key(3)])
    assert put(tier, key(50), 1024) is ResultCode.FULL
    assert tier.contains([key(n) for n in range(4)]) == [True] * 4
    tier.unpin([key(3)])
    assert put(tier, key(50), 1024) is OK


# fences --------------------------------------------------------------------------------------------------------------


def test_case_079_what_is_about_to_be_read_is_not_evicted() -> None:
    executor = SteppedExecutor()
    tier = HostTier(8 * 1024, executor, slot_bytes=(1024,))
    tier.submit_put([PutItem(key(n), [bytes([n]) * 1024], None) for n in range(8)])
    executor.run_all()
    tier.poll()
    buffers = [bytearray(1024) for _ in range(3)]
    reading = tier.submit_get([GetItem(key(n), buffer) for n, buffer in enumerate(buffers)])
    tier.submit_put([PutItem(key(100 + n), [bytes(1024)], None) for n in range(8)])
    executor._tasks.reverse()  # the writes run first
    executor.run_all()
    results = {done.transfer: done.results for done in tier.poll()}
    assert results.pop(reading) == (OK,) * 3
    assert [bytes(buffer) for buffer in buffers] == [bytes([n]) * 1024 for n in range(3)]
    assert results.popitem()[1].count(OK) == 8, "five slots take eight copies one after the other"
    tier.check_invariants()


@pytest.mark.parametrize("bad_at", range(4))
def test_case_079_a_batch_refused_in_the_middle_leaves_no_fence(bad_at: int) -> None:
    tier = HostTier(8 * 1024, slot_bytes=(1024,))
    for number in range(4):
        put(tier, key(number), 1024)
    items = [GetItem(key(n), bytearray(1024)) for n in range(4)]
    items[bad_at] = GetItem(key(bad_at), bytes(1024))  # cannot be written to
    with pytest.raises(UsageError, match="read-only"):
        tier.submit_get(items)
    assert tier.delete([key(n) for n in range(4)]) == 4
    assert tier.used_bytes == 0


def test_case_052_a_copy_shows_only_when_its_last_byte_is_there() -> None:
    seen: list[bool] = []

    class Watched(HostTier):
        def _copy_in(self, entry: object, job: Job) -> None:
            super()._copy_in(entry, job)  # type: ignore[arg-type]
            seen.append(self.contains([job.key])[0])

    tier = Watched(8 * 1024, slot_bytes=(1024,))
    assert put(tier, key(1), 1024) is OK
    assert seen == [False]
    assert tier.contains([key(1)]) == [True]


def test_a_write_that_fails_leaves_nothing() -> None:
    class Broken(HostTier):
        def _copy_in(self, entry: object, job: Job) -> None:
            raise OSError("planted")

    tier = Broken(8 * 1024, slot_bytes=(1024,))
    assert put(tier, key(1), 1024) is ResultCode.FAILED
    assert tier.used_bytes == 0
    assert tier.counters()["failed_OSError"] == 1
    assert tier.contains([key(1)]) == [False]


def test_case_008_a_clear_reaches_the_write_under_way() -> None:
    class Late(HostTier):
        def _copy_in(self, entry: object, job: Job) -> None:
            super()._copy_in(entry, job)  # type: ignore[arg-type]
            self.clear()

    tier = Late(8 * 1024, slot_bytes=(1024,))
    assert put(tier, key(1), 1024) is ResultCode.CANCELLED
    assert tier.contains([key(1)]) == [False]
    assert tier.used_bytes == 0


def test_a_pinned_copy_is_not_deleted_but_cleared() -> None:
    tier = HostTier(8 * 1024, slot_bytes=(1024,))
    put(tier, key(1), 1024)
    tier.pin([key(1)])
    assert tier.delete([key(1)]) == 0
    tier.clear()
    assert tier.contains([key(1)]) == [False]
    with pytest.raises(UsageError, match="pinned 0 times"):
        tier.unpin([key(1)])
    tier.check_invariants()


# queue ---------------------------------------------------------------------------------------------------------------


def test_a_queue_at_its_limit_refuses_and_counts() -> None:
    executor = SteppedExecutor()
    tier = HostTier(64 * 1024, executor, queue_limit_items=4)
    tier.submit_put([PutItem(key(n), [bytes(64)], None) for n in range(3)])
    refused = tier.submit_put([PutItem(key(n), [bytes(64)], None) for n in range(10, 12)])
    (done,) = tier.poll()
    assert done.transfer is refused
    assert done.results == (ResultCode.FULL,) * 2
    executor.run_all()
    assert tier.poll()[0].results == (OK,) * 3
    assert tier.counters()["queue_refused"] == 2
    assert tier.queued_items == 0


def test_a_task_that_raises_does_not_end_the_thread() -> None:
    causes: list[str] = []
    executor = ThreadExecutor(on_failed=causes.append)
    done = threading.Event()

    def fail() -> None:
        raise RuntimeError("planted")

    executor.submit(fail)
    executor.submit(done.set)
    assert done.wait(5)
    assert (executor.failed_count, causes) == (1, ["RuntimeError"])
    executor.close()
    executor.close()
    with pytest.raises(UsageError, match="after close"):
        executor.submit(fail)


def test_executors_by_name() -> None:
    assert isinstance(make_executor("inline"), InlineExecutor)
    executor = make_executor("thread")
    assert isinstance(executor, ThreadExecutor)
    executor.close()
    with pytest.raises(UsageError, match="expected thread or inline"):
        make_executor("fork")


# arena and threads ---------------------------------------------------------------------------------------------------


def test_case_147_a_large_arena_is_usable_at_once_and_prefaulted_beside() -> None:
    with Stopwatch() as watch:
        tier = HostTier(256 << 20, slot_bytes=(1 << 20,), prefault=True)
        assert put(tier, key(1), 1 << 20) is OK
    assert watch.seconds < 1.0
    assert tier.wait_prefaulted(60)
    assert not tier._arena.prefault_supported or tier._arena.prefaulted_bytes == 256 << 20
    assert get(tier, key(1), 1 << 20) is OK, "prefaulting changes no byte"
    tier.close()
    tier.close()


def test_closing_stops_the_prefault() -> None:
    tier = HostTier(4 << 30, prefault=True)
    start = time.perf_counter()
    tier.close()
    assert time.perf_counter() - start < 5


def test_many_threads_never_see_a_wrong_byte() -> None:
    tier = HostTier(64 * 4096, ThreadExecutor(), slot_bytes=(4096, 1344))
    stop = time.monotonic() + 1.0
    errors: list[str] = []

    def reader(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < stop:
            one = key(draw.randrange(200), draw.choice(("raw", "int4")))
            tier.contains([one])
            tier.touch([one])
            if tier.pin([one])[0]:
                try:
                    tier.unpin([one])
                except UsageError as error:
                    errors.append(str(error))
            if tier.used_bytes > tier.capacity_bytes:
                errors.append("over the budget")

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    draw = random.Random(9)
    gets: dict[object, list[tuple[CopyKey, np.ndarray]]] = {}  # type: ignore[type-arg]
    while time.monotonic() < stop:
        keys = [key(draw.randrange(200), draw.choice(("raw", "int4"))) for _ in range(4)]
        sizes = [4096 if one.codec == "raw" else 1344 for one in keys]
        tier.submit_put(
            [PutItem(one, [bytes([one.hash[-1]]) * size], None) for one, size in zip(keys, sizes, strict=True)]
        )
        wanted = [(one, np.zeros(size, np.uint8)) for one, size in zip(keys, sizes, strict=True)]
        gets[tier.submit_get([GetItem(*one) for one in wanted])] = wanted
        for done in tier.poll():
            for (one, buffer), code in zip(gets.pop(done.transfer, []), done.results, strict=False):
                if code is OK and not (buffer == one.hash[-1]).all():
                    errors.append(f"wrong bytes for {one}")
    for thread in threads:
        thread.join()
    tier.close()
    assert errors == []


# any history ---------------------------------------------------------------------------------------------------------

_moves = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "put", "get", "touch", "pin", "unpin", "delete", "clear", "collect")),
        st.integers(0, 11),
        st.sampled_from(("raw", "int4", "big")),
    ),
    max_size=60,
)


@given(_moves)
@settings(max_examples=200, deadline=None)
def test_any_history_keeps_every_rule(moves: list[tuple[str, int, str]]) -> None:
    sizes = {"raw": 512, "int4": 128, "big": 1500}
    tier = HostTier(4096, slot_bytes=(512, 128))
    pins: dict[CopyKey, int] = {}
    for action, number, codec in moves:
        one = key(number, codec)
        if action == "put":
            code = put(tier, one, sizes[codec], parent_of(number))
            assert code in (OK, ResultCode.FULL)
            assert (code is OK) == tier.contains([one])[0]
        elif action == "get":
            assert get(tier, one, sizes[codec]) in (OK, MISS)
        elif action == "touch":
            tier.touch([one])
        elif action == "pin":
            if tier.pin([one])[0]:
                pins[one] = pins.get(one, 0) + 1
        elif action == "unpin":
            if pins.get(one):
                pins[one] -= 1
                tier.unpin([one])
            else:
                with pytest.raises(UsageError):
                    tier.unpin([one])
        elif action == "delete":
            assert tier.delete([one]) in (0, 1)
        elif action == "clear":
            tier.clear()
            pins.clear()
            assert tier.used_bytes == tier.orphan_count == 0
        else:
            tier.collect_orphans()
        tier.check_invariants()
        held = [one for one, count in pins.items() if count]
        assert all(tier.contains(held)), "a pinned copy is gone"


def test_copies_of_another_size_do_not_keep_the_dropped_ones() -> None:
    """Each size's candidates are bounded by that size's copies: with many of one, the other's would pile up."""
    tier = HostTier(4 << 20, slot_bytes=(1024, 4096))
    tier.submit_put([PutItem(key(number), [bytes(1024)], None) for number in range(1000)])
    for number in range(1000, 3000):
        tier.submit_put([PutItem(key(number), [bytes(4096)], None)])
        tier.delete([key(number)])
    tier.poll()
    assert tier._index.copy_count == 1000
    assert len(tier._index._candidates[4096]) <= 66
    tier.check_invariants()


def test_put_and_delete_for_ever_keep_the_books_small() -> None:
    tier = HostTier(64 << 10, slot_bytes=(1024,))
    for number in range(3000):
        put_and_gone = key(number)
        tier.submit_put([PutItem(put_and_gone, [bytes(1024)], parent_of(number))])
        tier.delete([put_and_gone])
    tier.poll()
    assert tier.used_bytes == 0
    assert sum(len(heap) for heap in tier._index._candidates.values()) <= 66
    assert tier._index._blocks == {}
    tier.check_invariants()


@pytest.mark.parametrize("field", ["copy_count", "used_bytes", "orphan_count"])
def test_the_check_of_the_books_can_fail(field: str) -> None:
    tier = HostTier(64 << 10, slot_bytes=(1024,))
    put(tier, key(1), 1024)
    setattr(tier._index, field, getattr(tier._index, field) + 1)
    with pytest.raises(IntegrityError, match="broken rule"):
        tier.check_invariants()
