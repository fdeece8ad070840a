"""A flush, a delete, a reset or a client's death against what other clients do meanwhile, on the real core: every order
in which they can come to the daemon's lock and its tier below, up to two switches; and bugs that this must find.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.daemon import dropping, lower
from kvstore.daemon.arena import ArenaIndex
from kvstore.daemon.core import Core
from kvstore.daemon.epochs import DomainEpoch
from kvstore.daemon.forms import Form
from kvstore.daemon.holder import Holder
from kvstore.daemon.lower import LowerTier
from kvstore.daemon.protocol import PLACE, Place
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import PutItem, ResultCode
from tests.kvstore.daemon.interleaving_kit import SteppedLock, SteppedTier, orders, point
from tests.kvstore.daemon.kit import settings

PAYLOAD = 256
SWITCHES = 2
HASH = key_of(1).hash


class World:
    """A core whose threads are actors; each run has a root of its own, so that none sees what another left."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(LowerTier, "_drive", lambda self: None)
        monkeypatch.setattr(dropping.time, "sleep", lambda seconds: point())
        self.below = SteppedTier(1 << 20, slot_bytes=(PAYLOAD,), name="below")
        self.core = Core(settings(directory, 2 << 20, segment_bytes=1 << 20), [self.below])
        self.core.lock = self.core.lowers[0]._lock = SteppedLock()  # type: ignore[assignment]
        self.lower, self.runs = self.core.lowers[0], 0

    def begin(self) -> None:
        self.runs += 1
        template = key_of(0)._replace(root=self.runs.to_bytes(8, "big") * 4)
        self.form = Form(template, 1, PAYLOAD, 0, "uint8")
        self.arena = self.core.arena("")

    def client(self) -> Holder:
        return self.core.join("client", os.geteuid(), os.getpid(), -1)

    def lies_below(self) -> None:
        self.below.submit_put([PutItem(self.form.lower_template.with_hash(HASH), [np.ones(PAYLOAD, np.uint8)])])
        assert self.below.poll()[0].results == (ResultCode.OK,)

    def acquire(self, holder: Holder) -> None:
        lease, _ = self.core.acquire(holder, self.form, (HASH,), [PAYLOAD])
        if lease:
            self.core.release(holder, [lease])

    def store(self, holder: Holder, after_reserve: Callable[[Any], None] = lambda entry: None) -> bool:
        size = self.form.header_bytes + PAYLOAD
        places = self.core.reserve(holder, self.form, (HASH,), (self.form.template.root,), [size])
        place, _, _, lease = PLACE.unpack(places)
        if place != Place.GRANTED:
            return False
        after_reserve(holder.writes[lease].entry)
        return self.core.publish(holder, [lease]) == b"\x01"

    def drive(self) -> None:
        """What the thread of the tier below does."""
        for _ in range(2):
            self.lower._start_fetches()
            for done in self.below.poll():
                self.lower._finish(done)
            self.lower._start_spills()
            for done in self.below.poll():
                self.lower._finish(done)

    def is_there(self) -> bool:
        return self.arena.find(self.form.key(HASH)) is not None

    def end(self, *holders: Holder) -> None:
        """Nothing is left, here or on its way, and the rules of the arena hold."""
        self.drive()
        for holder in holders:
            assert not holder.writes
            assert not holder.reads
            self.core.leave(holder, is_dead=True)
        self.arena.check()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.core.close(0)


def flush(world: World) -> None:
    dropping.clear(world.core, world.arena, {world.form.template.root}, all_allowed=True)


def search_flush_and_fetch(world: World) -> None:
    """Who asks meanwhile brings nothing back up that was flushed."""
    for steps in orders(SWITCHES):
        world.begin()
        world.lies_below()
        asking = world.client()
        steps.run({"flush": partial(flush, world), "ask": partial(world.acquire, asking), "tier": world.drive})
        world.end(asking)
        assert world.core.run(asking, world.form, (HASH,)) == (0, 0), steps.trace


def search_delete_and_fetch(world: World) -> None:
    for steps in orders(SWITCHES):
        world.begin()
        world.lies_below()
        asking, deleting = world.client(), world.client()
        steps.run(
            {
                "delete": partial(dropping.delete, world.core, deleting, world.form, (HASH,)),
                "ask": partial(world.acquire, asking),
                "tier": world.drive,
            }
        )
        world.end(asking, deleting)
        assert world.core.run(asking, world.form, (HASH,)) == (0, 0), steps.trace


def search_flush_and_stores(world: World) -> None:
    """Two store the block, one reads: what had its place before the flush is found by nobody after it."""
    for steps in orders(SWITCHES):
        world.begin()
        clients = [world.client() for _ in range(3)]
        old: list[Any] = []
        has_begun: list[bool] = []

        def reserved(entry: Any, old: list[Any] = old, has_begun: list[bool] = has_begun) -> None:
            if not has_begun:
                old.append(entry)

        def flushed(has_begun: list[bool] = has_begun) -> None:
            has_begun.append(True)
            flush(world)

        steps.run(
            {
                "one": partial(world.store, clients[0], reserved),
                "two": partial(world.store, clients[1], reserved),
                "flush": flushed,
                "read": partial(world.acquire, clients[2]),
            }
        )
        found = world.arena.find(world.form.key(HASH))
        assert found is None or found not in old, steps.trace
        world.end(*clients)


def search_death(world: World) -> None:
    """A client dies in quarantine while it is reaped, disowned by its successor, and another stores and reads."""
    for steps in orders(SWITCHES):
        world.begin()
        dead, heir, other = world.client(), world.client(), world.client()
        size = world.form.header_bytes + PAYLOAD
        world.core.reserve(dead, world.form, (HASH,), (world.form.template.root,), [size])
        world.core.leave(dead, is_dead=False)
        assert dead.is_quarantined
        steps.run(
            {
                "reap": partial(world.core.reap, lambda holder: holder.is_quarantined),
                "disown": partial(world.core.disown, heir, dead.token),
                "store": partial(world.store, other),
                "read": partial(world.acquire, other),
            }
        )
        assert dead.number not in world.core.holders
        assert not dead.segments
        assert world.is_there(), steps.trace
        world.end(dead, heir, other)
        flush(world)


def search_resets(world: World) -> None:
    """Two resets, a client that has heard of a larger epoch, and one who looks: it never falls, and each reset gets one
    that nobody had seen before it was asked for."""

    class Keeps(SteppedTier):
        epoch = 0

        def seen_epoch(self) -> int:
            return self.epoch

        def read_epoch(self) -> int:
            point()
            return self.epoch

        def raise_epoch(self, least: int) -> int:
            point()
            self.epoch = max(self.epoch + 1, least)
            return self.epoch

    for steps in orders(SWITCHES):
        kept = Keeps(1 << 12, name="keeps")
        epoch = DomainEpoch([])
        epoch._tiers, epoch._lock = [kept], SteppedLock()  # type: ignore[assignment]
        seen: list[int] = []

        def look(epoch: DomainEpoch = epoch, seen: list[int] = seen) -> None:
            for _ in range(2):
                seen.append(epoch.value)
                point()

        def reset(epoch: DomainEpoch = epoch) -> None:
            before = epoch.value
            assert epoch.rise(0) > before
            assert epoch.value > before

        steps.run({"one": reset, "two": reset, "told": partial(epoch.at_least, 3), "look": look})
        epoch._agree()
        assert seen == sorted(seen), steps.trace
        assert kept.epoch == epoch.value >= max(seen)
        epoch.close()


def test_what_was_deleted_on_its_way_down_is_not_fetched_when_it_lands(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found here: who asked between its landing and the word of it had brought it up again, for good."""
    world.begin()
    asking, deleting = world.client(), world.client()
    payload, land = np.ones(PAYLOAD, np.uint8), world.below.submit_put
    monkeypatch.setattr(lower, "taken_out", lambda *_, **__: payload)  # of a frame that nobody wrote

    def submit_put(items: Any) -> Any:
        assert dropping.delete(world.core, deleting, world.form, (HASH,)) == 1
        return land(items)

    monkeypatch.setattr(world.below, "submit_put", submit_put)
    steps = [partial(world.store, asking), world.lower._start_spills, partial(world.acquire, asking), world.drive]
    for step in steps:
        step()
    world.end(asking, deleting)
    assert world.core.run(asking, world.form, (HASH,)) == (0, 0)


SEARCHES = [search_flush_and_fetch, search_delete_and_fetch, search_flush_and_stores, search_death, search_resets]


@pytest.mark.parametrize("search", SEARCHES)
def test_every_order(world: World, search: Callable[[World], None]) -> None:
    search(world)


def _flush_looks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real, looked = dropping.empty, set[int]()

    def once(core: Core, arena: ArenaIndex, roots: set[bytes] | None) -> int:
        name = hash(frozenset(roots or ()))
        first = name not in looked
        looked.add(name)
        return real(core, arena, roots) if first else 0

    monkeypatch.setattr(dropping, "empty", once)


def _delete_forgets_what_comes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LowerTier, "forget_fetch", lambda *_: None)


def _publish_forgets_the_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ArenaIndex, "is_void", lambda *_: False)


def _a_larger_epoch_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    def publish(self: DomainEpoch, epoch: int) -> bool:
        is_news = epoch > self.value
        with self._lock:
            self._set(epoch)
        return is_news

    monkeypatch.setattr(DomainEpoch, "_publish", publish)


@pytest.mark.parametrize(
    ("search", "plant"),
    [
        (search_flush_and_fetch, _flush_looks_once),
        (search_delete_and_fetch, _delete_forgets_what_comes_up),
        (search_flush_and_stores, _publish_forgets_the_flush),
        (search_resets, _a_larger_epoch_is_overwritten),
    ],
)
def test_a_planted_bug_is_found(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    search: Callable[[World], None],
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        search(world)
