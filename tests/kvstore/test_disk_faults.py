"""What goes wrong with a disk: full, read-only, damaged bytes, full map, dead and living readers, two processes."""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allocator.errors import TierError
from kvstore.disk_tier.catalog import DiskCatalog
from kvstore.disk_tier.layout import INDEX_NAME
from kvstore.disk_tier.reader import DiskReader
from kvstore.disk_tier.tier import DiskTier
from kvstore.testing.transfer_contract import key_of, payload_of
from kvstore.tier import GetItem, PutItem
from tests.kvstore.disk_kit import (
    CORRUPT,
    FULL,
    INLINE,
    MISS,
    OK,
    SIZES,
    SLOT,
    get,
    only_slot_file,
    program,
    put,
    small_file_system,
    stored,
)

MIB = 1 << 20
SECRET = b"a secret of tests, 32 bytes long"


def damaged(tmp_path: Path, size: int, change: Callable[[bytearray], None], **settings: Any) -> DiskTier:
    """A tier whose one copy, number 1, had its frame changed on disk."""
    tier = DiskTier(tmp_path, 4 * MIB, **settings)
    assert put(tier, [1], size) == [OK]
    path = only_slot_file(tmp_path)
    frame = bytearray(path.read_bytes())
    change(frame)
    with path.open("r+b") as file:
        file.write(frame)
    return tier


@pytest.mark.parametrize("place", [0, 20, 143, 200, 255, 256, 70_000, SLOT + 255])
def test_a_flipped_bit_is_a_counted_miss(tmp_path: Path, place: int) -> None:
    def flip(frame: bytearray) -> None:
        frame[place] ^= 4

    tier = damaged(tmp_path, SLOT, flip)
    assert get(tier, [1], SLOT) == [CORRUPT]
    assert sum(count for cause, count in tier.counters().items() if cause.startswith("corrupt_")) == 1
    assert (get(tier, [1], SLOT), tier.used_bytes) == ([MISS], 0)
    assert (put(tier, [1], SLOT), get(tier, [1], SLOT)) == ([OK], [OK])
    tier.close()


def test_case_019_hostile_bytes_are_misses(tmp_path: Path) -> None:
    """Rubbish, a pickle and another block's frame under a valid key; with a secret, a forged frame too."""
    pickled = b"\x80\x04cposix\nsystem\n(S'touch /tmp/owned'\ntR."
    draw = random.Random(1)
    tier = DiskTier(tmp_path / "plain", 4 * MIB)
    put(tier, [1, 2], SLOT)
    path = only_slot_file(tmp_path / "plain")
    whole = path.read_bytes()
    size = int(path.name.split("-")[1])
    for rubbish in (pickled, draw.randbytes(size), whole[size : 2 * size], bytes(size)):
        with path.open("r+b") as file:
            file.write(rubbish)
        assert get(tier, [1], SLOT) == [CORRUPT]
        tier.clear()
        assert put(tier, [1, 2], SLOT) == [OK, OK]
    tier.close()
    friend = DiskTier(tmp_path / "keyed", 4 * MIB, secret=SECRET)
    put(friend, [1], SLOT)
    frame = only_slot_file(tmp_path / "keyed")
    assert get(friend, [1], SLOT) == [OK]
    with frame.open("r+b") as file:
        file.write(whole[:size])  # well-formed, the right block, and not by a friend
    assert get(friend, [1], SLOT) == [CORRUPT]
    assert friend.counters()["corrupt_unsigned"] == 1
    friend.close()


def test_mutated_frames_never_give_wrong_bytes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    draw = random.Random(7)
    put(tier, [1], SLOT)
    path = only_slot_file(tmp_path)
    good = path.read_bytes()
    spared = 0
    for _ in range(400):
        frame = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(256) if draw.random() < 0.7 else draw.randrange(SLOT + 256)
            frame[place] = draw.randrange(256)
        with path.open("r+b") as file:
            file.write(frame)
        code = get(tier, [1], SLOT)[0]
        spared += frame[: SLOT + 256] == good[: SLOT + 256]
        assert code is (OK if frame[: SLOT + 256] == good[: SLOT + 256] else CORRUPT)
        if code is CORRUPT:
            assert put(tier, [1], SLOT) == [OK]
    assert spared < 40
    tier.close()


def test_case_110_a_late_cleanup_spares_a_newer_copy(tmp_path: Path) -> None:
    tier = damaged(tmp_path, SLOT, lambda frame: frame.__setitem__(1000, frame[1000] ^ 1))
    old = tier._index.find(key_of(1))
    assert old is not None
    tier.delete([key_of(1)])
    put(tier, [1], SLOT)
    tier._drop(old, "late")  # a reader of the damaged copy comes to its end only now
    assert get(tier, [1], SLOT) == [OK]
    removal = old.removal
    tier._catalog.write(removals=[removal])
    tier.close()
    tier = DiskTier(tmp_path, 4 * MIB)
    assert get(tier, [1], SLOT) == [OK], "the index file lost the newer record"
    tier.close()


def test_case_110_truncated_and_missing_files(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(4), SLOT)
    os.truncate(only_slot_file(tmp_path), 100_000)
    assert get(tier, range(4), SLOT) == [OK, CORRUPT, CORRUPT, CORRUPT]
    tier.close()
    only_slot_file(tmp_path).unlink()
    tier = DiskTier(tmp_path, 4 * MIB)
    assert get(tier, range(4), SLOT) == [MISS] * 4
    assert put(tier, range(4), SLOT) == [OK] * 4
    tier.close()


def comes_back(tier: DiskTier, number: int, size: int) -> None:
    deadline = time.monotonic() + 10
    while put(tier, [number], size) != [OK]:
        assert time.monotonic() < deadline, "puts did not come back"
        time.sleep(0.01)


@pytest.mark.parametrize("size", [INLINE, SLOT])
def test_case_085_a_full_file_system(tmp_path: Path, size: int) -> None:
    with small_file_system(tmp_path / "small", "8m") as directory:
        tier = DiskTier(directory / "tier", 32 * MIB, retry_seconds=0.05)
        results = []
        for n in range(3000):
            results += put(tier, [n], size)
            if results[-1] is not OK:
                break
        count = len(results) - 1
        assert results == [OK] * count + [FULL]
        assert tier.counters()["disk_full"] == 1
        assert put(tier, [5000], size) == [FULL], "puts are not paused"
        assert tier.counters()["paused"] == 1
        there = stored(tier, range(count + 1))
        assert there == list(range(count))
        assert get(tier, there, size) == [OK] * count
        comes_back(tier, 6000, size)  # in the room that the tier has: the oldest copies give way
        assert tier.file_bytes <= 8 * MIB
        tier.delete([key_of(n) for n in range(count // 2)])
        comes_back(tier, 6001, size)
        assert get(tier, [6000, 6001, count - 1], size) == [OK] * 3
        subprocess.run(["mount", "-o", "remount,size=64m", str(directory)], check=True)
        deadline, fresh = time.monotonic() + 20, 10_000
        while tier.used_bytes < 12 * MIB:
            put(tier, range(fresh, fresh + 8), size)
            fresh += 8
            assert time.monotonic() < deadline, "the tier does not grow again"
        comes_back(tier, 7000, size)
        tier.close()
        again = DiskTier(directory / "tier", 32 * MIB)
        assert get(again, [7000], size) == [OK]
        again.check_invariants()
        again.close()


def test_a_file_system_that_becomes_read_only(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "8m") as directory:
        tier = DiskTier(directory / "tier", 4 * MIB, retry_seconds=0.01)
        put(tier, range(4), SLOT)
        tier.close()
        subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)
        with pytest.raises(TierError, match="Read-only"):
            DiskTier(directory / "tier", 4 * MIB)
        with DiskReader(directory / "tier") as reader:
            assert len(list(reader.records())) == 4
        subprocess.run(["mount", "-o", "remount,rw", str(directory)], check=True)
        tier = DiskTier(directory / "tier", 4 * MIB)
        assert get(tier, range(4), SLOT) == [OK] * 4
        tier.close()


@pytest.mark.parametrize("size", [INLINE, SLOT])
def test_a_full_map_drops_puts_and_recovers(tmp_path: Path, size: int) -> None:
    tier = DiskTier(tmp_path, 64 * MIB, map_bytes=256 << 10)
    codes = [code for n in range(1500) for code in put(tier, [n], size)]
    assert FULL in codes, "the map was never full"
    assert set(codes) == {OK, FULL}
    assert tier.counters()["map_full"] >= 1
    assert codes[-50:].count(OK) >= 25, "the tier did not recover"
    assert set(get(tier, stored(tier, range(1500)), size)) == {OK}
    tier.check_invariants()
    tier.close()


def test_case_103_killed_readers_do_not_use_up_the_slots(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(8), INLINE)
    text = """
        import os, sys, signal
        from pathlib import Path
        from kvstore.disk_tier.catalog import DiskCatalog
        for _ in range(200):
            child = os.fork()
            if child == 0:
                catalog = DiskCatalog(Path(sys.argv[1]), 0, "none", readonly=True)
                rows = catalog.records()
                next(rows)  # a read transaction is open
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
        catalog = DiskCatalog(Path(sys.argv[1]), 0, "none", readonly=True)
        print(len(list(catalog.records())), end="")
    """
    assert program(text, tmp_path).communicate(timeout=120)[0] == b"8"
    assert get(tier, range(8), INLINE) == [OK] * 8
    assert put(tier, range(100, 400), INLINE) == [OK] * 300
    tier.close()


def test_a_reader_of_an_old_state_never_makes_the_budget_burst(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    for n in range(300):
        put(tier, [n], INLINE)
    text = """
        import sys
        from kvstore.disk_tier.reader import DiskReader
        with DiskReader(sys.argv[1]) as reader:
            rows = reader.records()
            print(next(rows).payload_bytes, flush=True)
            sys.stdin.read()
    """
    reader = program(text, tmp_path)
    assert reader.stdout is not None
    assert reader.stdout.readline() == b"4096\n"
    codes = []
    for n in range(1000, 2500):
        codes += put(tier, [n], INLINE)
        assert tier.file_bytes <= 4 * MIB
    assert FULL in codes, "the old state held nothing: the test shows nothing"
    reader.communicate(timeout=60)
    assert put(tier, range(5000, 5010), INLINE) == [OK] * 10
    assert get(tier, range(5000, 5010), INLINE) == [OK] * 10
    tier.close()


def test_case_123_one_writer_a_directory(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, [1], SLOT)
    with pytest.raises(TierError, match="this process"):
        DiskTier(tmp_path, 4 * MIB)
    text = """
        import sys
        from allocator.errors import TierError
        from kvstore.disk_tier.tier import DiskTier
        try:
            DiskTier(sys.argv[1], 4 << 20)
        except TierError as error:
            print(error, end="")
    """
    message = program(text, tmp_path).communicate(timeout=60)[0].decode()
    assert f"already open for writing in process {os.getpid()}" in message
    assert get(tier, [1], SLOT) == [OK]
    tier.close()
    again = DiskTier(tmp_path, 4 * MIB)
    assert get(again, [1], SLOT) == [OK]
    again.close()


def test_case_123_a_forked_child_neither_uses_nor_unlocks_it(tmp_path: Path) -> None:
    text = """
        import os, sys
        from kvstore.disk_tier.tier import DiskTier
        from kvstore.testing.transfer_contract import key_of
        tier = DiskTier(sys.argv[1], 4 << 20)
        tier.submit_put([(key_of(1), [b"x" * 80000])])
        child = os.fork()
        if child == 0:
            buffer = bytearray(80000)
            tier.poll()
            tier.submit_get([(key_of(1), buffer)])
            tier.submit_put([(key_of(2), [buffer])])
            codes = [str(code) for done in tier.poll() for code in done.results]
            tier.close()
            os._exit(0 if codes == ["failed", "failed"] else 1)
        print(os.waitpid(child, 0)[1], flush=True)
        sys.stdin.read()
    """
    holder = program(text, tmp_path)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"0\n"
    with pytest.raises(TierError, match=str(holder.pid)):
        DiskTier(tmp_path, 4 * MIB)
    holder.kill()
    holder.communicate(timeout=60)
    tier = DiskTier(tmp_path, 4 * MIB)
    assert stored(tier, [1, 2]) == [1]
    tier.close()


def test_case_123_many_processes_open_and_read(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 4 * MIB)
    put(tier, range(4), SLOT)
    text = """
        import os, sys
        from kvstore.disk_tier.reader import DiskReader
        children = []
        for _ in range(50):
            child = os.fork()
            if child == 0:
                for _ in range(20):
                    with DiskReader(sys.argv[1]) as reader:
                        if len(list(reader.records())) < 4:
                            os._exit(1)
                os._exit(0)
            children.append(child)
        print(sum(os.waitpid(child, 0)[1] for child in children), end="")
    """
    readers = program(text, tmp_path)
    written = 10
    while readers.poll() is None:
        put(tier, [written], INLINE)
        written += 1
    assert readers.communicate(timeout=60)[0] == b"0"
    assert written > 10
    tier.close()


def test_case_115_a_fast_path_that_is_not_there_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that makes no holes: room comes back from the ends of files, and every request ends."""
    monkeypatch.setattr("kvstore.disk_tier.slots._make_hole", lambda fd, offset, length: False)
    tier = DiskTier(tmp_path, 8 * MIB)
    assert not tier._slots.can_punch
    for turn, size in enumerate((SLOT, 300_000, SLOT, 1 << 20)):
        for n in range(100):
            assert put(tier, [1000 * turn + n], size) in ([OK], [FULL])
            assert tier.file_bytes <= 8 * MIB
        there = stored(tier, range(1000 * turn, 1000 * turn + 100))
        assert there
        assert set(get(tier, there, size)) == {OK}
    tier.close()


def test_the_budget_holds_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file system's account, looked at after every call that can take room."""
    capacity = 12 * MIB
    tier = DiskTier(tmp_path, capacity)
    worst = 0

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal worst
            result = real(*arguments, **options)
            worst = max(worst, tier.file_bytes)
            return result

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((os, "posix_fallocate"), (os, "pwritev"), (os, "ftruncate"), (DiskCatalog, "write")):
        watched(owner, name)
    watched(DiskCatalog, "compact")
    draw = random.Random(3)
    for turn in range(250):
        size = draw.choice(SIZES) if draw.random() < 0.5 else SIZES[turn // 30 % len(SIZES)]
        first = 20 * turn
        put(tier, range(first, first + draw.choice((1, 1, 3, 16))), size)
        assert tier.used_bytes <= capacity
        if draw.random() < 0.1:
            tier.delete([key_of(draw.randrange(first + 1)) for _ in range(60)])
    tier.check_invariants()
    assert capacity * 0.8 < worst <= capacity
    tier.close()


def test_reads_and_writes_from_threads(tmp_path: Path) -> None:
    """Deletes and touches from the store's thread while the executor's writes and reads."""
    from kvstore.executor import ThreadExecutor

    tier = DiskTier(tmp_path, 4 * MIB, ThreadExecutor("disk-test"))
    stop = threading.Event()

    def disturb() -> None:
        draw = random.Random(5)
        while not stop.is_set():
            tier.touch([key_of(draw.randrange(40))])
            tier.delete([key_of(draw.randrange(40))])
            time.sleep(0.0005)

    thread = threading.Thread(target=disturb)
    thread.start()
    wanted: dict[Any, np.ndarray[Any, Any]] = {}
    for n in range(300):
        size = INLINE if n % 2 else SLOT
        tier.submit_put([PutItem(key_of(n % 40), [payload_of(key_of(n % 40), size)], None)])
        buffer = np.zeros(size, np.uint8)
        wanted[tier.submit_get([GetItem(key_of(n % 40), buffer)])] = buffer
    stop.set()
    thread.join()
    tier.close()
    for done in tier.poll():
        if done.transfer in wanted and done.results[0] is OK:
            buffer = wanted[done.transfer]
            assert np.array_equal(buffer, payload_of(done.transfer.keys[0], buffer.nbytes))
    again = DiskTier(tmp_path, 4 * MIB)
    again.check_invariants()
    again.close()
    assert (tmp_path / INDEX_NAME).exists()
