"""The decode loop on a thread of its own, for callers that must not wait for a step.

Every method may be called from any thread; the loop itself is touched by the engine's thread only. A `Listener` is
called on that thread too, so it must do little: hand the token on and return.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from allocator.errors import CapacityError, KVError, UsageError

if TYPE_CHECKING:
    from engine_adapter.decode_loop import DecodeLoop
    from engine_adapter.request import Request, RequestResult
    from kvstore import KVStore

_T = TypeVar("_T")
_WAIT_SECONDS = 0.02
_IDLE_SECONDS = 0.5


class Listener(Protocol):
    """Who hears of a request. After `done` or `failed` nothing more comes."""

    def token(self, index: int, token_id: int) -> None: ...

    def done(self, result: RequestResult) -> None: ...

    def failed(self, error: Exception) -> None: ...


class EngineThread:
    """Serves requests until `close`. At most `open_requests_limit` are waiting or running; more are refused at once.

    A request that takes longer than `request_seconds` is aborted.
    """

    def __init__(
        self,
        loop: DecodeLoop,
        store: KVStore,
        *,
        open_requests_limit: int = 256,
        request_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._store = store
        self._limit = open_requests_limit
        self._request_seconds = request_seconds
        self._clock = clock
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: dict[str, tuple[Listener, float]] = {}
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="decode-loop", daemon=True)
        self._thread.start()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    @property
    def healthy(self) -> bool:
        return self.failure is None and not self._closing and self._thread.is_alive()

    def submit(self, request: Request, listener: Listener) -> None:
        """Queue a request. CapacityError when too many are open; what the loop refuses comes as `failed`."""
        with self._lock:
            if self._closing or self.failure is not None:
                raise KVError(f"the engine does not run: {self.failure or 'closing'}")
            if len(self._open) >= self._limit:
                raise CapacityError(1, 0, "places for requests", transient=True)
            if request.request_id in self._open:
                raise UsageError(f"request id {request.request_id!r} is in use")
            self._open[request.request_id] = (listener, self._clock() + self._request_seconds)
        heard = replace(request, on_token=lambda _name, index, token_id: listener.token(index, token_id))
        self._tasks.put(lambda: self._start(heard, listener))

    def abort(self, request_id: str) -> None:
        """End a request soon; its listener still gets `done`. Nothing happens if it has ended."""
        self._tasks.put(lambda: self._abort(request_id))

    def ask(self, question: Callable[[DecodeLoop, KVStore], _T]) -> Future[_T]:
        """Have something read between two steps."""
        answer: Future[_T] = Future()

        def task() -> None:
            try:
                answer.set_result(question(self._loop, self._store))
            except Exception as error:  # carried to whoever asked
                answer.set_exception(error)

        self._tasks.put(task)
        return answer

    def close(self, timeout_seconds: float = 30.0) -> None:
        """Abort what is open and stop the thread. Idempotent. The store is not closed."""
        with self._lock:
            self._closing = True
        self._tasks.put(lambda: None)
        self._thread.join(timeout_seconds)

    # On the engine's thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_tasks()
                if not self._loop.busy:
                    continue
                idle = self._loop.step().idle
                self._deliver()
                self._expire()
                if idle:
                    self._store.wait(_WAIT_SECONDS)
            for name in list(self._open):
                self._abort(name)
            self._deliver()
        except Exception as error:  # the loop is broken: say so to everybody who waits, and in /healthz
            self.failure = f"{type(error).__name__}: {error}"
            for listener, _ in list(self._open.values()):
                listener.failed(error)
            self._open.clear()
            logging.getLogger(__name__).exception("the decode loop has failed; no request is served any more")

    def _take_tasks(self) -> None:
        """All that wait; with nothing to compute, wait for one."""
        try:
            task: Callable[[], Any] = (
                self._tasks.get_nowait() if self._loop.busy else self._tasks.get(timeout=_IDLE_SECONDS)
            )
            while True:
                task()
                task = self._tasks.get_nowait()
        except queue.Empty:
            return

    def _start(self, request: Request, listener: Listener) -> None:
        if request.request_id not in self._open:
            return
        try:
            self._loop.submit(request)
        except KVError as error:
            self._open.pop(request.request_id, None)
            listener.failed(error)

    def _abort(self, request_id: str) -> None:
        if request_id in self._open:
            self._loop.abort(request_id)
            self._deliver()

    def _deliver(self) -> None:
        for result in self._loop.collect().values():
            entry = self._open.pop(result.request_id, None)
            if entry is not None:
                entry[0].done(result)

    def _expire(self) -> None:
        now = self._clock()
        for name in [name for name, (_, deadline) in self._open.items() if now > deadline]:
            self._abort(name)
