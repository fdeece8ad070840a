"""How much clients may ask, however many connections they open and whenever they wake: the real pace, by a clock of the
test's own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from allocator.errors import TierError
from kvstore.daemon import Daemon, protocol, session
from kvstore.daemon.pace import Pace
from kvstore.daemon.protocol import Cause
from kvstore.daemon.session import Session
from kvstore.host_tier.tier import HostTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import CopyKey
from tests.kvstore.daemon.kit import RawClient, checked_daemon, counts, settings

RATE = 40_000
LOOK_SECONDS = 0.1
ASKED = protocol.Contains(1, 0, b"")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with checked_daemon(settings(tmp_path)) as made:
        yield made


class Clock:
    """A test's own; each session waits on it for itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.waited = 1000.0, 0.0
        monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep))

    def _sleep(self, seconds: float) -> None:
        self.waited = seconds


def many(daemon: Daemon, pace: Pace, count: int, *, pid: int = 7) -> list[Session]:
    """Without sockets: what is asked for comes from the test."""
    return [Session(daemon.core, None, os.geteuid(), pid, -1, pace) for _ in range(count)]  # type: ignore[arg-type]


def asks(one: Session, clock: Clock, cost: float) -> tuple[bool, float]:
    """Whether one more request of this cost is met, and how long it waits."""
    clock.waited = 0.0
    one.request_count += 1
    one._tokens -= 1
    met = one._tokens >= 0 or one._has_time(ASKED)
    if met:
        one._charge(cost - 1)
    return met, clock.waited


@pytest.mark.parametrize("count", [1, 16, 60])
def test_connections_that_wake_at_once_get_no_more_together_than_one(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Found here: each was taken for the only one until the next look, so sixty that slept in between had it all."""
    clock, pace = Clock(monkeypatch), Pace(RATE)
    sessions = many(daemon, pace, count)
    good = many(daemon, pace, 1, pid=8)[0]
    free_at, met, good_waited, step, cost = dict.fromkeys(sessions, 0.0), 0.0, 0.0, 0.002, 100.0
    seconds = 4.0
    for number in range(round(seconds / step)):
        clock.now += step
        asks(good, clock, 1.0)
        good_waited = max(good_waited, clock.waited)
        is_awake = number * step % (3 * LOOK_SECONDS) < LOOK_SECONDS
        for one in sessions if is_awake else ():
            while free_at[one] <= clock.now and (asked := asks(one, clock, cost)):
                met += cost * asked[0]
                free_at[one] = clock.now + asked[1]
                if asked[1]:
                    break
        if number % round(LOOK_SECONDS / step) == 0:
            pace.settle([*sessions, good], LOOK_SECONDS)
    assert met <= 1.3 * RATE * seconds + 0.6 * RATE, "as much as the rate allows in all, and two bursts"
    assert good_waited == 0.0, "who asks little has not waited"


def test_who_asks_for_the_costliest_again_and_again_is_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found here: what a request cost beyond a tenth of a second was forgotten, so sixty connections that each asked
    ten times a second for the costliest had a core to themselves."""
    clock, pace = Clock(monkeypatch), Pace(RATE)
    sessions, seconds, cost = many(daemon, pace, 60), 10.0, 400.0
    free_at, met, longest = dict.fromkeys(sessions, 0.0), 0.0, 0.0
    for number in range(round(seconds / 0.01)):
        clock.now += 0.01
        for one in sessions:
            if free_at[one] <= clock.now:
                is_met, waited = asks(one, clock, cost)
                met += cost * is_met
                longest = max(longest, waited)
                free_at[one] = clock.now + waited
        if number % 10 == 0:
            pace.settle(sessions, LOOK_SECONDS)
    assert met <= RATE * (seconds + 4)
    assert longest <= 0.1


def test_connections_that_end_between_two_looks_are_counted(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found here: what they had borrowed was given back when they had gone, so who connected anew for each burst had
    half the rate more than there is."""
    clock, pace, met, seconds = Clock(monkeypatch), Pace(RATE), 0.0, 4.0
    steady = many(daemon, pace, 1, pid=8)[0]
    pace.settle([steady], LOOK_SECONDS)
    for _ in range(round(seconds / LOOK_SECONDS)):
        (brief,) = many(daemon, pace, 1)
        clock.now += LOOK_SECONDS / 2
        while asks(brief, clock, 100.0)[0] and not clock.waited:
            met += 100.0
        pace.ended(brief)
        before = pace._spare
        pace.settle([steady, brief], 0.0)  # a look that had begun before
        assert pace._spare >= before - brief.spent, "nothing is counted twice"
        clock.now += LOOK_SECONDS / 2
        steady.request_count += round(RATE * LOOK_SECONDS)
        pace.settle([steady], LOOK_SECONDS)
    assert met <= 0.4 * RATE * seconds, "the rate is used up by another; a new one may have its first part each time"


def test_who_goes_on_asking_at_the_least_rate_is_heard_again(tmp_path: Path) -> None:
    """Found here: each refusal for owing much cost as much as its wait had brought, so the debt stayed for ever."""
    with checked_daemon(settings(tmp_path, requests_per_second=100)) as daemon:
        client = RawClient(daemon.settings.socket_path)
        client.form()
        next(iter(daemon._sessions))._tokens = -300.0
        answers = [client.ask(protocol.Run, 0, key_of(1).hash) for _ in range(12)]
        assert isinstance(answers[0], protocol.Refused)
        assert isinstance(answers[-1], protocol.Count)
        client.close()


def test_who_owes_much_may_still_give_back(daemon: Daemon) -> None:
    client = RawClient(daemon.settings.socket_path)
    client.form()
    ((_, _, _, lease),) = client.reserve([key_of(1)])
    own = next(iter(daemon._sessions))
    own._tokens = -10.0 * RATE
    refused = client.ask(protocol.Run, 0, key_of(1).hash)
    assert (refused.cause, refused.seq) == (Cause.PACE, client.seq)
    own._tokens = -10.0 * RATE
    assert isinstance(client.ask(protocol.Publish, [lease]), protocol.Flags)
    own._tokens = 1.0
    assert client.ask(protocol.Run, 0, key_of(1).hash).count == 1, "the connection stands"
    assert counts(daemon)["refused_pace"] == 1
    client.close()


def test_a_lower_tiers_refusal_costs_its_client_nothing(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counted as twenty requests, as if the client had asked for too much."""

    def raises(*_: object) -> int:
        raise TierError("down")

    monkeypatch.setattr(daemon.core.epochs.of(""), "rise", raises)
    client = RawClient(daemon.settings.socket_path)
    own = next(iter(daemon._sessions))
    before = own.spent
    for _ in range(20):
        assert client.ask(protocol.Epoch, 0, True).cause == Cause.LOWER
    assert own.refused_count == 20
    assert own.spent - before < 20 * 20
    client.close()


def test_asking_for_copies_that_are_not_there_is_dear(daemon: Daemon) -> None:
    """A flood of them cost a good client's lookups as much as it was allowed to; who looks up first asks for few."""
    client = RawClient(daemon.settings.socket_path)
    client.form()
    own = next(iter(daemon._sessions))
    before = own.spent
    client.ask(protocol.Acquire, 0, b"".join(key_of(n).hash for n in range(100)), [4096] * 100)
    assert own.spent - before >= 200
    client.close()


class SlowBelow(HostTier):
    """Looks for long."""

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        until = time.thread_time() + 0.002
        while time.thread_time() < until:
            pass
        return 0


def test_a_short_lookup_counts_for_what_the_tiers_below_make_of_it(tmp_path: Path) -> None:
    """Found here: with a remote tier a lookup of thirty took as long as ten in shared memory, and counted as one."""
    for lowers, least, most in (
        ([], -0.001, 0.001),
        ([SlowBelow(1 << 20, slot_bytes=(4096,), name="below")], 200.0, 1e9),
    ):
        daemon = Daemon(settings(tmp_path), lowers)
        daemon.start()
        client = RawClient(daemon.settings.socket_path)
        client.form()
        (asking,) = daemon._sessions
        before = asking.spent
        assert client.ask(protocol.Run, 0, key_of(1).hash).count == 0
        assert least <= asking.spent - before - 1 <= most
        client.close()
        daemon.stop()
