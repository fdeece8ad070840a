"""A directory whose index was cut or scribbled on, and inspection beside a store that goes on writing."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from allocator.errors import TierError
from kvstore.disk_tier.index_check import find_damage
from kvstore.disk_tier.layout import INDEX_NAME
from kvstore.disk_tier.reader import GONE, DiskReader
from kvstore.disk_tier.tier import DiskTier
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.disk_kit import INLINE, MISS, OK, SLOT, get, only_slot_file, program, put, stored

MIB = 1 << 20


def filled(directory: Path) -> Path:
    tier = DiskTier(directory, 8 * MIB)
    assert set(put(tier, range(100), INLINE)) == {OK}
    tier.close()
    return directory / INDEX_NAME


@pytest.mark.parametrize("fraction", [0.9, 0.5, 0.02, 0.003])
def test_case_110_an_index_that_was_cut_off_is_begun_anew(tmp_path: Path, fraction: float) -> None:
    """LMDB would read pages beyond the file's end: SIGBUS, so another process is asked first."""
    index = filled(tmp_path)
    os.truncate(index, int(index.stat().st_size * fraction))
    text = """
        import sys
        from kvstore.disk_tier.tier import DiskTier
        tier = DiskTier(sys.argv[1], 8 << 20)
        print(tier.copy_count, *[cause for cause in tier.counters() if "dropped" in cause], end="")
        tier.close()
    """
    opener = program(text, tmp_path)
    said = opener.communicate(timeout=60)[0].decode()
    assert (opener.returncode, said.split()[0]) == (0, "0"), said
    assert "index_dropped" in said
    tier = DiskTier(tmp_path, 8 * MIB)
    assert put(tier, range(4), INLINE) == [OK] * 4
    assert get(tier, range(6), INLINE) == [OK] * 4 + [MISS] * 2
    tier.close()


@pytest.mark.parametrize(
    ("content", "cause"),
    [(bytes(600_000), "not_lmdb"), (bytes(4096), "not_lmdb"), (b"", "empty"), (b"hello", "not_lmdb"),
     (random.Random(1).randbytes(600_000), "not_lmdb"), (random.Random(2).randbytes(5000), "not_lmdb")],
    ids=["zeros", "a page of zeros", "nothing", "text", "random", "random and short"],
)  # fmt: skip
def test_an_index_that_is_none_is_counted_logged_and_named(
    tmp_path: Path, content: bytes, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Found by a newcomer: such a directory opened empty and nothing said so, and inspection said "Bad file
    descriptor"."""
    index = filled(tmp_path)
    index.write_bytes(content)
    with pytest.raises(TierError, match=r"index\.lmdb: .*no LMDB file"):
        DiskReader(tmp_path)
    assert index.read_bytes() == content, "looking changes nothing"
    tier = DiskTier(tmp_path, 8 * MIB)
    assert {name: count for name, count in tier.counters().items() if count} == {f"index_dropped_{cause}": 1}
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the index is begun anew, empty" in line
    assert str(tmp_path) in line
    assert cause in line
    assert put(tier, range(4), INLINE) == [OK] * 4
    tier.close()
    caplog.clear()
    tier = DiskTier(tmp_path, 8 * MIB)
    assert get(tier, range(4), INLINE) == [OK] * 4
    assert not caplog.records
    assert not any(name.startswith("index_dropped") for name in tier.counters())
    tier.close()


def test_slot_files_without_their_index_are_said_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = DiskTier(tmp_path / "new", 8 * MIB)
    assert not caplog.records, "nothing was there"
    put(tier, range(4), SLOT)
    tier.close()
    (tmp_path / "new" / INDEX_NAME).unlink()
    tier = DiskTier(tmp_path / "new", 8 * MIB)
    assert tier.counters()["index_dropped_missing"] == 1
    assert "missing" in caplog.text
    tier.close()


def test_a_file_cut_within_its_first_page_is_damaged_or_no_file_of_the_kind(tmp_path: Path) -> None:
    index = filled(tmp_path)
    whole = index.read_bytes()
    for length in range(200):
        index.write_bytes(whole[:length])
        assert (find_damage(index) is None) is (length < 44), length  # less does not tell what it was


def test_an_inspector_of_a_cut_index_says_so(tmp_path: Path) -> None:
    index = filled(tmp_path)
    os.truncate(index, 40_000)
    with pytest.raises(TierError, match="expected at least"):
        DiskReader(tmp_path)


@pytest.mark.parametrize("table_root", range(4))
def test_a_scribbled_index_page_is_no_exception_and_no_wrong_bytes(tmp_path: Path, table_root: int) -> None:
    """Pages whose headers are no pages of LMDB: the index is begun anew; damage in values is found by checksums."""
    index = filled(tmp_path)
    draw = random.Random(table_root)
    pages = index.stat().st_size // 4096
    with index.open("r+b") as file:
        for page in draw.sample(range(2, pages), pages // 4):
            file.seek(4096 * page + 10)
            file.write(b"\xff\xff")  # page flags: none that LMDB knows together
    tier = DiskTier(tmp_path, 8 * MIB)
    assert set(get(tier, range(100), INLINE)) <= {OK, MISS}
    assert any(cause.startswith("index_dropped") for cause in tier.counters())
    assert put(tier, range(200, 204), SLOT) == [OK] * 4
    tier.check_invariants()
    tier.close()


def test_an_inspector_beside_a_writer_never_cries_wolf(tmp_path: Path) -> None:
    """Slots are given to other copies while they are read: such a copy is gone, not corrupt."""
    text = """
        import sys
        from kvstore.disk_tier.tier import DiskTier
        from tests.kvstore.disk_kit import SLOT, put
        tier = DiskTier(sys.argv[1], 2 << 20)
        put(tier, range(16), SLOT)
        print("go", flush=True)
        number = 100
        while True:
            put(tier, range(number, number + 4), SLOT)
            number += 4
    """
    writer = program(text, tmp_path)
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"go\n"
    causes: list[object] = []
    try:
        deadline, turn = time.monotonic() + 30, 0
        while turn < 30 or (not {None, GONE} <= set(causes) and time.monotonic() < deadline):
            turn += 1
            with DiskReader(tmp_path) as reader:
                records = [record for record in reader.records() if record is not None]
            time.sleep(turn % 10 / 500)  # the writer goes on
            with DiskReader(tmp_path) as reader:
                causes += [reader.verify(record) for record in records]
    finally:
        writer.kill()
        writer.communicate(timeout=60)
    assert set(causes) <= {None, GONE}
    assert {None, GONE} <= set(causes), "nothing went while it was read: the test shows nothing"


def test_records_that_claim_too_much_cost_no_memory(tmp_path: Path) -> None:
    """Well-formed records of copies that cannot be there, in an index that somebody else wrote."""
    import lmdb

    from kvstore.disk_tier.layout import DiskRecord, class_bytes, key_digest

    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, [1, 2, 3], SLOT)
    tier.close()
    huge = class_bytes(1 << 50)
    with lmdb.open(str(tmp_path / INDEX_NAME), subdir=False, max_dbs=4) as environment:
        copies = environment.open_db(b"copies")
        with environment.begin(write=True) as txn:
            for n, (payload, frame, size, slot) in enumerate(
                [
                    ((1 << 50) - 4096, 1 << 50, huge, 0),
                    (1 << 40, (1 << 40) + 256, 1 << 41, None),
                    (1, huge, huge, 1 << 60),
                ]
            ):
                key = key_of(50 + n)
                record = DiskRecord(key, payload, frame, size, slot, 900 + n, 1, 0, None)
                txn.put(key_digest(key), record.to_bytes(), db=copies)
    with only_slot_file(tmp_path).with_name(f"slots-{huge}").open("wb") as sparse:
        sparse.truncate(1 << 42)
    with DiskReader(tmp_path) as reader:
        found = {record.key: reader.verify(record) for record in reader.records() if record is not None}
    assert [found[key_of(n)] for n in (1, 2, 3)] == [None] * 3
    assert all(found[key_of(50 + n)] for n in range(3))
    tier = DiskTier(tmp_path, 4 * MIB)
    assert stored(tier, [1, 2, 3, 50, 51, 52]) == [1, 2, 3]
    assert tier.file_bytes <= 4 * MIB
    tier.close()


HARM = """
    import os, random, signal, sys
    from pathlib import Path
    from allocator.errors import TierError
    from kvstore.disk_tier.reader import DiskReader
    from kvstore.disk_tier.tier import DiskTier
    from kvstore.testing.transfer_contract import key_of
    from tests.kvstore.disk_kit import CORRUPT, INLINE, MISS, OK, get, put

    directory, rounds, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    index = directory / "index.lmdb"
    whole = index.read_bytes()
    pages = len(whole) // 4096
    trees = [page for page in range(pages) if page < 2 or whole[4096 * page + 10] in (1, 2)]

    def harmed(draw):
        bytes_, at = bytearray(whole), 4096 * draw.choice(trees)
        kind = draw.randrange(5)
        if kind == 0:  # one field somewhere
            at += draw.randrange(4096)
            bytes_[at : at + 2] = draw.randbytes(2)
        elif kind == 1:  # in a page's head, offsets or nodes
            at += draw.randrange(80) if draw.random() < 0.5 else 3500 + draw.randrange(596)
            bytes_[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            at += draw.randrange(4000)
            bytes_[at : at + 64] = draw.randbytes(64)
        elif kind == 3:  # a page that was never written, or written elsewhere
            other = 4096 * draw.randrange(pages)
            bytes_[at : at + 4096] = draw.choice((bytes(4096), whole[other : other + 4096]))
        else:
            del bytes_[4096 * draw.randrange(2, pages) :]
        return bytes(bytes_[: len(whole)])

    def use(number):
        try:
            with DiskReader(directory) as reader:
                for record in reader.records():
                    record is None or reader.verify(record)
        except TierError:
            pass
        tier = DiskTier(directory, 8 << 20)
        assert set(get(tier, range(100), INLINE)) <= {OK, MISS, CORRUPT}
        tier.delete([key_of(number) for number in range(0, 100, 7)])
        assert put(tier, range(300, 340), INLINE) == [OK] * 40
        assert get(tier, range(300, 340), INLINE) == [OK] * 40
        tier.check_invariants()
        dropped = any(cause.startswith("index_dropped") for cause in tier.counters())
        tier.close()
        return 10 if dropped else 0

    ends = []
    for number in range(rounds):
        index.write_bytes(harmed(random.Random(seed * 100_003 + number)))
        child = os.fork()
        if not child:
            signal.alarm(30)
            code = 1
            try:
                code = use(number)
            finally:
                os._exit(code)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    bad = [(seed, number, end) for number, end in enumerate(ends) if end not in (0, 10)]
    print(bad, ends.count(10), flush=True)
"""


def _harm(directory: Path, rounds: int, seed: int) -> tuple[str, int]:
    filled(directory)
    done = program(HARM, directory, rounds, seed)
    said = done.communicate(timeout=600)[0].decode()
    assert done.returncode == 0
    bad, dropped = said.rsplit(" ", 1)
    return bad, int(dropped)


def test_no_damage_of_the_index_ends_a_process(tmp_path: Path) -> None:
    """Fields, pages and ends of the file, at random: right bytes or misses, and the next copies are kept."""
    bad, dropped = _harm(tmp_path, 40, 1)
    assert bad == "[]", "seed, round, exit code or signal"
    assert 8 <= dropped <= 39, "all or none was noticed: the damage shows nothing"


@pytest.mark.faults
@pytest.mark.parametrize("seed", [2, 3])
def test_no_damage_of_the_index_ends_a_process_long(tmp_path: Path, seed: int) -> None:
    bad, _ = _harm(tmp_path, 1000, seed)
    assert bad == "[]", "seed, round, exit code or signal"


SHORT_OF_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from allocator.errors import TierError
from kvstore.disk_tier.tier import DiskTier
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
for left in range(1, 12):
    taken = []
    try:
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    for one in taken[:left]:
        os.close(one)
    try:
        DiskTier(Path(sys.argv[1]), 8 << 20).close()
    except TierError as error:
        assert "Too many open files" in str(error) or "cannot" in str(error), error
    for one in taken[left:]:
        os.close(one)
"""


def test_a_process_without_descriptors_does_not_throw_a_good_index_away(tmp_path: Path) -> None:
    """Any error of LMDB but a full disk was taken for a bad index, and so was any error of reading it."""
    filled(tmp_path)
    tier = DiskTier(tmp_path, 8 * MIB)
    copies = tier.copy_count
    tier.close()
    done = subprocess.run(
        [sys.executable, "-c", SHORT_OF_DESCRIPTORS, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "begun anew" in done.stderr) == (0, False), done.stderr
    tier = DiskTier(tmp_path, 8 * MIB)
    assert tier.copy_count == copies == 100
    tier.close()
