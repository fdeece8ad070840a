"""The contract of every tier below the device, and the queue that tiers are built on.

A tier stores immutable copies of blocks under a CopyKey. Rules that every tier keeps (kvstore.testing.TierContract
checks them):

- submit_put and submit_get only enqueue. Each Transfer ends in exactly one Completion, which poll() hands out; poll
  never waits. A result comes per key: part of a batch may fail.
- The caller owns the buffers. They must stay unchanged (put) or unread (get) from submit until the Completion has been
  polled; after it the tier keeps no reference to them.
- A copy is visible (contains, get) only when all its bytes are there. A get gives the bytes of that key, or a code that
  is not OK and then the buffer's contents mean nothing. Bad bytes are a code, never an exception.
- used_bytes never exceeds capacity_bytes, at any moment.
- cancel() ends a transfer early: keys not yet done are CANCELLED; the one Completion still comes.

Calls come from the thread that holds the store's lock, or from one thread; results are made on the executor. A tier's
own lock guards its index only and is never held while bytes are copied.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey as CopyKey

Buffer: TypeAlias = Any
"""Anything contiguous with the buffer protocol: bytes, memoryview, numpy array, mmap."""

ByteRow: TypeAlias = npt.NDArray[np.uint8]

_UINT8 = np.dtype(np.uint8)
_LOG = logging.getLogger(__name__)


class ResultCode(StrEnum):
    """How one key of a transfer ended."""

    OK = "ok"
    MISS = "miss"  # get: not there (any more)
    FULL = "full"  # put: no room and nothing may be evicted, or the queue is at its limit
    CORRUPT = "corrupt"  # get: there, but not what was asked for; the tier has dropped it
    FAILED = "failed"  # the tier could not do it; counted by cause
    CANCELLED = "cancelled"
    TOO_LARGE = "too_large"  # put: can never fit


class PutItem(NamedTuple):
    """One copy to store: its bytes as pieces in order, and the hash of the block before (None: first of its chain)."""

    key: CopyKey
    pieces: Sequence[Buffer]
    parent: bytes | None = None


class GetItem(NamedTuple):
    """One copy to read into a writable buffer (or several in order) of exactly the stored length."""

    key: CopyKey
    buffer: Buffer | Sequence[Buffer]


class TransferKind(StrEnum):
    PUT = "put"
    GET = "get"


class _Stage(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class Transfer:
    """A batch under way. Made by a tier; the caller may look at it and cancel it."""

    __slots__ = ("_claims", "_jobs", "_tier", "cancelled", "id", "keys", "kind", "stage", "tier_name", "total_bytes")

    def __init__(self, tier: QueuedTier, number: int, kind: TransferKind, jobs: list[Job]) -> None:
        self._tier = tier
        self._jobs = jobs
        self._claims: Sequence[Any] | None = None
        self.id = number
        self.tier_name = tier.name
        self.kind = kind
        self.keys = tuple(job.key for job in jobs)
        self.total_bytes = sum(job.size_bytes for job in jobs)
        self.cancelled = False
        self.stage: _Stage = _Stage.QUEUED

    @property
    def done(self) -> bool:
        """True once the Completion lies in the queue (it may not have been polled)."""
        return self.stage is _Stage.DONE

    def cancel(self) -> bool:
        """Ask for an early end. False when it is too late. The Completion comes in either case."""
        return self._tier.cancel(self)

    def __repr__(self) -> str:
        return f"Transfer({self.tier_name} {self.kind} {self.id}, {len(self.keys)} keys, {self.stage})"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a transfer: one result per key, in the order of the items."""

    transfer: Transfer
    results: tuple[ResultCode, ...]


class Executor(Protocol):
    """Where a tier's work runs: in order, one task at a time."""

    def submit(self, task: Callable[[], None]) -> None: ...

    def close(self) -> None:
        """Finish what was submitted and stop. Idempotent."""


class InlineExecutor:
    """Runs each task before submit returns: for simulation and tests."""

    def submit(self, task: Callable[[], None]) -> None:
        task()

    def close(self) -> None:
        return


class ThreadExecutor:
    """One thread, first in first out. A task that raises is counted and logged; the thread lives on."""

    def __init__(self, name: str = "kvstore-io") -> None:
        self.failed_count = 0
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        if self._closed:
            raise UsageError("executor: submit after close")
        self._tasks.put(task)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tasks.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # counted: a lost thread would strand every later transfer
                self.failed_count += 1
                _LOG.exception("kvstore: a task on %s failed", self._thread.name)
            del task


def make_executor(kind: str, name: str = "kvstore-io") -> Executor:
    """The executor that the setting io_threads names: "thread" or "inline"."""
    if kind == "thread":
        return ThreadExecutor(name)
    if kind == "inline":
        return InlineExecutor()
    raise UsageError(f"executor: got {kind!r}; expected thread or inline")


class Tier(ABC):
    """One place for copies: see the rules at the top of this module."""

    name: str

    @abstractmethod
    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Which copies are stored and whole. A promise of nothing: a get may still miss."""

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, from the first on, are stored in the form of `key` (its own hash is ignored)."""
        present = self.contains(key.with_hashes(hashes))
        return present.index(False) if False in present else len(present)

    @abstractmethod
    def submit_put(self, items: Sequence[PutItem | tuple[Any, ...]]) -> Transfer:
        """Store copies: (key, pieces) or (key, pieces, parent). UsageError for a bad argument; then nothing was queued.

        A key that is there already is OK and only touched: copies are immutable.
        """

    @abstractmethod
    def submit_get(self, items: Sequence[GetItem | tuple[Any, ...]]) -> Transfer:
        """Read copies: (key, writable buffer). UsageError for a bad argument; then nothing was queued."""

    @abstractmethod
    def poll(self) -> list[Completion]:
        """The transfers that have ended since the last call. Never waits."""

    @abstractmethod
    def delete(self, keys: Sequence[CopyKey]) -> int:
        """Drop copies; how many went. Pinned ones stay; readers under way finish on the old bytes."""

    @abstractmethod
    def clear(self) -> None:
        """Drop everything, pins included, and cancel what is queued. TierError when that cannot be promised."""

    @property
    @abstractmethod
    def used_bytes(self) -> int: ...

    @property
    @abstractmethod
    def capacity_bytes(self) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """Cancel what is queued, finish what runs, give memory and threads back. Idempotent; poll still works."""

    def touch(self, keys: Sequence[CopyKey]) -> None:  # noqa: B027 - a tier without recency has nothing to do
        """Note a use elsewhere (a device hit), so that a prefix does not grow old below its suffix."""

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Keep copies until unpin, one count each. False where absent, or where this tier pins nothing."""
        return [False] * len(keys)

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        """Give back pins that pin() granted. UsageError when one was not, and then nothing changes."""
        if keys:
            raise UsageError(f"tier {self.name}: unpin of {len(keys)} keys; this tier pins nothing")

    @abstractmethod
    def set_waker(self, waker: Callable[[], None] | None) -> None:
        """A call made, on any thread, whenever a Completion has been queued."""

    def counters(self) -> dict[str, int]:
        """Counts since start, by cause."""
        return {}


def as_byte_row(buffer: Buffer, *, writable: bool = False) -> ByteRow:
    """A flat uint8 view of a contiguous buffer, no copy. UsageError when there is none."""
    if type(buffer) is np.ndarray and buffer.dtype is _UINT8 and buffer.ndim == 1:
        flags = buffer.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return buffer
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"buffer: got {type(buffer).__name__} ({error}); expected a buffer of bytes") from None
    if not view.c_contiguous:
        raise UsageError(f"buffer: got a view of shape {view.shape} with gaps; expected contiguous bytes")
    if writable and view.readonly:
        raise UsageError(f"buffer: got a read-only {type(buffer).__name__}; expected a writable one")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def _rows(buffers: Buffer | Sequence[Buffer], *, writable: bool = False) -> list[ByteRow]:
    many = buffers if isinstance(buffers, list | tuple) else [buffers]
    return [as_byte_row(one, writable=writable) for one in many]


class Job(NamedTuple):
    """One key of a transfer as the hooks see it."""

    key: CopyKey
    rows: list[ByteRow]
    parent: bytes | None
    size_bytes: int


class QueuedTier(Tier):
    """Queue, cancellation and completion of a tier, so that a backend writes `_put_one` and `_get_one` only.

    The hooks run on the executor. They return a ResultCode; an exception is a FAILED, counted under its type's name.
    A backend that gains from batches overrides `_put_batch` / `_get_batch` and looks at transfer.cancelled itself.
    """

    def __init__(self, name: str, executor: Executor | None = None, *, queue_limit_items: int = 65536) -> None:
        self.name = name
        self._executor: Executor = executor if executor is not None else InlineExecutor()
        self._queue_limit_items = queue_limit_items
        self._state = threading.Lock()  # stages, counts, the set of open transfers
        self._open: dict[int, Transfer] = {}
        self._queued_items = 0
        self._next_number = 0
        self._completions: deque[Completion] = deque()
        self._waker: Callable[[], None] | None = None
        self._closed = False
        self._counts: Counter[str] = Counter()

    # hooks -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _put_one(self, job: Job) -> ResultCode: ...

    @abstractmethod
    def _get_one(self, job: Job, claim: Any) -> ResultCode: ...

    def _claim(self, jobs: Sequence[Job]) -> list[Any] | None:
        """At submit_get: take what protects the copies until they are read, one claim a job."""
        return None

    def _release(self, claims: Sequence[Any]) -> None:
        """Give claims back, once, whatever the transfer's end."""

    def _put_batch(self, transfer: Transfer, jobs: Sequence[Job]) -> list[ResultCode]:
        return [ResultCode.CANCELLED if transfer.cancelled else self._guarded(self._put_one, job) for job in jobs]

    def _get_batch(self, transfer: Transfer, jobs: Sequence[Job], claims: Sequence[Any]) -> list[ResultCode]:
        return [
            ResultCode.CANCELLED if transfer.cancelled else self._guarded(self._get_one, job, claim)
            for job, claim in zip(jobs, claims, strict=True)
        ]

    # the contract ----------------------------------------------------------------------------------------------------

    def submit_put(self, items: Sequence[PutItem | tuple[Any, ...]]) -> Transfer:
        jobs = []
        for item in items:
            if not isinstance(item, tuple) or len(item) not in (2, 3):
                raise UsageError(f"put: got {item!r}; expected (key, pieces) or (key, pieces, parent)")
            key, pieces, parent = item if len(item) == 3 else (*item, None)
            if not isinstance(key, CopyKey):
                raise UsageError(f"tier {self.name}: got {key!r}; expected a CopyKey")
            if parent is not None and (not isinstance(parent, bytes) or len(parent) != 32):
                raise UsageError(f"put: parent {parent!r}; expected 32 bytes or None")
            if parent == key.hash:
                raise UsageError(f"put: block {key.hash.hex()} is its own parent")
            rows = _rows(pieces)
            jobs.append(Job(key, rows, parent, sum([row.nbytes for row in rows])))
        return self._start(TransferKind.PUT, jobs)

    def submit_get(self, items: Sequence[GetItem | tuple[Any, ...]]) -> Transfer:
        jobs = []
        for item in items:
            if not isinstance(item, tuple) or len(item) != 2:
                raise UsageError(f"get: got {item!r}; expected (key, writable buffer)")
            key, buffer = item
            if not isinstance(key, CopyKey):
                raise UsageError(f"tier {self.name}: got {key!r}; expected a CopyKey")
            rows = _rows(buffer, writable=True)
            jobs.append(Job(key, rows, None, sum([row.nbytes for row in rows])))
        return self._start(TransferKind.GET, jobs)

    def poll(self) -> list[Completion]:
        done = []
        while self._completions:
            done.append(self._completions.popleft())
        return done

    def set_waker(self, waker: Callable[[], None] | None) -> None:
        self._waker = waker

    def counters(self) -> dict[str, int]:
        with self._state:
            return dict(self._counts)

    @property
    def queued_items(self) -> int:
        """Keys in transfers that have not ended."""
        return self._queued_items

    def cancel(self, transfer: Transfer) -> bool:
        with self._state:
            if transfer.stage is _Stage.DONE:
                return False
            transfer.cancelled = True
            if transfer.stage is _Stage.RUNNING:
                return True
            transfer.stage = _Stage.RUNNING  # ours now: the executor will pass it by
        self._finish(transfer, [ResultCode.CANCELLED] * len(transfer.keys))
        return True

    def clear(self) -> None:
        self._cancel_all()

    def close(self) -> None:
        with self._state:
            self._closed = True
        self._cancel_all()
        self._executor.close()

    # inside ----------------------------------------------------------------------------------------------------------

    def _count(self, cause: str, amount: int = 1) -> None:
        with self._state:
            self._counts[cause] += amount

    def _start(self, kind: TransferKind, jobs: list[Job]) -> Transfer:
        with self._state:
            if self._closed:
                raise UsageError(f"tier {self.name}: submit after close")
            transfer = Transfer(self, self._next_number, kind, jobs)
            self._next_number += 1
            refused = self._queued_items + len(jobs) > self._queue_limit_items
            self._open[transfer.id] = transfer
            self._queued_items += len(jobs)
            if refused:
                self._counts["queue_refused"] += len(jobs)
        if refused:
            self._finish(transfer, [ResultCode.FULL if kind is TransferKind.PUT else ResultCode.FAILED] * len(jobs))
            return transfer
        try:
            if kind is TransferKind.GET:
                transfer._claims = self._claim(jobs)
            self._executor.submit(partial(self._run, transfer))
        except Exception as error:  # counted by cause: an executor that takes nothing is a transfer that failed
            self._count(f"failed_{type(error).__name__}")
            self._finish(transfer, [ResultCode.FAILED] * len(jobs))
        return transfer

    def _run(self, transfer: Transfer) -> None:
        with self._state:
            if transfer.stage is not _Stage.QUEUED:
                return
            transfer.stage = _Stage.RUNNING
        jobs = transfer._jobs
        try:
            if transfer.kind is TransferKind.PUT:
                results = self._put_batch(transfer, jobs)
            else:
                results = self._get_batch(transfer, jobs, transfer._claims or [None] * len(jobs))
        except Exception as error:  # counted by cause: a transfer must end, whatever its backend did
            self._count(f"failed_{type(error).__name__}")
            _LOG.exception("kvstore: tier %s failed on a batch", self.name)
            results = [ResultCode.FAILED] * len(jobs)
        self._finish(transfer, results)

    def _guarded(self, hook: Callable[..., ResultCode], *arguments: Any) -> ResultCode:
        try:
            return hook(*arguments)
        except Exception as error:  # counted by cause: one bad key must not take the batch or the thread along
            self._count(f"failed_{type(error).__name__}")
            _LOG.exception("kvstore: tier %s failed on a key", self.name)
            return ResultCode.FAILED

    def _finish(self, transfer: Transfer, results: Sequence[ResultCode]) -> None:
        transfer._jobs = []  # the buffers are the caller's again before it can learn of the end
        claims, transfer._claims = transfer._claims, None
        if claims is not None:
            self._release(claims)
        with self._state:
            transfer.stage = _Stage.DONE
            self._open.pop(transfer.id, None)
            self._queued_items -= len(transfer.keys)
            for code in set(results):
                self._counts[f"{transfer.kind}_{code}"] += results.count(code)
            self._completions.append(Completion(transfer, tuple(results)))
        waker = self._waker
        if waker is not None:
            waker()

    def _cancel_all(self) -> None:
        with self._state:
            transfers = list(self._open.values())
        for transfer in transfers:
            self.cancel(transfer)
