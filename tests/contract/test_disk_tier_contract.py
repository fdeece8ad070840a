"""The tier contract on a real directory: values in the index, frames in slots, sizes around the border, every sync."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import Executor
from kvstore.testing import TierContract


class DiskContract(TierContract):
    leaves_first = True
    pins = True
    sync: ClassVar[str] = "none"
    secret: ClassVar[bytes | None] = None
    directory: Path
    made: list[str]

    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> Iterator[None]:
        self.directory, self.made = tmp_path, []
        yield
        for directory in self.made:
            shutil.rmtree(directory)

    def make_tier(self, capacity_bytes: int, executor: Executor) -> DiskTier:
        quick = Path("/dev/shm")  # where a sync costs nothing; tests/kvstore/test_disk_sync.py has the real thing
        on_disk = self.sync == "none" or not quick.is_dir()
        directory = tempfile.mkdtemp(dir=self.directory if on_disk else quick)
        self.made.append(directory)
        return DiskTier(directory, capacity_bytes, executor, sync=self.sync, secret=self.secret)


class TestDiskTierWithSlots(DiskContract):
    payload_bytes = 80 << 10
    overhead_bytes = 20 << 10


class TestDiskTierInTheIndex(DiskContract):
    payload_bytes = 4096
    capacity_payloads = 256
    overhead_bytes = 8192


class TestDiskTierOfOddSizes(DiskContract):
    """Just over what the index takes."""

    payload_bytes = (64 << 10) + 4
    overhead_bytes = 20 << 10


class TestDiskTierOnBatchSync(DiskContract):
    payload_bytes = 68 << 10
    overhead_bytes = 20 << 10
    sync = "batch"
    secret = b"a secret of tests, 32 bytes long"


class TestDiskTierOnAlwaysSync(DiskContract):
    payload_bytes = 60000
    overhead_bytes = 20 << 10
    sync = "always"
    fault_rounds = 1
