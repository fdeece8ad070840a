"""The daemon's recorder: a trace of its clients' requests (`kvstore record -- kvstore serve ...`).

Clients say once a request which blocks its prompt has (`Looked`). A session's thread only leaves that in a bounded
queue; a thread of its own passes it to a process of its own, which hides names and writes, since a prompt's 2,000
names would keep lookups from Python's lock for longer than they take. What there is no time for is dropped and counted.

`DaemonRecording` is the daemon's side, `Prompts` and `main` that process's. No torch.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, TypeAlias

import msgspec

from allocator.errors import ConfigError
from kvstore.daemon.protocol import HASH_BYTES, Looked
from kvstore.trace_recorder import FILE_VARIABLE, EndedRequest, TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.daemon.forms import Form

_LOG = logging.getLogger(__name__)
_QUEUE_MESSAGES = 8192  # of up to 1 KiB of hashes: what a flood says until the thread below has its turn
_SHORT_BYTES, _LONG_BYTES = 1024, 16 << 20  # longer ones have so much, together
_BATCH_MESSAGES, _LONG_BATCH_MESSAGES = 1024, 16  # encoded in one go, under Python's lock: about 0.1 ms
_TIMED_MESSAGES, _TIMED_EACH = 64, 16  # of those that wait
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = getattr(fcntl, "F_SETPIPE_SZ", 1031)
_LOOK_SECONDS, _FLUSH_SECONDS = 0.05, 1.0
_END_SECONDS = 20.0
_MOST_SIZES = 8  # of blocks; a trace has one
_MOST_OPEN = 4096  # prompts that come in several messages
_MOST_NAMES = 1 << 18  # of one prompt, and of all that have not come whole
_SIZE = struct.Struct("<Q")  # of the batch behind it
_FLUSH = _SIZE.pack(0)  # an empty one: what came before is to be in the file
_Said: TypeAlias = tuple[float, int, int, str, Looked]
"""When (0: with the one before), client, block tokens, tenant, and the message as it came."""
_decode = msgspec.msgpack.Decoder(list[_Said]).decode


class DaemonRecording:
    """`looked`: any thread, never waits. `close` once.

    A session pays for each request, so it only keeps what is there already and, where many wait, does not even look at
    the clock. The thread has whole batches encoded and written, by one call each.
    """

    def __init__(self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        command = [sys.executable, "-m", "kvstore.daemon.recording"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, bufsize=0, env=dict(environ), start_new_session=True
            )
        except OSError as error:
            raise ConfigError(
                f"{FILE_VARIABLE}: the process that writes cannot be started ({error.strerror})"
            ) from error
        assert self._process.stdin is not None
        with suppress(OSError):  # a user's share of these may be used up
            fcntl.fcntl(self._process.stdin, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._clock = clock
        self._waiting: list[_Said] = []  # only the thread below takes away, from the front
        self._most = _QUEUE_MESSAGES  # 0: nobody writes any more
        self._long_bytes, self._long_lock = 0, threading.Lock()
        self._encoder, self._batch = msgspec.msgpack.Encoder(), bytearray()
        self.dropped_messages = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-trace", daemon=True)
        self._thread.start()

    def looked(self, client: int, form: Form, message: Looked) -> None:
        """What a client says of a lookup. tokens 0: it does not see the whole prompt, so that is no request."""
        if not message.tokens:
            return
        waiting = self._waiting
        count = len(waiting)
        if count >= self._most or ((length := len(message.hashes)) > _SHORT_BYTES and not self._has_room(length)):
            self.dropped_messages += 1
            return
        when = self._clock() if count < _TIMED_MESSAGES or not count % _TIMED_EACH else 0.0
        waiting.append((when, client, form.block_tokens, form.tenant, message))

    def _has_room(self, length: int) -> bool:
        with self._long_lock:
            if self._long_bytes + length > _LONG_BYTES:
                return False
            self._long_bytes += length
            return True

    def _run(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        flushed, is_flushed = self._clock(), True
        try:
            while not self._closing.wait(_LOOK_SECONDS):
                if self._waiting:
                    self._pass_on(pipe)
                    is_flushed = False
                if not is_flushed and self._clock() - flushed > _FLUSH_SECONDS:
                    _write_all(pipe, _FLUSH)
                    flushed, is_flushed = self._clock(), True
            self._pass_on(pipe)
        except OSError:
            self._most = 0
            self.dropped_messages += len(self._waiting)
            self._waiting.clear()
            _LOG.error("the process that writes the trace has ended; nothing more is recorded")
        with suppress(OSError):
            pipe.close()

    def _pass_on(self, pipe: IO[bytes]) -> None:
        """All that waits. It stays in the list until it is written, so that the list's bound is that of everything."""
        waiting, batch = self._waiting, self._batch
        while waiting:
            taken = waiting[: _LONG_BATCH_MESSAGES if self._long_bytes else _BATCH_MESSAGES]
            self._encoder.encode_into(taken, batch, _SIZE.size)
            _SIZE.pack_into(batch, 0, len(batch) - _SIZE.size)
            _write_all(pipe, batch)
            del waiting[: len(taken)]
            if self._long_bytes:
                with self._long_lock:
                    sizes = [len(message.hashes) for *_, message in taken]
                    self._long_bytes -= sum(size for size in sizes if size > _SHORT_BYTES)

    def close(self) -> None:
        """What was said is written. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(_END_SECONDS)
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.dropped_messages:
            _LOG.warning("the trace lacks %s messages that could not be written", self.dropped_messages)


def _write_all(pipe: IO[bytes], batch: bytes | bytearray) -> None:
    written = pipe.write(batch)
    while written < len(batch):  # a signal came between
        written += pipe.write(memoryview(batch)[written:])


def from_environment(environ: Mapping[str, str]) -> DaemonRecording | None:
    """What `kvstore record` asked for, or None."""
    return DaemonRecording(environ) if environ.get(FILE_VARIABLE) else None


class Prompts:
    """Puts the messages of each prompt together and writes a line; a file for each size of blocks. One thread."""

    def __init__(self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        self._environ, self._clock = environ, clock
        self._open: dict[int, list[bytes]] = {}  # by client: names so far
        self._open_names = 0
        self._recorders: dict[int, TraceRecorder | None] = {}
        self._when = clock()
        self.lost_requests = 0

    def add(self, when: float, client: int, block_tokens: int, tenant: str, message: Looked) -> None:
        """One message, as it lay in the queue. when 0: with the one before."""
        first, tokens, hashes = message.first, message.tokens, message.hashes
        when = self._when = when or self._when
        names = self._open.pop(client, [])
        self._open_names -= len(names)
        if names and first == 0:
            self.lost_requests += 1  # the rest of an earlier one never came
        if first != len(names) and first:
            self.lost_requests += 1
            return
        names = names[:first] + [hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES)]
        if len(names) < tokens // block_tokens:
            self._open[client] = names
            self._open_names += len(names)
            while len(self._open) > _MOST_OPEN or self._open_names > _MOST_NAMES:
                self._open_names -= len(self._open.pop(next(iter(self._open))))
                self.lost_requests += 1
        elif (recorder := self._recorder(block_tokens)) is not None:
            recorder.record(
                EndedRequest(
                    token_ids=range(tokens),
                    output_tokens=0,
                    age_seconds=self._clock() - when,
                    names=names[: tokens // block_tokens],
                    tenant=tenant or None,
                )
            )

    def _recorder(self, block_tokens: int) -> TraceRecorder | None:
        if block_tokens not in self._recorders and len(self._recorders) < _MOST_SIZES:
            self._recorders[block_tokens] = TraceRecorder.from_environment(b"", block_tokens, environ=self._environ)
        found = self._recorders.get(block_tokens)
        self.lost_requests += found is None
        return found

    def flush(self) -> None:
        for one in self._recorders.values():
            if one is not None:
                one.flush()

    def close(self) -> None:
        """Idempotent."""
        for one in self._recorders.values():
            if one is not None:
                one.close()
        if self.lost_requests:
            print(f"kvstore record: {self.lost_requests} requests came in part and are left out", file=sys.stderr)


def main() -> int:
    """Writes what comes on standard input until that ends. The daemon stops this; signals to its group do not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    prompts, pipe = Prompts(os.environ), sys.stdin.buffer
    try:
        while len(size := pipe.read(_SIZE.size)) == _SIZE.size:
            if size == _FLUSH:
                prompts.flush()
                continue
            (length,) = _SIZE.unpack(size)
            if len(batch := pipe.read(length)) < length:
                break  # the daemon was killed
            for one in _decode(batch):
                prompts.add(*one)
    except ConfigError as error:
        print(f"kvstore record: {error}", file=sys.stderr)
        return 1
    finally:
        prompts.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
