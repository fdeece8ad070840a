"""The tier contract through a real daemon: socket, leases and shared memory; with a disk below it, too."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.config import KVStoreConfig
from kvstore.daemon import Daemon, DaemonSettings, DaemonTier
from kvstore.daemon.segments import PAGE_BYTES
from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import Executor, ThreadExecutor
from kvstore.redis_tier.tier import RedisTier
from kvstore.testing import TierContract
from tests import servers

NUMBERS = itertools.count()


class DaemonContract(TierContract):
    """Every tier gets a daemon of its own, in this process."""

    leaves_first = True
    pins = True
    segments: ClassVar[int] = 1
    directory: Path
    daemons: list[Daemon]

    @pytest.fixture(autouse=True)
    def _daemons(self, tmp_path: Path) -> Iterator[None]:
        self.directory, self.daemons = tmp_path, []
        yield
        for daemon in self.daemons:
            daemon.core.lock.acquire(timeout=5)
            try:
                for arena in daemon.core.arenas.values():
                    arena.check()
            finally:
                daemon.core.lock.release()
            daemon.stop()

    def settings(self, capacity_bytes: int) -> DaemonSettings:
        segment_bytes = capacity_bytes // self.segments // PAGE_BYTES * PAGE_BYTES
        return DaemonSettings(
            store=KVStoreConfig(host_bytes=capacity_bytes, spill_policy="everything"),
            socket_path=str(self.directory / f"{next(NUMBERS)}.sock"),
            segment_bytes=segment_bytes,
        )

    def make_tier(self, capacity_bytes: int, executor: Executor) -> DaemonTier:
        settings = self.settings(capacity_bytes)
        daemon = Daemon(settings)
        daemon.start()
        self.daemons.append(daemon)
        return DaemonTier(settings.socket_path, executor, timeout_seconds=10)


class TestDaemonTier(DaemonContract):
    overhead_bytes = 1024


class TestDaemonTierAboveADisk(DaemonContract):
    """What left the arena is found on the disk; what is cleared and deleted is gone there, too."""

    payload_bytes = 8192
    overhead_bytes = 2048
    segments = 8  # what comes up from the disk needs one of the daemon's own
    leaves_first = False
    pins = False
    evicts = False

    def make_tier(self, capacity_bytes: int, executor: Executor) -> DaemonTier:
        settings = self.settings(capacity_bytes)
        disk = DiskTier(self.directory / f"disk{next(NUMBERS)}", 64 << 20, ThreadExecutor("disk"))
        daemon = Daemon(settings, [disk])
        daemon.start()
        self.daemons.append(daemon)
        return DaemonTier(settings.socket_path, executor, timeout_seconds=10)


class TestDaemonTierAboveAServer(DaemonContract):
    """The same with a Valkey below, in a namespace of its own."""

    payload_bytes = 8192
    overhead_bytes = 2048
    segments = 8
    leaves_first = False
    pins = False
    evicts = False

    def make_tier(self, capacity_bytes: int, executor: Executor) -> DaemonTier:
        settings = self.settings(capacity_bytes)
        url = f"{servers.shared_server().unix_url}?namespace=daemon{next(NUMBERS)}"
        daemon = Daemon(settings, [RedisTier(url, ThreadExecutor("redis"), ttl_seconds=600)])
        daemon.start()
        self.daemons.append(daemon)
        return DaemonTier(settings.socket_path, executor, timeout_seconds=10)


class TestDaemonTierOfManySegments(DaemonContract):
    payload_bytes = 20000
    capacity_payloads = 40
    overhead_bytes = 4000
    segments = 10
