"""Without checksums: what is still promised, and that nobody has it who did not ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.daemon import Daemon
from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import ThreadExecutor
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import ResultCode
from tests.kvstore.daemon.kit import RawClient, get, put, settings, tier_at, until

OK, MISS, CORRUPT = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT
KEYS = [key_of(number) for number in range(4)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    disk = DiskTier(tmp_path / "disk", 32 << 20, ThreadExecutor("disk"))
    daemon = Daemon(settings(tmp_path, segment_bytes=1 << 20, checksums=False), [disk])
    daemon.start()
    yield daemon
    daemon.stop()


def test_it_is_never_the_default_and_never_for_another_domain(tmp_path: Path) -> None:
    assert settings(tmp_path).checksums
    unchecked = settings(tmp_path, checksums=False, domains={"team": [4_000_000]})
    assert not unchecked.checks("")
    assert unchecked.checks("team")
    assert unchecked.checks("uid-12345")
    daemon = Daemon(settings(tmp_path))
    daemon.start()
    tier = tier_at(daemon.settings.socket_path)
    assert tier.link.checks
    client = RawClient(daemon.settings.socket_path)
    assert client.welcome.checksums
    client.close()
    tier.close()
    daemon.stop()


def test_copies_come_back_and_the_disk_has_them_checked(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path, fetch_seconds=60)
    assert not tier.link.checks
    assert put(tier, KEYS) == [OK] * 4
    assert get(tier, KEYS) == [OK] * 4
    until(lambda: daemon.stats()["tiers"]["disk"]["counts"].get("spilled") == 4)
    with daemon.core.lock:
        for entry in list(daemon.core.arenas[""].linked()):
            daemon.core.arenas[""].unlink(entry)
    assert get(tier, KEYS) == [OK] * 4, "from the disk"
    assert not [cause for cause in daemon.stats()["counts"] if cause.startswith("corrupt")]
    tier.close()


def test_a_copy_of_another_block_is_still_a_miss_and_changed_bytes_are_not_seen(daemon: Daemon) -> None:
    """The header is checked, the payload is not: that is what the setting gives away."""
    writer, reader = (tier_at(daemon.settings.socket_path) for _ in range(2))
    assert put(writer, KEYS) == [OK] * 4
    until(lambda: daemon.stats()["tiers"]["disk"]["counts"].get("spilled") == 4, what="the spill checks what it reads")
    (memory,) = writer.link._writable.values()
    entries = [daemon.core.arenas[""].find(key) for key in KEYS]
    first, second, third = (slice(one.offset, one.offset + one.size_bytes) for one in entries[:3] if one is not None)
    memory[first] = memory[second]  # the place of one copy holds another one now
    memory[third.start + 2000] ^= 1
    assert get(reader, KEYS[:2]) == [CORRUPT, OK]
    with pytest.raises(AssertionError, match="wrong bytes"):
        get(reader, KEYS[2:3])
    for tier in (writer, reader):
        tier.close()


def test_a_reader_whose_lease_ended_meanwhile_has_nothing(daemon: Daemon) -> None:
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, KEYS) == [OK] * 4
    tier.link.lease_seconds = 0.0
    assert get(tier, KEYS) == [MISS] * 4
    assert tier.counters()["lease_ended"] == 1
    tier.link.lease_seconds = 10.0
    assert get(tier, KEYS) == [OK] * 4
    tier.close()


def test_a_client_that_checks_takes_nothing_unchecked(daemon: Daemon) -> None:
    """As after a restart with the setting changed: it is a miss, not wrong bytes."""
    tier = tier_at(daemon.settings.socket_path)
    assert put(tier, KEYS) == [OK] * 4
    tier.link.checks = True
    assert set(get(tier, KEYS)) == {CORRUPT}
    tier.close()
