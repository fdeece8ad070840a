"""The daemon's recorder: a trace of its clients' requests (`kvstore record -- kvstore serve ...`).

Clients say once a request which blocks its prompt has (`Looked`). A session's thread only leaves that in a bounded
queue; a thread of its own passes it to a process of its own, which hides names and writes, since a prompt's 2,000
names would keep lookups from Python's lock for longer than they take. What there is no time for is dropped and counted.

`DaemonRecording` is the daemon's side, `Prompts` and `main` that process's. No torch.
"""

from __future__ import annotations

import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from typing import IO, TYPE_CHECKING

from allocator.errors import ConfigError
from kvstore.daemon.protocol import HASH_BYTES
from kvstore.trace_recorder import FILE_VARIABLE, EndedRequest, TraceRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.daemon.forms import Form
    from kvstore.daemon.protocol import Looked

_LOG = logging.getLogger(__name__)
_QUEUE_MESSAGES = 512  # of up to 32 KiB
_LOOK_SECONDS, _FLUSH_SECONDS = 0.05, 1.0
_END_SECONDS = 20.0
_MOST_SIZES = 8  # of blocks; a trace has one
_MOST_OPEN = 4096  # prompts that come in several messages
_MOST_NAMES = 1 << 18  # of one prompt, and of all that have not come whole
_HEAD = struct.Struct("<QdQQIHI")  # client, when, place, tokens, block tokens, tenant's bytes, hashes
_FLUSH = _HEAD.pack(0, 0.0, 0, 0, 0, 0, 0)  # of no prompt: what came before is to be in the file


def _packed(client: int, form: Form, message: Looked, now: float) -> bytes:
    tenant = form.tenant.encode()
    count = len(message.hashes) // HASH_BYTES
    head = _HEAD.pack(client, now, message.first, message.tokens, form.block_tokens, len(tenant), count)
    return head + tenant + message.hashes


class DaemonRecording:
    """`looked`: any thread, never waits. `close` once."""

    def __init__(self, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> None:
        command = [sys.executable, "-m", "kvstore.daemon.recording"]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=dict(environ), start_new_session=True)
        except OSError as error:
            raise ConfigError(
                f"{FILE_VARIABLE}: the process that writes cannot be started ({error.strerror})"
            ) from error
        self._clock = clock
        self._waiting: deque[tuple[int, Form, Looked, float]] = deque()
        self.dropped_messages = 0
        self._has_ended = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvstore-trace", daemon=True)
        self._thread.start()

    def looked(self, client: int, form: Form, message: Looked) -> None:
        """What a client says of a lookup. tokens 0: it does not see the whole prompt, so that is no request."""
        if not message.tokens:
            return
        if len(self._waiting) < _QUEUE_MESSAGES and not self._has_ended:
            self._waiting.append((client, form, message, self._clock()))
        else:
            self.dropped_messages += 1

    def _run(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        flushed = self._clock()
        try:
            while not self._closing.wait(_LOOK_SECONDS):
                self._pass_on(pipe)
                if self._clock() - flushed > _FLUSH_SECONDS:
                    pipe.write(_FLUSH)
                    pipe.flush()
                    flushed = self._clock()
            self._pass_on(pipe)
        except OSError:
            self._has_ended = True
            self.dropped_messages += len(self._waiting)
            self._waiting.clear()
            _LOG.error("the process that writes the trace has ended; nothing more is recorded")
        with suppress(OSError):
            pipe.close()

    def _pass_on(self, pipe: IO[bytes]) -> None:
        while self._waiting:
            pipe.write(_packed(*self._waiting.popleft()))
        pipe.flush()

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
        self.lost_requests = 0

    def add(self, fields: tuple[int, float, int, int, int, int, int], tenant: str, hashes: bytes) -> None:
        """One message, as `_packed` has put it."""
        client, when, first, tokens, block_tokens = fields[:5]
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
        while len(head := pipe.read(_HEAD.size)) == _HEAD.size:
            fields = _HEAD.unpack(head)
            tenant, hashes = pipe.read(fields[5]).decode(), pipe.read(fields[6] * HASH_BYTES)
            if head == _FLUSH:
                prompts.flush()
            else:
                prompts.add(fields, tenant, hashes)
    except ConfigError as error:
        print(f"kvstore record: {error}", file=sys.stderr)
        return 1
    finally:
        prompts.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
