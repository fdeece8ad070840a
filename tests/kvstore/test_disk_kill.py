"""A writer killed at random points: what the next open finds is whole, within budget, and nothing is served torn."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from kvstore.disk_tier.tier import DiskTier
from tests.kvstore.disk_kit import OK, get, program, put, size_of, stored

CAPACITY = 3 << 20
WRITER = """
    import sys
    import numpy as np
    from kvstore.disk_tier.tier import DiskTier
    from kvstore.testing.transfer_contract import key_of, payload_of
    from tests.kvstore.disk_kit import size_of
    tier = DiskTier(sys.argv[1], int(sys.argv[2]), sync=(sys.argv[4:] or ["none"])[0])
    number = int(sys.argv[3])
    print("go", flush=True)
    while True:
        batch = [(key_of(n), [payload_of(key_of(n), size_of(n))]) for n in range(number, number + 4)]
        tier.submit_put(batch)
        for done in tier.poll():
            if set(map(str, done.results)) == {"ok"}:
                print(number, flush=True)
        if number % 40 == 0:
            tier.delete([key_of(n) for n in range(number - 30, number - 20)])
        number += 4
"""


def killed_rounds(directory: Path, rounds: int, seed: int, sync: str = "none") -> None:
    draw = random.Random(seed)
    survived = 0
    for turn in range(rounds):
        first = 100_000 * turn
        writer = program(WRITER, directory, CAPACITY, first, sync)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"go\n"
        time.sleep(draw.random() * 0.15)
        writer.kill()
        lines = writer.communicate(timeout=60)[0].split()
        last = int(lines[-1]) if lines else None
        tier = DiskTier(directory, CAPACITY, sync=sync)
        assert tier.file_bytes <= CAPACITY
        tier.check_invariants()
        counts = tier.counters()
        torn = [cause for cause in counts if cause.startswith("recovered_") and cause != "recovered_orphan_values"]
        assert torn == [], "the index named what was not whole"
        there = stored(tier, range(max(0, first - 400), (last or first) + 8))
        survived += len(there)
        assert set(get(tier, there)) <= {OK}
        if last is not None:  # reported stored and never deleted: it must have survived the process
            assert stored(tier, range(last, last + 4)) == list(range(last, last + 4))
        assert put(tier, [first + 99_990]) == [OK]
        assert size_of(first) > 0
        tier.close()
    assert survived > rounds, "the writer was killed before it wrote anything"


def test_case_052_killed_at_random_points(tmp_path: Path) -> None:
    killed_rounds(tmp_path, 25, seed=11)


@pytest.mark.faults
def test_killed_at_random_points_two_hundred_times(tmp_path: Path) -> None:
    killed_rounds(tmp_path, 200, seed=12)
