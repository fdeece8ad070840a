"""What a failed test had open is closed by tests/conftest.py: fixtures and later tests find nothing of it."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from kvstore.daemon import Daemon, DaemonTier
from kvstore.testing.transfer_contract import key_of
from tests.conftest import close_what_is_open
from tests.kvstore.daemon.kit import put, settings, tier_at


def failing(directory: Path, opened: list[Daemon | DaemonTier]) -> None:
    daemon = Daemon(settings(directory))
    daemon.start()
    opened.append(daemon)
    tiers = [tier_at(daemon.settings.socket_path) for _ in range(2)]
    opened += tiers
    raise AssertionError(put(tiers[0], [key_of(1)]))


def test_what_a_failed_test_had_open_is_closed(tmp_path: Path) -> None:
    opened: list[Daemon | DaemonTier] = []
    traceback: TracebackType | None = None
    try:
        failing(tmp_path, opened)
    except AssertionError as error:
        traceback = error.__traceback__
    own = traceback.tb_next if traceback is not None else None
    close_what_is_open(own)
    daemon, first, second = opened
    assert isinstance(daemon, Daemon)
    assert not daemon.is_ready
    assert not daemon.stats()["clients"]
    assert isinstance(first, DaemonTier)
    assert isinstance(second, DaemonTier)
    assert not first.is_up
    assert not second.is_up
