"""A disk tier that is opened on a file system without any room left: what is there is read, what comes is dropped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvstore.disk_tier.catalog import DiskCatalog
from kvstore.disk_tier.index import FIXED_BYTES
from kvstore.disk_tier.layout import BALLAST_NAME, INDEX_NAME, LOCK_NAME
from kvstore.disk_tier.tier import DiskTier
from tests.kvstore.disk_kit import FULL, INLINE, MISS, OK, SLOT, get, program, put, small_file_system, stored
from tests.kvstore.test_disk_hardships import MIB, fill_up, puts_come_back

KILLED = """
    import sys
    from pathlib import Path
    from kvstore.disk_tier.tier import DiskTier
    from tests.kvstore.disk_kit import put
    tier = DiskTier(Path(sys.argv[1]), 12 << 20)
    put(tier, range(60), int(sys.argv[2]))
    print("written", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("size", [INLINE, SLOT])
@pytest.mark.parametrize("ballast", [True, False])
@pytest.mark.parametrize("ended", ["closed", "killed"])
def test_a_file_system_that_is_full_at_start(tmp_path: Path, size: int, ballast: bool, ended: str) -> None:
    with small_file_system(tmp_path / "small", "24m") as folder:
        writer = program(KILLED, folder / "tier", size)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        if ended == "killed":
            writer.kill()
        writer.communicate()
        if ended == "closed":
            DiskTier(folder / "tier", 12 * MIB).close()
        if not ballast:
            (folder / "tier" / BALLAST_NAME).unlink()
        fill_up(folder / "other")
        tier = DiskTier(folder / "tier", 12 * MIB, retry_seconds=0.02)
        assert get(tier, range(60), size) == [OK] * 60
        results = [code for n in range(100, 400) for code in put(tier, [n], size)]
        assert FULL in results, "there was room"
        assert tier.counters()["disk_full"]
        assert get(tier, there := stored(tier, range(60)), size) == [OK] * len(there)
        (folder / "other").unlink()
        puts_come_back(tier, 1000, size)
        tier.check_invariants()
        tier.close()
        again = DiskTier(folder / "tier", 12 * MIB)
        assert get(again, [1000], size) == [OK]
        again.close()


def test_full_at_start_and_a_smaller_budget(tmp_path: Path) -> None:
    """Recovery has much to take out of the index, and no page to do it with."""
    with small_file_system(tmp_path / "small", "24m") as folder:
        tier = DiskTier(folder / "tier", 20 * MIB)
        assert set(put(tier, range(200), SLOT)) == {OK}
        tier.close()
        (folder / "tier" / BALLAST_NAME).unlink()
        fill_up(folder / "other")
        tier = DiskTier(folder / "tier", 12 * MIB, retry_seconds=0.02)
        there = stored(tier, range(200))
        assert 0 < len(there) < 200
        assert get(tier, there, SLOT) == [OK] * len(there)
        tier.check_invariants()
        (folder / "other").unlink()
        puts_come_back(tier, 9000, SLOT)
        tier.close()


def test_full_at_start_with_records_that_are_not_whole(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "24m") as folder:
        tier = DiskTier(folder / "tier", 20 * MIB)
        put(tier, range(200), SLOT)
        tier.close()
        (slots,) = (folder / "tier").glob("slots-*")
        with slots.open("r+b") as file:  # the frames of a hundred copies
            for slot in range(100):
                file.seek(slot * int(slots.name.split("-")[1]))
                file.write(b"\xff" * 4096)
        (folder / "tier" / BALLAST_NAME).unlink()
        fill_up(folder / "other")
        tier = DiskTier(folder / "tier", 20 * MIB, retry_seconds=0.02)
        assert tier.counters()["recovered_slot_content"] == 100
        there = stored(tier, range(200))
        assert len(there) == 100
        assert get(tier, there, SLOT) == [OK] * 100
        puts_come_back(tier, 9000, SLOT)  # in the slots that came free
        tier.close()
        (folder / "other").unlink()
        tier = DiskTier(folder / "tier", 20 * MIB)
        assert get(tier, [9000, *there[-9:]], SLOT) == [OK] * 10
        tier.close()


def filled_without(folder: Path, *names: str) -> None:
    """A whole tier of a hundred copies that lacks these files, and no room beside it."""
    tier = DiskTier(folder / "tier", 20 * MIB)
    put(tier, range(100), SLOT)
    tier.close()
    for name in names:
        (folder / "tier" / name).unlink()
    fill_up(folder / "other")


@pytest.mark.parametrize("name", [LOCK_NAME, f"{INDEX_NAME}-lock"])
def test_full_at_start_and_a_file_that_is_to_be_made(tmp_path: Path, name: str) -> None:
    """The ballast makes room for it; LMDB would end the process by SIGBUS where there is none for its lock file."""
    with small_file_system(tmp_path / "small", "24m") as folder:
        filled_without(folder, name)
        tier = DiskTier(folder / "tier", 20 * MIB)
        assert get(tier, range(100), SLOT) == [OK] * 100
        tier.close()


def test_no_room_even_for_lmdbs_lock_file_is_said(tmp_path: Path) -> None:
    """In a process of its own: LMDB writes to that file through a map."""
    with small_file_system(tmp_path / "small", "24m") as folder:
        filled_without(folder, f"{INDEX_NAME}-lock", BALLAST_NAME)
        said = program("import sys\nfrom kvstore.disk_tier.tier import DiskTier\nfrom allocator import TierError\n"
                       "try:\n    DiskTier(sys.argv[1], 20 << 20)\nexcept TierError as error:\n    print(error)",
                       folder / "tier")  # fmt: skip
        shown, _ = said.communicate()
        assert (said.returncode, b"No space left" in shown) == (0, True), shown
        subprocess.run(["rm", str(folder / "other")], check=True)
        tier = DiskTier(folder / "tier", 20 * MIB)
        assert get(tier, range(100), SLOT) == [OK] * 100
        tier.close()


def test_full_at_start_and_an_index_that_cannot_be_written(tmp_path: Path) -> None:
    """What recovery takes out is taken out later: it is not found meanwhile, nor after another start."""
    with small_file_system(tmp_path / "small", "48m") as folder:
        tier = DiskTier(folder / "tier", 20 * MIB)
        for first in range(0, 3400, 100):
            assert set(put(tier, range(first, first + 100), INLINE)) == {OK}
        tier.close()
        catalog = DiskCatalog(folder / "tier", 1 << 30, "none")
        catalog.compact()  # without a free page
        catalog.close()
        budget_bytes = (folder / "tier" / INDEX_NAME).stat().st_size + FIXED_BYTES + 4096  # of no use but for the index
        (folder / "tier" / BALLAST_NAME).unlink()
        fill_up(folder / "other")
        for _ in range(2):
            tier = DiskTier(folder / "tier", budget_bytes, retry_seconds=0.02)  # all of them are to go
            assert tier.counters()["recovery_put_off"] == 1
            assert stored(tier, range(3400)) == []
            assert set(get(tier, range(100), INLINE)) == {MISS}
            tier.close()
        (folder / "other").unlink()
        tier = DiskTier(folder / "tier", budget_bytes, retry_seconds=0.02)
        puts_come_back(tier, 9000, INLINE)
        tier.close()
        tier = DiskTier(folder / "tier", 20 * MIB)
        puts_come_back(tier, 9001, INLINE)
        tier.check_invariants()
        tier.close()
