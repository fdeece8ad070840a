"""How fast connections are let in, by a clock that the test turns."""

from __future__ import annotations

from kvstore.daemon.door import Door


def let_in(door: Door, pid: int, attempts: int, begin: float) -> tuple[int, float]:
    """How many of so many attempts, one after the other as fast as the door says, and the time after them."""
    now, count = begin, 0
    for _ in range(attempts):
        now += door.delay_seconds(now)
        count += door.lets_in(pid, now)
    return count, now


def test_every_client_of_a_host_comes_back_at_once_after_a_restart() -> None:
    door, now = Door(), 1000.0
    for pid in range(32):
        count, now = let_in(door, pid, 8, now)
        assert count == 8
    assert now == 1000.0, "256 connections without a wait"


def test_one_process_that_connects_again_and_again_is_turned_away_and_others_are_not() -> None:
    door = Door()
    count, now = let_in(door, 1, 4000, 1000.0)
    assert 32 <= count <= 32 + 4 * (now - 1000.0) + 1
    assert now - 1000.0 > 3.5, "and looked at 500 times a second at most"
    assert let_in(door, 2, 8, now)[0] == 8
    assert let_in(door, 1, 1, now + 1)[0] == 1, "it is let in again, slowly"


def test_a_flood_from_many_processes_is_let_in_a_hundred_times_a_second() -> None:
    door, now, total = Door(), 1000.0, 0
    for pid in range(2000):
        count, now = let_in(door, pid, 1, now)
        total += count
    assert total == 2000
    assert 15 < now - 1000.0 < 20


def test_who_was_cut_off_for_what_it_sent_has_fewer_attempts() -> None:
    door, entries = Door(), 0
    while door.lets_in(1, 1000.0):
        door.punish(1)
        entries += 1
    assert entries == 4
    assert door.lets_in(2, 1000.0)
    for pid in range(5000):
        door.punish(pid)
    assert len(door._processes) == 1024, "bounded"
