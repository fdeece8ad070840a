"""The C form of small allocations and releases does what plain Python does, good batches and bad ones alike."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from allocator import COLD, FULL, BlockPool, KVError, pool_core
from allocator.block_references import BlockReferences

MakePool = Callable[..., BlockPool]
Hashes = Callable[..., list[bytes]]
ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which("gcc") or shutil.which("cc")
HEADERS = Path(sysconfig.get_paths()["include"])
CAN_BUILD = COMPILER is not None and (HEADERS / "Python.h").exists()
needs_core = pytest.mark.skipif(pool_core.core is None, reason=f"no C core: {pool_core.reason}")


class Counted:
    """The C core, with a count of the calls of each function that did its work."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(pool_core.core, name)

        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            self.calls[name] += name != "release" or result is not None
            return result

        return call


class ReversesIdle(Counted):
    """A bug: what became idle is told in the wrong order."""

    def release(self, *arguments: Any) -> Any:
        idle = pool_core.core.release(*arguments)
        return idle and idle[::-1]


def state(pool: BlockPool) -> dict[str, Any]:
    """All that the forms could leave different."""
    return {
        "words": pool.ledger.life.tolist(),
        "free": [free.held().tolist() for free in pool.ledger.free],
        "frees": list(pool.ledger.frees),
        "counts": [list(pool.idle_counts), list(pool.held_idle_counts), list(pool.fenced_counts)],
        "clock": (pool.tick, pool.evicted_count),
        "names": [dict(names) for index in pool.indexes for names in (index.exact, index.lossy)],
    }


class Pair:
    """Two pools that are told the same: one with the C core, one in plain Python."""

    def __init__(self, make_pool: MakePool, core: Any, seed: int) -> None:
        self.random = random.Random(seed)
        self.groups = 1 + (seed % 4 == 1)
        self.pools = [make_pool(60, cold=seed % 3 > 0, groups=self.groups) for _ in range(2)]
        self.forms = (FULL, COLD) if seed % 3 > 0 else (FULL,)
        self.pools[0]._core, self.pools[1]._core = core, None
        self.live: list[int] = []
        self.names = 0

    def both(self, call: Callable[[BlockPool], Any]) -> Any:
        """What both pools answer, or the error that both raise as text."""
        answers = []
        for pool in self.pools:
            try:
                answer = call(pool)
                answers.append(answer.tolist() if isinstance(answer, np.ndarray) else answer)
            except KVError as error:
                answers.append(f"{type(error).__name__}: {error}")
        assert answers[0] == answers[1]
        return answers[0]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        kinds = ("allocate", "seal", "release", "churn", "misuse", "hold")
        getattr(self, self.random.choices(kinds, (6, 7, 8, 5, 2, 1))[0])()
        first, second = self.pools
        assert state(first) == state(second)
        for pool in self.pools:
            pool.check_invariants()

    def allocate(self) -> None:
        group, form = self.random.randrange(self.groups), self.random.choice(self.forms)
        count = self.random.choice((0, 1, 2, 5, 8, 16, 31, 32, 33, 40))
        ids = self.both(lambda pool: pool.allocate(group, count, form))
        if isinstance(ids, list):
            self.live += ids

    def seal(self) -> None:
        chosen = [block_id for block_id in self.live if self.random.random() < 0.6]
        opened = [i for i in chosen if self.pools[0].state_of(i).name == "OPEN" and not self.pools[0].form_of(i)]
        names = [f"{self.names + place}".encode().ljust(32) for place in range(len(opened))]
        self.names += len(names)
        exact = len(self.forms) == 1 or self.random.random() < 0.8  # with one map of names, more is evicted in C
        for group in range(self.groups):
            part = [place for place, block_id in enumerate(opened) if self.pools[0].group_of(block_id) == group]
            if part:
                ids, hashes = [opened[place] for place in part], [names[place] for place in part]
                self.both(lambda pool, ids=ids, hashes=hashes: pool.seal_many(ids, hashes, exact))

    def release(self) -> None:
        if not self.live:
            return
        start = self.random.randrange(len(self.live))
        batch = self.live[start : start + self.random.choice((1, 2, 7, 16, 32, 36))]
        if self.random.random() < 0.4:  # blocks of one class
            classes = self.pools[0]._classes
            batch = [block_id for block_id in batch if classes[block_id] == classes[batch[0]]]
        given, run = self.as_some(batch), self.random.random() < 0.2
        if self.both(lambda pool: pool.release(given, run)) is None:
            for block_id in batch:
                self.live.remove(block_id)

    def churn(self) -> None:
        """A short request: its blocks come and go at once, every other one named."""
        count = self.random.choice((2, 9, 16))
        ids = self.both(lambda pool: pool.allocate(0, count))
        if isinstance(ids, list):
            names = [f"{self.names + place}".encode().ljust(32) for place in range(count)]
            self.names += count
            self.both(lambda pool: pool.seal_many(ids[::2], names[::2], True))
            given = self.as_some(ids[::-1])
            self.both(lambda pool: pool.release(given))

    def misuse(self) -> None:
        """A batch with something in it that is not plain; mostly refused, -1 and shared blocks are not."""
        capacity = self.pools[0].ledger.id_capacity
        odd = [-1, -2, -capacity, capacity, 2 * capacity, 2 * capacity + 1, 2**31 - 1, -(2**31)]
        odd += [self.random.randrange(capacity), *self.live[:1]]
        start = self.random.randrange(len(self.live) + 1)
        batch = self.live[start : start + self.random.choice((1, 3, 15, 30))]
        batch.insert(self.random.randrange(len(batch) + 1), self.random.choice(odd))
        given = self.as_some(batch)
        if self.both(lambda pool: pool.release(given)) is None:
            for block_id in batch:
                if block_id in self.live:
                    self.live.remove(block_id)

    def hold(self) -> None:
        """More references, and pins that end after a while."""
        ids = self.random.sample(self.live, min(3, len(self.live)))
        if self.random.random() < 0.5:
            if self.both(lambda pool: pool.share(ids)) is None:
                self.live += ids
            return
        self.both(lambda pool: pool.pin(ids))
        self.release()
        for pool in self.pools:
            pool.check_invariants()
        self.both(lambda pool: pool.unpin(ids))

    def as_some(self, batch: list[int]) -> Any:
        """The batch as one of the things that callers pass."""
        kind = self.random.choice(("list", "array", "array", "reversed", "strided", "long", "tuple"))
        if kind == "array":
            return np.array(batch, dtype=np.int32)
        if kind == "reversed":
            return np.array(batch[::-1], dtype=np.int32)[::-1]
        if kind == "strided":
            return np.repeat(np.array(batch, dtype=np.int32), 3)[::3]
        if kind == "long" and len(batch) <= 32:
            return np.array(batch, dtype=np.int64)
        return tuple(batch) if kind == "tuple" else list(batch)


@needs_core
def test_both_forms_do_the_same(make_pool: MakePool) -> None:
    counted = Counted()
    for seed in range(12):
        pair = Pair(make_pool, counted, seed)
        pair.steps(150)
        peeked = [[p.peek(1000).tolist() for p in pool.policies] for pool in pair.pools]
        assert peeked[0] == peeked[1]
    assert all(counted.calls[name] > 50 for name in ("take", "evict", "release")), counted.calls


@needs_core
def test_a_difference_would_be_found(make_pool: MakePool) -> None:
    pair = Pair(make_pool, ReversesIdle(), seed=0)
    with pytest.raises(AssertionError):
        pair.steps(150)


@needs_core
@pytest.mark.parametrize("batch", [[2**40, 0], [0, 2**70], [0, -(2**70)]])
def test_a_number_beyond_every_id_is_refused(batch: list[int], make_pool: MakePool) -> None:
    pool = make_pool(8)
    pool.allocate(0, 2)
    with pytest.raises(KVError, match="expected a block id"):
        pool.release(batch)
    pool.check_invariants()
    assert pool.live_block_count == 2


@pytest.mark.usefixtures("each_form")
@pytest.mark.parametrize("batch", [np.arange(2, dtype=np.float32), np.zeros((2, 2), dtype=np.int32), [0, 1.0]])
def test_what_are_no_ids_changes_nothing(batch: Any, make_pool: MakePool) -> None:
    pool = make_pool(8)
    pool.allocate(0, 4)
    with pytest.raises(TypeError):
        pool.release(batch)
    assert pool.live_block_count == 4
    pool.check_invariants()


@needs_core
def test_a_name_that_is_gone_is_told_and_not_passed_over(make_pool: MakePool, hashes: Hashes) -> None:
    """A broken invariant: the index lost a name. Nobody gets the block, and later victims keep theirs."""
    pool = make_pool(20, cold=False)
    pool.release(pool.seal_many(pool.allocate(0, 20), hashes(20), True))
    (second,) = pool.match(0, hashes(20)[1:2])
    del pool.index(0).exact[hashes(20)[1]]
    with pytest.raises(KeyError):
        pool.allocate(0, 4)
    assert pool.state_of(second).name == "IDLE"
    assert len(pool.index(0).exact) == 18


@needs_core
def test_ids_outside_their_buffers_raise_and_write_nothing() -> None:
    core = pool_core.core
    words, stack, ids = np.zeros(4, np.int32), np.array([0, 1, 9, -1], np.intp), np.zeros(4, np.int32)
    for start, count in ((0, 3), (3, 1), (0, 5), (3, 2), (-1, 1), (0, -1), (2**62, 2**62)):
        with pytest.raises(IndexError):
            core.take(words, stack, start, count, ids)
    for victims in ([9], [-1], [3]):
        with pytest.raises(IndexError):
            core.evict(words, victims, {}, [b"", b"", b""], ids)
    for names, victims, hashes in (((), [0], [b""]), ({}, (0,), [b""]), ({}, [0], (b"",)), ({}, [0] * 5, [b""])):
        with pytest.raises((TypeError, SystemError)):
            core.evict(words, victims, names, hashes, ids)
    for wrong in (words.astype(np.int64), words[::2], b"1234"):
        with pytest.raises((TypeError, ValueError, BufferError)):
            core.take(wrong, stack, 0, 1, ids)
    with pytest.raises(TypeError):
        core.take(words, stack)
    words[:] = core.OPEN_ONCE
    assert core.release(words, None, 0, stack, 3, [0, 1]) is None  # the second has no room
    assert core.release(words, None, 0, stack, -1, [0]) is None
    assert core.release(words, np.zeros(1, np.int16), 0, stack, 0, [1]) is None
    assert words.tolist() == [core.OPEN_ONCE] * 4
    assert not ids.any()


@needs_core
def test_nothing_is_kept_alive(make_pool: MakePool) -> None:
    pool = make_pool(40, cold=False)
    ids = pool.allocate(0, 16)
    for batch in (ids[::-1], ids.tolist()):
        before = sys.getrefcount(batch), sys.getrefcount(None), sys.getrefcount(pool._words)
        for _ in range(100):
            pool.release(batch)
            pool.allocate(0, 16)
        after = sys.getrefcount(batch), sys.getrefcount(None), sys.getrefcount(pool._words)
        assert [abs(b - a) < 50 for a, b in zip(before, after, strict=True)] == [True] * 3


# -- loading it -------------------------------------------------------------------------------------------------------

# An editable install would find the extension of this checkout for a copy that has none.
PROGRAM = """
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in getattr(one, "__module__", "")]
import allocator.pool_core as p
print(p.core is not None, "|", p.reason)
"""


def ask(folder: Path, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "KVSTORE_KERNELS"}
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    environment |= {"PYTHONPATH": str(folder)} | variables
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


def test_it_is_there_where_it_can_be_built() -> None:
    if not CAN_BUILD:
        pytest.skip("no C compiler, or no headers of Python")
    if "switched off" in pool_core.reason:
        pytest.skip(pool_core.reason)
    assert pool_core.core is not None, pool_core.reason
    assert BlockReferences._core is pool_core.core


@needs_core
def test_it_can_be_switched_off() -> None:
    assert ask(ROOT) == "True | \n"
    assert ask(ROOT, KVSTORE_KERNELS="baseline") == "True | \n"
    assert ask(ROOT, KVSTORE_KERNELS=" OFF ") == "False | switched off by KVSTORE_KERNELS=off\n"


def test_without_it_the_pool_says_nothing(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "allocator", tmp_path / "allocator", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert ask(tmp_path).startswith("False | not built; install a C compiler")
    (tmp_path / "allocator/_pool.abi3.so").write_bytes(b"no library")
    assert ask(tmp_path).startswith("False | the extension cannot be loaded (")


@pytest.mark.skipif(not CAN_BUILD, reason="no C compiler, or no headers of Python")
def test_an_old_build_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "allocator", tmp_path / "allocator", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    built = str(tmp_path / "allocator/_pool.abi3.so")
    source = str(tmp_path / "allocator/csrc/pool.c")
    command = [str(COMPILER), "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{HEADERS}"]
    limited = "-DPy_LIMITED_API=0x030B0000"
    subprocess.run([*command, limited, "-DKV_POOL_ABI=999", source, "-o", built], check=True)
    assert ask(tmp_path) == "False | stale build (its ABI is 999, this version needs 1); reinstall\n"
    subprocess.run([*command, limited, source, "-o", built], check=True)
    assert ask(tmp_path) == "True | \n"  # the control


@needs_core
def test_other_life_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool_core.refused(pool_core.core) == ""
    monkeypatch.setitem(pool_core._EXPECTED, "IDLE", 5)
    assert pool_core.refused(pool_core.core) == "stale build (its IDLE is 4, this version needs 5); reinstall"
