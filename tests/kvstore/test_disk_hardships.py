"""A running disk tier whose surroundings change: others fill the disk, its directory turns read-only or goes.

Outcome of each: right bytes or a counted miss, no hang, and recovery without a restart.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvstore.disk_tier.tier import DiskTier
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.disk_kit import FULL, INLINE, MISS, OK, SIZES, SLOT, get, program, put, small_file_system, stored
from tests.kvstore.test_disk_kill import WRITER, killed_rounds

MIB = 1 << 20


def du_bytes(directory: Path) -> int:
    """Allocated blocks of everything in the directory, by the tool that operators use."""
    command = ["du", "--summarize", "--block-size=1", str(directory)]
    for _ in range(100):
        said = subprocess.run(command, capture_output=True, check=False)
        if said.returncode == 0:  # otherwise a file went while it looked
            return int(said.stdout.split()[0])
    raise AssertionError(said.stderr)


def fill_up(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(fd, bytes(4096)):
            pass
    os.close(fd)


def puts_come_back(tier: DiskTier, number: int, size: int, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while put(tier, [number], size) != [OK]:
        assert time.monotonic() < deadline, tier.counters()
        time.sleep(0.01)
    assert get(tier, [number], size) == [OK]


@pytest.mark.parametrize("size", [INLINE, SLOT])
def test_a_disk_that_somebody_else_fills(tmp_path: Path, size: int) -> None:
    with small_file_system(tmp_path / "small", "16m") as folder:
        tier = DiskTier(folder / "tier", 12 * MIB, retry_seconds=0.02)
        assert set(put(tier, range(8), size)) == {OK}
        fill_up(folder / "other")
        results = [code for n in range(100, 400) for code in put(tier, [n], size)]
        assert FULL in results
        assert set(results) <= {OK, FULL}
        there = stored(tier, range(400))
        assert set(get(tier, there, size)) == {OK}
        (folder / "other").unlink()
        puts_come_back(tier, 1000, size)
        assert tier.counters()["disk_full"] >= 1
        tier.check_invariants()
        tier.close()
        again = DiskTier(folder / "tier", 12 * MIB)
        assert get(again, [1000], size) == [OK]
        again.close()


def test_a_directory_that_turns_read_only_under_a_running_tier() -> None:
    """By its mode, so as a user whom modes bind."""
    text = """
        import os, sys, time
        from pathlib import Path
        from kvstore.disk_tier.tier import DiskTier
        from tests.kvstore.disk_kit import OK, get, put
        directory = Path(sys.argv[1])
        tier = DiskTier(directory, 8 << 20, retry_seconds=0.02)
        assert put(tier, range(4), 80 << 10) == [OK] * 4
        assert put(tier, range(10, 14), 4096) == [OK] * 4
        if os.getuid() == 0:  # modes do not bind root
            for path in (directory.parent, directory, *directory.iterdir()):
                os.chown(path, 65534, 65534)
            str(b"a", "ascii")
            os.seteuid(65534)
        os.chmod(directory, 0o500)
        codes = [put(tier, [100 + n], 300_000 + 4096 * n)[0] for n in range(20)]  # each needs a slot file of its own
        assert OK not in codes[:10], codes
        assert get(tier, range(4), 80 << 10) + get(tier, range(10, 14), 4096) == [OK] * 8
        assert [cause for cause in tier.counters() if cause.startswith("write_E")], tier.counters()
        os.chmod(directory, 0o700)
        deadline = time.monotonic() + 20
        while put(tier, [200], 300_000) != [OK]:
            assert time.monotonic() < deadline, tier.counters()
            time.sleep(0.01)
        assert get(tier, [200], 300_000) == [OK]
        tier.check_invariants()
        tier.close()
        tier = DiskTier(directory, 8 << 20)
        assert get(tier, range(4), 80 << 10) == [OK] * 4
        tier.close()
        print("well", end="")
    """
    with tempfile.TemporaryDirectory() as folder:  # the other user can reach it
        user = program(text, Path(folder) / "tier")
        assert user.communicate(timeout=120)[0] == b"well"


def test_a_directory_that_is_removed_under_a_running_tier(tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    tier = DiskTier(directory, 8 * MIB, retry_seconds=0.02)
    put(tier, range(6), SLOT)
    put(tier, range(10, 16), INLINE)
    shutil.rmtree(directory)
    assert set(get(tier, range(6), SLOT) + get(tier, range(10, 16), INLINE)) <= {OK, MISS}
    for n in range(100, 140):
        put(tier, [n], SIZES[n % len(SIZES)] + 4096 * n)  # no exception, and below no wrong bytes
    for n in range(100, 140):
        get(tier, [n], SIZES[n % len(SIZES)] + 4096 * n)
    tier.delete([key_of(n) for n in range(200)])
    tier.close()
    tier = DiskTier(directory, 8 * MIB)
    assert get(tier, range(6), SLOT) == [MISS] * 6
    assert put(tier, range(6), SLOT) == [OK] * 6
    tier.close()


def test_du_never_exceeds_the_budget_over_restarts_and_kills(tmp_path: Path) -> None:
    directory, draw, number = tmp_path / "kv", random.Random(8), 0
    for turn in range(12):
        capacity = draw.choice((2, 3, 6)) * MIB
        if turn % 3 == 2:
            writer = program(WRITER, directory, capacity, 1_000_000 * (turn + 1))
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            for _ in range(5):
                time.sleep(0.02)
                assert du_bytes(directory) <= capacity
            writer.kill()
            writer.communicate(timeout=60)
            assert du_bytes(directory) <= capacity
            continue
        tier = DiskTier(directory, capacity)
        assert du_bytes(directory) <= capacity, "after a restart with a smaller budget"
        for _ in range(15):
            put(tier, range(number, number + 12), draw.choice(SIZES))
            number += 12
            assert du_bytes(directory) <= capacity
            assert tier.used_bytes <= capacity
        tier.check_invariants()
        tier.close()
        assert du_bytes(directory) <= capacity


def test_the_clock_may_jump_while_the_tier_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 3 * MIB)
    real, number = time.time, 0
    for offset in (0, 1e9, -1e9, 3.2e7, -1.7e9, 0):
        monkeypatch.setattr(time, "time", lambda offset=offset: max(0.0, real() + offset))
        put(tier, range(number, number + 40), SLOT)
        there = stored(tier, range(number + 40))
        assert there[-20:] == list(range(number + 20, number + 40)), "what was stored last went first"
        assert set(get(tier, there, SLOT)) == {OK}
        number += 40
    tier.close()


@pytest.mark.faults
@pytest.mark.parametrize("sync", ["batch", "always"])
def test_killed_while_syncing(tmp_path: Path, sync: str) -> None:
    killed_rounds(tmp_path, 50, seed=13, sync=sync)
