"""Parts of a copy that are missing or cut short, pieces that are watched while they are written, signed directories."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from kvstore.disk_tier.layout import INDEX_NAME, key_digest
from kvstore.disk_tier.tier import DiskTier
from kvstore.testing.transfer_contract import key_of
from quant import dispatch
from quant.native.checksum import OPERATION
from tests.kvstore.disk_kit import CORRUPT, MISS, OK, SLOT, get, only_slot_file, put

MIB = 1 << 20
INLINE = 20_000
SECRET = b"a secret of tests, 32 bytes long"
PARTS = ("record", "first piece", "last piece", "recency")
SUBSETS = list(chain.from_iterable(combinations(PARTS, count) for count in range(len(PARTS) + 1)))


def edit(directory: Path, change: Callable[[Any, Callable[[int, str], tuple[Any, bytes]]], None]) -> None:
    """Change a closed directory's index: `change` gets a transaction and where a part of a copy lies (table, name)."""
    with lmdb.open(str(directory / INDEX_NAME), subdir=False, max_dbs=4) as env:
        tables = {name: env.open_db(name) for name in (b"copies", b"values", b"recency")}
        with env.begin(write=True) as txn:
            generations = {digest: row[40:48] for digest, row in txn.cursor(db=tables[b"copies"])}

            def place(number: int, part: str) -> tuple[Any, bytes]:
                digest = key_digest(key_of(number))
                generation = generations[digest][::-1]
                piece = (0 if part == "first piece" else -(-INLINE // 4080) - 1).to_bytes(2, "big")
                if part == "record":
                    return tables[b"copies"], digest
                return (
                    (tables[b"recency"], generation) if part == "recency" else (tables[b"values"], generation + piece)
                )

            change(txn, place)


def test_case_041_any_part_of_a_copy_in_the_index_that_is_missing_makes_a_miss(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 8 * MIB)
    everyone = range(len(SUBSETS))
    assert put(tier, everyone, INLINE) == [OK] * len(SUBSETS)
    assert get(tier, everyone, INLINE) == [OK] * len(SUBSETS)  # so that their use is written down
    tier.close()

    def remove(txn: Any, place: Callable[[int, str], tuple[Any, bytes]]) -> None:
        for number, parts in enumerate(SUBSETS):
            for part in parts:
                table, name = place(number, part)
                assert txn.delete(name, db=table), (number, part)

    edit(tmp_path, remove)
    tier = DiskTier(tmp_path, 8 * MIB)
    whole = [set(parts) <= {"recency"} for parts in SUBSETS]
    assert tier.contains([key_of(number) for number in everyone]) == whole
    assert get(tier, everyone, INLINE) == [OK if one else MISS for one in whole]
    assert put(tier, everyone, INLINE) == get(tier, everyone, INLINE) == [OK] * len(SUBSETS)
    tier.close()


@pytest.mark.parametrize("part", ["record", "first piece", "last piece"])
def test_case_041_a_part_that_is_cut_short_makes_a_miss_and_the_copy_goes(tmp_path: Path, part: str) -> None:
    tier = DiskTier(tmp_path, 8 * MIB)
    put(tier, range(5), INLINE)
    tier.close()

    def cut(txn: Any, place: Callable[[int, str], tuple[Any, bytes]]) -> None:
        for number, change in enumerate(
            (lambda row: row[:-1], lambda row: b"", lambda row: row[1:], lambda row: row + b"0")
        ):
            table, name = place(number, part)
            assert txn.put(name, change(txn.get(name, db=table)), db=table)

    edit(tmp_path, cut)
    tier = DiskTier(tmp_path, 8 * MIB)
    assert not {OK} & set(get(tier, range(4), INLINE))
    assert tier.contains([key_of(number) for number in range(5)]) == [False] * 4 + [True]
    assert get(tier, range(5), INLINE) == [MISS] * 4 + [OK]
    tier.close()
    with DirectoryRows(tmp_path) as rows:
        assert rows == {b"copies": 1, b"values": -(-INLINE // 4080)}


class DirectoryRows:
    """Rows of a closed directory's tables."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> dict[bytes, int]:
        with lmdb.open(str(self._directory / INDEX_NAME), subdir=False, max_dbs=4, readonly=True, lock=False) as env:
            tables = {name: env.open_db(name, create=False) for name in (b"copies", b"values")}
            with env.begin() as txn:
                return {name: txn.stat(table)["entries"] for name, table in tables.items()}

    def __exit__(self, *_: object) -> None:
        return


@pytest.mark.parametrize("left_bytes", [0, 1, 255, 256, 50_000, SLOT + 255])
def test_case_041_a_slot_that_is_cut_short_makes_a_miss(tmp_path: Path, left_bytes: int) -> None:
    tier = DiskTier(tmp_path, 8 * MIB)
    assert put(tier, [1], SLOT) == [OK]
    os.truncate(only_slot_file(tmp_path), left_bytes)
    assert get(tier, [1], SLOT) == [CORRUPT]
    assert (get(tier, [1], SLOT), tier.contains([key_of(1)])) == ([MISS], [False])
    assert put(tier, [2], SLOT) == get(tier, [2], SLOT) == [OK]
    tier.close()


@pytest.mark.parametrize("size", [INLINE, SLOT, 700_000])
@pytest.mark.parametrize(("first", "second"), [(None, SECRET), (SECRET, None), (SECRET, SECRET[::-1])])
def test_frames_of_another_secret_are_misses(
    tmp_path: Path, size: int, first: bytes | None, second: bytes | None
) -> None:
    tier = DiskTier(tmp_path, 8 * MIB, secret=first)
    assert put(tier, [1, 2], size) == get(tier, [1, 2], size) == [OK, OK]
    tier.close()
    tier = DiskTier(tmp_path, 8 * MIB, secret=second)
    assert get(tier, [1], size) == [CORRUPT]
    fault = "unsigned" if first is None else "no_secret" if second is None else "forged"
    assert tier.counters()[f"corrupt_{fault}"] == 1
    assert put(tier, [1], size) == get(tier, [1], size) == [OK]
    tier.close()


def test_a_forger_who_knows_every_sum_but_no_secret_is_a_miss(tmp_path: Path) -> None:
    """A whole and well-formed frame, flagged as signed, its keyed hash nothing but zeros."""
    from kvstore.frame.build import blank_header
    from kvstore.frame.heads import head_of
    from kvstore.frame.specs import plain_specs
    from quant.native.summed_file import write_summed

    tier = DiskTier(tmp_path, 8 * MIB, secret=SECRET)
    assert put(tier, [1, 2], SLOT) == [OK, OK]
    spec, payload = plain_specs(key_of(1), SLOT), np.full(SLOT, 7, np.uint8)
    for flags in (0, 2):  # KEYED_FLAG
        head = bytearray(blank_header(spec))
        head[10] |= flags
        fd = os.open(only_slot_file(tmp_path), os.O_RDWR)
        write_summed(fd, 0, head, head_of(spec).sums, [payload], 0)
        os.close(fd)
        assert get(tier, [1], SLOT) == [CORRUPT], flags
        assert put(tier, [1], SLOT) == get(tier, [1], SLOT) == [OK]
    assert [tier.counters()[f"corrupt_{fault}"] for fault in ("unsigned", "forged")] == [1, 1]
    tier.close()


def test_case_052_nothing_is_seen_before_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow writer, watched at every write of a piece: by this process and through the index file by a reader."""
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, [7], SLOT)
    seen: list[tuple[bool, int]] = []
    real = os.pwritev

    def slow(fd: int, views: Any, offset: int) -> int:
        done = real(fd, [memoryview(views[0])[:3000]], offset)
        seen.append((tier.contains([key_of(1)])[0], len(list(tier._catalog.records()))))
        return done

    monkeypatch.setattr(os, "pwritev", slow)
    with dispatch.forced(OPERATION, "cpu", "xxhash"):  # in C the pieces cannot be watched: test_summed_file cuts them
        assert put(tier, [1], SLOT) == [OK]
    monkeypatch.undo()
    assert len(seen) > 20
    assert set(seen) == {(False, 1)}
    assert get(tier, [1], SLOT) == [OK]
    tier.close()
