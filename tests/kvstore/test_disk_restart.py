"""A disk directory across restarts: contents, recency, budget, and what recovery does with damage."""

from __future__ import annotations

import os
import time
from pathlib import Path

import lmdb
import pytest

from allocator.errors import ConfigError, TierError
from kvstore.disk_tier.layout import INDEX_NAME, LOCK_NAME, key_digest
from kvstore.disk_tier.reader import DiskReader
from kvstore.disk_tier.tier import DiskTier
from kvstore.frame.specs import plain_specs
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import PutItem
from tests.kvstore.disk_kit import (
    CORRUPT,
    INLINE,
    MISS,
    OK,
    SLOT,
    get,
    only_slot_file,
    other_forms,
    program,
    put,
    stored,
)

MIB = 1 << 20


def reopened(tier: DiskTier, **settings: object) -> DiskTier:
    tier.close()
    return DiskTier(tier.directory, tier.capacity_bytes, **settings)  # type: ignore[arg-type]


def test_copies_of_every_size_survive(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 16 * MIB)
    numbers = list(range(18))
    assert put(tier, numbers) == [OK] * 18
    used = tier.used_bytes
    tier = reopened(tier)
    assert tier.used_bytes == used
    assert get(tier, numbers) == [OK] * 18
    tier.check_invariants()
    tier.close()


def test_generations_never_come_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, [1], SLOT)
    first = tier._index.last_generation
    tier.delete([key_of(1)])
    tier = reopened(tier)
    put(tier, [1], SLOT)
    assert tier._index.last_generation > first
    tier.close()


def test_case_142_restart_keeps_a_sane_order(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(20), SLOT)
    get(tier, [0, 1, 2], SLOT)  # old and used again
    tier = reopened(tier)
    put(tier, range(100, 130), SLOT)
    left = stored(tier, range(20))
    assert {0, 1, 2} <= set(left), "what was used last went first"
    assert 3 not in left, "nothing had to go: the test shows nothing"
    assert len(stored(tier, range(115, 130))) == 15, "a fresh copy went before an old one"
    tier.close()


def test_case_124_a_parent_stays_below_its_child_after_a_restart(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    chain = list(range(8))
    for n in chain:
        parent = key_of(n - 1).hash if n else None
        tier.submit_put([PutItem(key_of(n), [payload_of(key_of(n), SLOT)], parent)])
        tier.poll()
    tier = reopened(tier)
    assert tier.orphan_count == 0
    for n in range(100, 160):
        put(tier, [n], SLOT)
        left = stored(tier, chain)
        assert left == list(range(len(left))), "a block is stored without its parent"
    assert left == []
    tier.close()


def test_a_smaller_budget_holds_from_the_first_moment(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 16 * MIB)
    put(tier, range(150), SLOT)
    put(tier, range(1000, 1200), INLINE)
    tier.close()
    tier = DiskTier(tmp_path, 4 * MIB)
    assert tier.file_bytes <= 4 * MIB
    assert 0 < tier.used_bytes <= 4 * MIB
    assert set(get(tier, stored(tier, range(150)), SLOT)) <= {OK}
    tier.check_invariants()
    tier.close()


def test_the_clock_may_jump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    real = time.time
    for turn, offset in enumerate((0, 3.2e7, -6.4e7)):
        monkeypatch.setattr(time, "time", lambda offset=offset: real() + offset)
        tier = reopened(tier)
        first = 100 * turn
        put(tier, range(first, first + 30), SLOT)
        assert len(stored(tier, range(first, first + 30))) == 30
        assert set(get(tier, range(first, first + 30), SLOT)) == {OK}
    tier.close()


@pytest.mark.parametrize("size", [INLINE, SLOT])
def test_case_012_another_form_of_the_block_is_a_miss(tmp_path: Path, size: int) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, [1], size)
    tier = reopened(tier)
    assert tier.contains(other_forms(1)) == [False] * 4
    tier.close()
    other = DiskTier(
        tmp_path, 4 * MIB, specs=lambda key, size: plain_specs(key, size).__class__(key, 2, 1, 0, "f", size)
    )
    assert get(other, [1], size) == [CORRUPT]  # frames of another shape or dtype
    assert other.counters()["corrupt_shape"] == 1
    assert get(other, [1], size) == [MISS]
    other.close()


def test_records_that_name_what_is_not_there_are_dropped(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(10), SLOT)
    put(tier, range(20, 30), INLINE)
    tier.close()
    slots = only_slot_file(tmp_path)
    size = int(slots.name.split("-")[1])
    os.truncate(slots, 7 * size)  # slots 7 to 9 are gone
    with slots.open("r+b") as file:
        file.seek(2 * size)
        file.write(bytes(4096))  # slot 2 lost its header
    environment = lmdb.open(str(tmp_path / INDEX_NAME), subdir=False, max_dbs=4)
    copies, values = environment.open_db(b"copies"), environment.open_db(b"values")
    with environment.begin(write=True) as txn:
        row = bytearray(txn.get(key_digest(key_of(20)), db=copies))
        row[60] ^= 1
        txn.put(key_digest(key_of(20)), bytes(row), db=copies)
        txn.put(key_digest(key_of(99)), bytes(txn.get(key_digest(key_of(21)), db=copies)), db=copies)
        cursor = txn.cursor(db=values)
        assert cursor.first()
        cursor.delete()
        txn.put(b"\x00\x00\x00\x00\x00\x00\xff\xff\x00\x00", b"orphan", db=values)
    environment.close()
    tier = DiskTier(tmp_path, 4 * MIB)
    counts = tier.counters()
    assert counts["recovered_slot_range"] == 3
    assert counts["recovered_slot_content"] == 1
    assert counts["recovered_record"] == 2
    assert counts["recovered_orphan_values"] >= 1
    assert len(stored(tier, range(10))) == 6
    assert set(get(tier, stored(tier, range(30)), None)) <= {OK, CORRUPT}
    assert get(tier, [2, 7, 8, 9], SLOT) == [MISS] * 4
    tier.check_invariants()
    tier = reopened(tier)
    assert not [cause for cause in tier.counters() if cause.startswith("recovered")], "damage was found twice"
    tier.close()


@pytest.mark.parametrize("rubbish", [b"", b"no index", bytes(8192)])
def test_an_index_that_is_none_is_begun_anew(tmp_path: Path, rubbish: bytes) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(4), SLOT)
    tier.close()
    (tmp_path / INDEX_NAME).write_bytes(rubbish)
    tier = DiskTier(tmp_path, 4 * MIB)
    assert stored(tier, range(4)) == []
    assert tier.file_bytes < MIB, "slots that nothing names keep their room"
    assert put(tier, range(4), SLOT) == [OK] * 4
    assert get(tier, range(4), SLOT) == [OK] * 4
    tier.close()


def test_a_power_cut_under_sync_none_drops_the_index(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(4), SLOT)
    tier.close()
    lock = tmp_path / LOCK_NAME
    lock.write_text('{"pid": 1, "boot": "another", "sync": "none", "state": "open"}')
    tier = DiskTier(tmp_path, 4 * MIB)
    assert tier.counters()["index_dropped_power_loss"] == 1
    assert stored(tier, range(4)) == []
    put(tier, range(4), SLOT)
    tier.close()
    lock.write_text('{"pid": 1, "boot": "another", "sync": "batch", "state": "open"}')
    tier = DiskTier(tmp_path, 4 * MIB, sync="batch")
    assert get(tier, range(4), SLOT) == [OK] * 4
    tier.close()


@pytest.mark.parametrize("sync", ["batch", "always"])
def test_syncing_to_a_real_disk(tmp_path: Path, sync: str) -> None:
    tier = DiskTier(tmp_path, 4 * MIB, sync=sync)
    assert put(tier, range(3), SLOT) == [OK] * 3
    assert put(tier, range(10, 13), INLINE) == [OK] * 3
    tier = reopened(tier, sync=sync)
    assert get(tier, range(3), SLOT) == [OK] * 3
    tier.clear()
    tier = reopened(tier, sync=sync)
    assert (tier.copy_count, tier.used_bytes) == (0, 0)
    tier.close()


def test_case_008_a_clear_outlives_the_process(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(8), SLOT)
    put(tier, range(10, 18), INLINE)
    tier.clear()
    assert tier.file_bytes < MIB
    tier._directory_lock._drop()  # as if killed: nothing is written down at a close
    tier._catalog.close()
    again = DiskTier(tmp_path, 4 * MIB)
    assert stored(again, range(20)) == []
    again.close()


def test_an_inspector_reads_what_a_writer_holds(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(6), SLOT)
    put(tier, range(10, 16), INLINE)
    program_sees = inspect_elsewhere(tmp_path)
    assert program_sees == b"12 0"
    put(tier, range(20, 24), SLOT)
    assert inspect_elsewhere(tmp_path) == b"16 0"
    tier.close()
    with DiskReader(tmp_path) as reader:
        records = [record for record in reader.records() if record is not None]
        assert {record.key for record in records} == {key_of(n) for n in (*range(6), *range(10, 16), *range(20, 24))}
        assert [reader.verify(record, plain_specs) for record in records] == [None] * 16


def inspect_elsewhere(directory: Path) -> bytes:
    text = """
        import sys
        from kvstore.disk_tier.reader import DiskReader
        from kvstore.frame.specs import plain_specs
        with DiskReader(sys.argv[1]) as reader:
            records = list(reader.records())
            print(len(records), sum(reader.verify(one, plain_specs) is not None for one in records), end="")
    """
    process = program(text, directory)
    return process.communicate(timeout=60)[0]


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="capacity_bytes"):
        DiskTier(tmp_path, 1000)
    with pytest.raises(ConfigError, match="sync"):
        DiskTier(tmp_path, 4 * MIB, sync="sometimes")
    with pytest.raises(TierError, match="index"):
        DiskReader(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match="cannot be made"):
        DiskTier(tmp_path / "file", 4 * MIB)
