"""Loads of a prompt that another engine computes right now: block by block, as they are stored."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from engine_adapter.vllm_connector.book import Book, Found, Note, wait_seconds
from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder
from kvstore.executor import ThreadExecutor
from kvstore.host_tier.tier import HostTier
from kvstore.tier import CopyKey, Lookup
from tests.engine_adapter.vllm_kit import BLOCK, RATIO, Worker, geometry, identity

TABLES = ((11, 12, 13),)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker([HostTier(1 << 20, ThreadExecutor("kvstore-host"))], geometry(), deadline_seconds=5.0)
    yield made
    made.shelf.close()


def store(worker: Worker, start: int, stop: int) -> None:
    parent = worker.hashes[start - 1] if start else None
    worker.shelf.save([SaveOrder(worker.root, worker.hashes[start:stop], start, parent, ((1, 2, 3, 4, 5),))])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def is_in_place(worker: Worker, block: int) -> bool:
    memory = worker.memories[0]
    there, meant = (memory.block(page, block % RATIO) for page in (11 + block // RATIO, 1 + block // RATIO))
    return bool(np.array_equal(there, meant))


def test_blocks_are_loaded_while_the_others_are_not_computed_yet(worker: Worker) -> None:
    store(worker, 0, 2)
    worker.shelf.load(LoadOrder("r", worker.root, worker.hashes[:6], 0, TABLES, None, 60.0))
    until(lambda: is_in_place(worker, 1))
    assert not is_in_place(worker, 2)
    assert not worker.shelf.take_finished()
    store(worker, 2, 4)
    until(lambda: is_in_place(worker, 3))
    assert not worker.shelf.take_finished()
    store(worker, 4, 6)
    finished: list[object] = []
    until(lambda: bool(finished.extend(worker.shelf.take_finished()) or finished))
    assert finished[0].failed == []  # type: ignore[attr-defined]
    assert is_in_place(worker, 5)
    assert worker.shelf.below.counters()["loads"] == 1


def test_one_that_waits_holds_up_no_other(worker: Worker) -> None:
    store(worker, 0, 2)
    worker.shelf.load(LoadOrder("waits", worker.root, worker.hashes[:6], 0, TABLES, None, 60.0))
    until(lambda: is_in_place(worker, 1))
    worker.shelf.load(LoadOrder("other", worker.root, worker.hashes[:2], 0, ((14, 15),)))
    finished: list[object] = []
    until(lambda: bool(finished.extend(worker.shelf.take_finished()) or finished))
    assert [one.request_id for one in finished] == ["other"]  # type: ignore[attr-defined]


def test_when_nothing_more_comes_the_rest_is_computed(worker: Worker) -> None:
    store(worker, 0, 3)
    worker.shelf.load(LoadOrder("r", worker.root, worker.hashes[:6], 0, TABLES, None, 0.2))
    finished: list[object] = []
    until(lambda: bool(finished.extend(worker.shelf.take_finished()) or finished))
    assert finished[0].failed == [3, 4, 5]  # type: ignore[attr-defined]
    assert worker.shelf.below.counters()["loads_failed"] == 1


def test_a_shelf_that_closes_waits_for_nothing() -> None:
    worker = Worker([HostTier(1 << 20, ThreadExecutor("kvstore-host"))], geometry(), deadline_seconds=5.0)
    store(worker, 0, 2)
    worker.shelf.load(LoadOrder("r", worker.root, worker.hashes[:6], 0, TABLES, None, 600.0))
    until(lambda: is_in_place(worker, 1))
    worker.shelf.close()
    (result,) = worker.shelf.take_finished()
    assert result.failed == [2, 3, 4, 5]


class _Lookups:
    found = 0

    def find(self, epoch: int, root: bytes, hashes: object, local_blocks: int) -> Found:
        return Found(self.found, False, epoch)

    def note(self, *_: object) -> None:
        raise AssertionError("nobody is told")


@pytest.mark.parametrize(("found", "raw_tail", "matched"), [(0, 0, None), (2, 0, 9), (9, 0, 9), (2, 128, 2)])
def test_the_whole_prompt_is_asked_for_once_a_block_is_there(found: int, raw_tail: int, matched: int | None) -> None:
    lookups, now = _Lookups(), [5.0]
    lookups.found = found
    book = Book(identity(), BLOCK, lookups, deadline_seconds=1.0, raw_tail_tokens=raw_tail, clock=lambda: now[0])
    request = SimpleNamespace(
        request_id="r",
        all_token_ids=list(range(40)),
        num_tokens=40,
        num_prompt_tokens=40,
        kv_transfer_params={"prefill_wait_seconds": 2},
    )
    assert book.matched_tokens(request, 0) == (matched if matched is None else matched * BLOCK)
    now[0] = 7.5  # a prefill that never begins
    assert book.matched_tokens(request, 0) == (matched or 0) * BLOCK
    request.kv_transfer_params = None
    assert book.matched_tokens(request, 0) == found * BLOCK


def test_the_wait_that_a_request_names() -> None:
    for given, expected in ((2, 2.0), (0.5, 0.5), (0, 0.0), (-1, 0.0), ("9", 0.0), (True, 0.0), (1e9, 0.0)):
        assert wait_seconds(SimpleNamespace(kv_transfer_params={"prefill_wait_seconds": given})) == expected
    assert wait_seconds(SimpleNamespace(kv_transfer_params={"do_remote_prefill": True})) == 0.0
    assert wait_seconds(SimpleNamespace()) == 0.0


def test_a_lookup_waits_for_nothing_that_is_only_counted() -> None:
    """A daemon that is slow to take the word of a lookup, or is sent nonsense, costs no request its hit."""
    go, told, reused = threading.Event(), threading.Event(), list[int]()

    class Slow(HostTier):
        def note_lookup(self, lookup: Lookup) -> None:
            told.set()
            go.wait(60)
            raise ValueError("nonsense")

        def note_reuse(self, key: CopyKey, blocks: int) -> None:
            reused.append(blocks)

    made = Worker([Slow(1 << 20, ThreadExecutor("kvstore-host"))], geometry(), deadline_seconds=5.0)
    try:
        store(made, 0, 6)
        until(lambda: made.shelf.find(0, made.root, made.hashes[:6], 0).blocks == 6)
        for _ in range(100):
            made.shelf.note_lookup(0, made.root, made.hashes[:6], 0, Note(6, 24))
        assert told.wait(20)
        assert made.shelf.find(0, made.root, made.hashes[:6], 0).blocks == 6
        assert made.shelf.below.counters()["notes_dropped"] >= 30, "what waits is bounded"
        made.shelf.load(LoadOrder("r", made.root, made.hashes[:6], 0, TABLES))
        until(lambda: reused == [6])
        failing = LoadOrder("f", made.root, [*made.hashes[:6], bytes(32)], 0, TABLES)
        made.shelf.load(failing)
        until(lambda: made.shelf.below.counters().get("loads_failed") == 1)
        assert reused == [6], "what failed is computed again, all of it where vLLM has several kinds of layers"
    finally:
        go.set()
        made.shelf.close()
