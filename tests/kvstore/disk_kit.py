"""Tools of the disk tier's tests: copies of every size, what a directory holds, a writer process that gets killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.disk_tier.tier import DiskTier
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import CopyKey, GetItem, PutItem, ResultCode

ROOT = Path(__file__).resolve().parents[2]
OK, MISS, CORRUPT, FULL = ResultCode.OK, ResultCode.MISS, ResultCode.CORRUPT, ResultCode.FULL
SLOT, INLINE = 80 << 10, 4096
SIZES = (1, 500, 4080, INLINE, 20_000, 64 << 10, (64 << 10) + 1, SLOT, 300_000)


def size_of(number: int) -> int:
    return SIZES[number % len(SIZES)]


def put(tier: DiskTier, numbers: Sequence[int], size: int | None = None) -> list[ResultCode]:
    items = [PutItem(key_of(n), [payload_of(key_of(n), size or size_of(n))], None) for n in numbers]
    tier.submit_put(items)
    return list(tier.poll()[-1].results)


def get(tier: DiskTier, numbers: Sequence[int], size: int | None = None) -> list[ResultCode]:
    """Read and compare: an OK with other bytes is the worst that can happen."""
    buffers = [np.zeros(size or size_of(n), np.uint8) for n in numbers]
    tier.submit_get([GetItem(key_of(n), buffer) for n, buffer in zip(numbers, buffers, strict=True)])
    results = list(tier.poll()[-1].results)
    for number, buffer, code in zip(numbers, buffers, results, strict=True):
        assert code is not OK or np.array_equal(buffer, payload_of(key_of(number), buffer.nbytes)), number
    return results


def stored(tier: DiskTier, numbers: Sequence[int]) -> list[int]:
    return [n for n, there in zip(numbers, tier.contains([key_of(n) for n in numbers]), strict=True) if there]


def only_slot_file(directory: Path) -> Path:
    (path,) = directory.glob("slots-*")
    return path


def program(text: str, *arguments: object) -> subprocess.Popen[bytes]:
    """Start a Python process on `text` with the project importable."""
    command = [sys.executable, "-c", textwrap.dedent(text), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stdin=subprocess.PIPE)


@contextmanager
def small_file_system(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size; the test is skipped where this user may not mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(path)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def other_forms(number: int) -> list[CopyKey]:
    """Keys of the same block that a wrong reader might take for it."""
    return [
        key_of(number, root=b"\x08" * 32),
        key_of(number, codec="int4"),
        key_of(number, exact=False),
        key_of(number, parameters=b"fp8"),
    ]
