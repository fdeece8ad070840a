"""The queue that tiers are built on: submission, cancellation and completion, so that a backend copies and no more.

A backend derives from QueuedTier and writes hooks for one key or one batch. `_state` guards stages, counts and the set
of open transfers; it is never held while a hook runs.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeVar

from allocator.errors import UsageError
from kvstore.copy_key import CopyKey
from kvstore.executor import Executor, InlineExecutor
from kvstore.layer_progress import LayerRounds
from kvstore.tier import (
    Buffer,
    ByteRow,
    Completion,
    GetItem,
    Job,
    PutItem,
    ResultCode,
    Stage,
    Tier,
    Transfer,
    TransferKind,
    as_byte_row,
)

_LOG = logging.getLogger(__name__)


T = TypeVar("T")


def _advanced(reader: Generator[int, None, ResultCode]) -> int | ResultCode:
    try:
        return next(reader)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _rows(buffers: Buffer | Sequence[Buffer], *, writable: bool = False) -> list[ByteRow]:
    many = buffers if isinstance(buffers, list | tuple) else [buffers]
    return [as_byte_row(one, writable=writable) for one in many]


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

    def _layers_of(self, job: Job, claim: Any) -> Generator[int, None, ResultCode]:
        """One copy in the order of its layers: yields the place below which they are there and verified.

        A backend whose copies can be checked in parts overrides this; here it is all or nothing.
        """
        yield from ()
        return self._get_one(job, claim)

    def _get_layers(self, transfer: Transfer, jobs: Sequence[Job], claims: Sequence[Any]) -> list[ResultCode]:
        """The first layers of all, then the next. Backends of batches override it."""
        rounds = LayerRounds(transfer.progress, jobs, self._waker)
        readers = [self._layers_of(job, claim) for job, claim in zip(jobs, claims, strict=True)]
        while going := rounds.going:
            for number in going:
                reader = readers[number]
                found = ResultCode.CANCELLED if transfer.cancelled else self._guarded(_advanced, reader)
                if isinstance(found, ResultCode):
                    rounds.end(number, found, good=found is ResultCode.OK)
                else:
                    rounds.got(number, found)
            rounds.tell()
        return [result or ResultCode.FAILED for result in rounds.results]

    # the contract ----------------------------------------------------------------------------------------------------

    def submit_put(self, items: Sequence[PutItem | tuple[Any, ...]]) -> Transfer:
        jobs = []
        for item in items:
            if not isinstance(item, tuple) or not 2 <= len(item) <= 4:
                raise UsageError(f"put: got {item!r}; expected (key, pieces), and perhaps a parent and steps")
            key, pieces, parent, steps = PutItem(*item)
            if not isinstance(key, CopyKey):
                raise UsageError(f"tier {self.name}: got {key!r}; expected a CopyKey")
            if parent is not None and (not isinstance(parent, bytes) or len(parent) != 32):
                raise UsageError(f"put: parent {parent!r}; expected 32 bytes or None")
            if parent == key.hash:
                raise UsageError(f"put: block {key.hash.hex()} is its own parent")
            rows = _rows(pieces)
            jobs.append(Job(key, rows, parent, sum([row.nbytes for row in rows]), steps))
        return self._start(TransferKind.PUT, jobs)

    def submit_get(self, items: Sequence[GetItem | tuple[Any, ...]], *, by_layer: bool = False) -> Transfer:
        jobs = []
        for item in items:
            if not isinstance(item, tuple) or len(item) != 2:
                raise UsageError(f"get: got {item!r}; expected (key, writable buffer)")
            key, buffer = item
            if not isinstance(key, CopyKey):
                raise UsageError(f"tier {self.name}: got {key!r}; expected a CopyKey")
            rows = _rows(buffer, writable=True)
            jobs.append(Job(key, rows, None, sum([row.nbytes for row in rows])))
        return self._start(TransferKind.GET, jobs, by_layer=by_layer)

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
            if transfer.stage is Stage.DONE:
                return False
            transfer.cancelled = True
            if transfer.stage is Stage.RUNNING:
                return True
            transfer.stage = Stage.RUNNING  # ours now: the executor will pass it by
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

    def _start(self, kind: TransferKind, jobs: list[Job], *, by_layer: bool = False) -> Transfer:
        with self._state:
            if self._closed:
                raise UsageError(f"tier {self.name}: submit after close")
            transfer = Transfer(self, self._next_number, kind, jobs, by_layer=by_layer)
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
            if transfer.stage is not Stage.QUEUED:
                return
            transfer.stage = Stage.RUNNING
        jobs = transfer._jobs
        try:
            if transfer.kind is TransferKind.PUT:
                results = self._put_batch(transfer, jobs)
            else:
                get = self._get_layers if transfer.by_layer else self._get_batch
                results = get(transfer, jobs, transfer._claims or [None] * len(jobs))
        except Exception as error:  # counted by cause: a transfer must end, whatever its backend did
            self._count(f"failed_{type(error).__name__}")
            _LOG.exception("kvstore: tier %s failed on a batch", self.name)
            results = [ResultCode.FAILED] * len(jobs)
        self._finish(transfer, results)

    def _guarded(self, hook: Callable[..., T], *arguments: Any) -> T | ResultCode:
        try:
            return hook(*arguments)
        except Exception as error:  # counted by cause: one bad key must not take the batch or the thread along
            self._count(f"failed_{type(error).__name__}")
            _LOG.exception("kvstore: tier %s failed on a key", self.name)
            return ResultCode.FAILED

    def _finish(self, transfer: Transfer, results: Sequence[ResultCode]) -> None:
        transfer._jobs = []  # the buffers are the caller's again before it can learn of the end
        if transfer.kind is TransferKind.GET:
            if results.count(ResultCode.OK) == len(results):
                transfer.progress.advance({key.group: key.layers[1] for key in transfer.keys})
            else:
                transfer.progress.fail()
        claims, transfer._claims = transfer._claims, None
        if claims is not None:
            self._release(claims)
        with self._state:
            transfer.stage = Stage.DONE
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
