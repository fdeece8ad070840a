"""What goes down to which tier: what one did not take is offered to it again, what it has is not written twice, and one
that is down costs nobody anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from allocator.errors import TierError
from kvstore.daemon import Daemon, DaemonTier, lower, spilling
from kvstore.daemon.lower import LowerTier
from kvstore.host_tier.tier import HostTier
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import Job, PutItem, ResultCode, Transfer
from tests.kvstore.daemon.handover_kit import FdStore
from tests.kvstore.daemon.kit import PAYLOAD_BYTES, get, put, settings, tier_at, until
from tests.kvstore.driving import HeldExecutor
from tests.servers import Server

OK, FAILED, FULL, TOO_LARGE = ResultCode.OK, ResultCode.FAILED, ResultCode.FULL, ResultCode.TOO_LARGE
KEYS = [key_of(number) for number in range(8)]


class Below(HostTier):
    """A real arena that can be told to refuse, to be down, or to raise."""

    is_down = False

    def __init__(self, name: str, executor: Any = None, capacity_bytes: int = 1 << 20) -> None:
        super().__init__(capacity_bytes, executor, slot_bytes=(PAYLOAD_BYTES,), name=name)
        self.refusal = OK
        self.error: Exception | None = None
        self.put_count = 0

    def submit_put(self, items: Sequence[PutItem | tuple[Any, ...]]) -> Transfer:
        self.put_count += len(items)
        self._raise()
        return super().submit_put(items)

    def submit_get(self, *arguments: Any, **details: Any) -> Transfer:
        self._raise()
        return super().submit_get(*arguments, **details)

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _put_one(self, job: Job) -> ResultCode:
        return super()._put_one(job) if self.refusal is OK else self.refusal


class World:
    def __init__(self, directory: Path, **changes: Any) -> None:
        self.held = HeldExecutor()
        self.near, self.far = Below("near"), Below("far")
        self.daemon = Daemon(settings(directory, **changes), [self.near, self.far])
        self.daemon.start()
        self.tier = tier_at(self.daemon.settings.socket_path, fetch_seconds=60)

    def counts(self, place: int) -> dict[str, int]:
        return dict(self.daemon.core.lowers[place].counts)

    def settle(self) -> None:
        """All that was offered has come to its end."""
        until(lambda: not any(any(one.depths.values()) for one in self.daemon.core.lowers))

    def use(self, keys: Sequence[Any] = KEYS) -> None:
        assert get(self.tier, keys) == [OK] * len(keys)
        self.settle()

    def close(self) -> None:
        self.tier.close()
        self.daemon.stop()
        for arena in self.daemon.core.arenas.values():
            arena.check()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def stored(world: World) -> None:
    assert put(world.tier, KEYS) == [OK] * 8
    world.settle()


@pytest.mark.parametrize("refusal", [FAILED, FULL, ResultCode.CANCELLED])
def test_what_a_tier_did_not_take_is_offered_to_it_again(world: World, refusal: ResultCode) -> None:
    world.near.refusal = refusal
    stored(world)
    assert (world.near.copy_count, world.far.copy_count) == (0, 8)
    assert world.counts(0)["spills_failed"] == 8
    world.near.refusal = OK
    world.use()
    assert (world.near.copy_count, world.near.put_count, world.far.put_count) == (8, 16, 8)
    world.use()
    assert (world.near.put_count, world.far.put_count) == (16, 8), "what they have is not written again"


def test_what_can_never_fit_is_not_tried_again(world: World) -> None:
    world.near.refusal = TOO_LARGE
    stored(world)
    world.use()
    assert (world.near.put_count, world.counts(0)["spills_failed"]) == (8, 8)


def test_a_tier_that_is_down_costs_nothing_and_gets_it_later(world: World) -> None:
    world.near.is_down = True
    stored(world)
    world.use()
    near = world.daemon.core.lowers[0]
    assert (world.near.put_count, near.queued_bytes, near._scratch.nbytes) == (0, 0, 0)
    assert world.far.copy_count == 8
    world.near.is_down = False
    world.use()
    assert (world.near.copy_count, world.far.put_count) == (8, 8)


def test_what_waits_for_a_tier_that_goes_down_is_fenced_no_longer(tmp_path: Path) -> None:
    held = HeldExecutor()
    near = Below("near", held)
    daemon = Daemon(settings(tmp_path), [near])
    daemon.start()
    tier, below = tier_at(daemon.settings.socket_path), daemon.core.lowers[0]
    assert put(tier, KEYS[:1]) == [OK]
    until(lambda: held.tasks)  # the first is under way, the others wait
    assert put(tier, KEYS[1:]) == [OK] * 7
    assert below.queued_bytes > 7 * PAYLOAD_BYTES
    near.is_down = True
    held.run()
    until(lambda: below.queued_bytes == 0)
    assert below.counts["spills_down"] == 7
    near.is_down = False
    assert get(tier, KEYS) == [OK] * 8

    def written() -> bool:
        held.run()
        return near.copy_count == 8

    until(written)
    assert near.put_count == 8
    tier.close()
    daemon.stop()


def test_what_another_host_has_written_is_not_written_again(world: World) -> None:
    world.far.submit_put([PutItem(key, [payload_of(key, PAYLOAD_BYTES)]) for key in KEYS[:5]])
    stored(world)
    assert (world.near.put_count, world.far.put_count, world.far.copy_count) == (8, 5 + 3, 8)
    assert world.counts(1)["spills_there"] == 5


def test_many_that_a_tier_has_are_gone_through_without_a_pause(tmp_path: Path) -> None:
    far, keys = Below("far", capacity_bytes=8 << 20), [key_of(number) for number in range(450)]
    far.submit_put([PutItem(key, [payload_of(key, PAYLOAD_BYTES)]) for key in keys])
    daemon = Daemon(settings(tmp_path, 8 << 20), [far])
    daemon.start()
    tier, below = tier_at(daemon.settings.socket_path), daemon.core.lowers[0]
    assert put(tier, keys) == [OK] * 450
    assert until(lambda: below.counts["spills_there"] == 450) < 8, "28 pauses are 14 s"
    tier.close()
    daemon.stop()


def test_what_a_tier_has_lost_since_is_offered_to_it_again_after_a_while(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is used in shared memory all the while grew old below, went there first, and with the daemon for good."""
    stored(world)
    assert world.near.delete(KEYS[:3]) == 3
    world.use()
    assert world.near.copy_count == 5
    before = world.far._index.find(KEYS[0])
    assert before is not None
    tick = before.tick
    monkeypatch.setattr(spilling, "_BELIEVED_SECONDS", 0.0)
    world.use()
    assert (world.near.copy_count, world.near.put_count, world.far.put_count) == (8, 8 + 3, 8)
    assert before.tick > tick, "a use above is one below"


def test_a_tier_that_refuses_does_not_keep_another_believed_in(world: World) -> None:
    """Each refusal was a fresh offer, and the belief in the other tier began anew with it."""
    stored(world)
    entry = world.daemon.core.arenas[""].linked()[0]
    entry.offered_seconds = since = entry.offered_seconds - 100
    entry.offered &= ~world.daemon.core.lowers[0].mark  # as after a refusal
    world.use()
    assert entry.offered_seconds == since


def test_what_came_up_from_one_tier_is_offered_to_the_others(world: World) -> None:
    world.far.submit_put([PutItem(key, [payload_of(key, PAYLOAD_BYTES)]) for key in KEYS])
    world.use()
    assert world.counts(1)["fetched"] == 8
    assert (world.near.copy_count, world.far.put_count) == (8, 8)


@pytest.mark.parametrize("error", [RuntimeError("no thread"), MemoryError()])
def test_a_tier_that_raises_loses_one_batch_and_no_more(world: World, error: Exception) -> None:
    world.near.error = error
    stored(world)
    assert (world.near.copy_count, world.counts(0)["spills_failed"]) == (0, 8)
    world.use()
    assert world.near.copy_count == 8
    world.far.submit_put([PutItem(key_of(100), [payload_of(key_of(100), PAYLOAD_BYTES)])])
    world.far.error = error
    assert get(world.tier, [key_of(100)]) == [OK], "asked for again, it comes"
    assert world.counts(1)[f"failed_{type(error).__name__}"] == 1


def test_a_flush_does_not_wait_for_what_others_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "_SETTLE_SECONDS", 60.0)
    held = HeldExecutor()
    far = Below("far", held)
    far.submit_put([PutItem(key, [payload_of(key, PAYLOAD_BYTES)]) for key in KEYS])
    held.run()
    far.poll()
    daemon = Daemon(settings(tmp_path), [far])
    daemon.start()
    tier = tier_at(daemon.settings.socket_path, fetch_seconds=0)
    get(tier, KEYS[:1])
    until(lambda: held.tasks, what="it is on its way up")
    started = time.monotonic()
    with pytest.raises(TierError):  # this tier drops no single root, which is another matter
        daemon.core.lowers[0].clear({b"\x0c" * 32}, all_allowed=False)
    assert time.monotonic() - started < 30
    tier.close()
    daemon.stop()


def test_after_a_hand_over_what_the_server_has_is_not_written_again(tmp_path: Path) -> None:
    store = FdStore(tmp_path)
    with Server() as server:
        spilled = []
        for _ in range(2):
            daemon = store.daemon(settings(tmp_path), [RedisTier(server.unix_url)])
            tier = tier_at(daemon.settings.socket_path)
            assert set(put(tier, KEYS)) == {OK}
            assert get(tier, KEYS) == [OK] * 8
            below = daemon.core.lowers[0]

            def taken(tier: DaemonTier = tier, below: LowerTier = below) -> bool:
                """A busy machine may time the server out: what is not there is used, and so offered, once more."""
                get(tier, KEYS)
                return all(below.tier.contains(KEYS)) and not any(below.depths.values())

            until(taken)
            spilled.append(below.counts["spilled"])
            tier.close()
            daemon.stop()
        assert spilled[1] == 0 < spilled[0]
    store.close()


def test_a_server_that_hangs_while_copies_are_stored_has_them_all_in_the_end(tmp_path: Path) -> None:
    """Found on a busy machine: what failed by a timeout, and all that was stored while the breaker was open, was never
    offered again."""
    with Server() as server:
        daemon = Daemon(settings(tmp_path), [RedisTier(server.unix_url)])
        daemon.start()
        below, tier = daemon.core.lowers[0], tier_at(daemon.settings.socket_path)
        with server.hung():
            assert put(tier, KEYS[:4]) == [OK] * 4
            until(lambda: below.state == "down")
            assert put(tier, KEYS[4:]) == [OK] * 4
            assert below.counts["spilled"] == 0
        until(lambda: get(tier, KEYS) and all(below.tier.contains(KEYS)), what="each is used until it is there")
        tier.close()
        daemon.stop()
