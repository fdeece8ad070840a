"""The engine's end of the socket: one connection, its forms and mappings, found again when it is lost.

A call sends one message and waits for its answer, at most `timeout_seconds`; anything unexpected ends the connection,
and until a thread of this object has made a new one every call raises LinkDownError at once. That thread also hears
when the daemon goes, and returns what the daemon asks for. After a fork the child has a link that is down and makes its
own connection; it inherits neither socket nor mappings.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import msgspec

from allocator.errors import TierError
from kvstore.daemon import protocol
from kvstore.daemon.epochs import follower
from kvstore.daemon.greeting import LinkDownError, RefusedByDaemonError, cause_name, greeted
from kvstore.daemon.segments import abandon, map_for_reading, map_for_writing
from kvstore.frame.layout import FrameSpec
from kvstore.tier import ByteRow

_PING_SECONDS = 0.1
_RETRY_SECONDS = (0.02, 0.25)  # first and longest pause between attempts
_PATIENCE_SECONDS = 1.0  # of an attempt for which nobody waits: longer than a crowd at the door can take
_Answer = TypeVar("_Answer", bound=protocol.Answer)
_links: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """See the module. `counts`: by cause, since start."""

    def __init__(self, path: str, name: str, timeout_seconds: float) -> None:
        self.path, self.name = path, name
        self.timeout_seconds = timeout_seconds
        self.counts: Counter[str] = Counter()
        self.used_bytes = self.capacity_bytes = 0
        self.checks, self.lease_seconds = True, 0.0  # as the daemon says
        self.on_up: Callable[[], None] | None = None
        self.known_epoch = 0  # the highest that this end has heard of, here or elsewhere
        self._closed = False
        self._reset()
        self._connect_quietly(timeout_seconds)
        self._start_thread()
        _links.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._sock: socket.socket | None = None
        self._seq = 0
        self.boot = b""
        self.session = 0  # grows with every connection: what belongs to an older one is void
        self._forms: dict[tuple[object, ...], int] = {}
        self._readable: dict[int, ByteRow] = {}
        self._writable: dict[int, ByteRow] = {}
        self._writes: Counter[int] = Counter()  # segments with writes under way
        self._token = b""
        self._page: ByteRow | None = None
        self._read_page: Callable[[], tuple[int, bool]] | None = None
        self._cut_off: list[tuple[bytes, list[weakref.ref[ByteRow]]]] = []  # connections and what they had writable
        self._tell_tales: list[int] = []
        self._buffer = memoryview(bytearray(protocol.LONGEST_BYTES + 1))
        self._wake = threading.Event()

    @property
    def is_up(self) -> bool:
        return self._sock is not None

    def close(self) -> None:
        """Let everything go. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            sock = self._sock
            if sock is not None:
                self._forget_mappings()
                try:
                    self._seq += 1
                    sock.send(protocol.encode(protocol.Goodbye(self._seq)))
                except OSError:
                    self.counts["lost"] += 1
            self._drop(None)
        self._wake.set()
        if self._thread is not threading.current_thread():
            self._thread.join(self.timeout_seconds)  # an attempt may take longer, and ends by itself

    def epoch(self) -> int | None:
        """As the daemon says at this moment, or last said while there is none. None while it cannot say for sure."""
        read = self._read_page
        if read is None:
            return self.known_epoch
        epoch, is_sure = read()
        if epoch > self.known_epoch:
            self.known_epoch = epoch
        return self.known_epoch if is_sure else None

    # calls -----------------------------------------------------------------------------------------------------------

    def call(self, make: Callable[[int], protocol.Request], expected: type[_Answer]) -> _Answer:
        """One request, one answer. LinkDownError, or RefusedByDaemonError."""
        with self._lock:
            return self._call(make, expected, self._receive)

    def call_ahead(
        self,
        makes: Iterator[Callable[[int], protocol.Request]],
        expected: type[_Answer],
        goes_on: Callable[[_Answer], bool],
    ) -> list[_Answer]:
        """The same of some requests, each sent before the answer to the one before it is there, until one's answer
        says that it ends here. The answers up to then, in order."""
        waiting, answers, goes_further = deque[int](), list[_Answer](), True
        with self._lock:
            try:
                while goes_further:
                    while len(waiting) < 2 and (make := next(makes, None)) is not None:
                        waiting.append(self._send(make))
                    if not waiting:
                        break
                    answers.append(self._answer(waiting.popleft(), expected, self._receive))
                    goes_further = goes_on(answers[-1])
            finally:  # answers that nobody wants would stand before those to come
                while waiting and self._sock is not None:
                    with suppress(RefusedByDaemonError, LinkDownError):
                        self._answer(waiting.popleft(), expected, self._receive)
        return answers

    def tell(self, make: Callable[[int], protocol.Request]) -> None:
        """A request without an answer. Nothing happens when the link is down."""
        with self._lock:
            if self._sock is None:
                return
            try:
                self._send(make)
            except LinkDownError:
                return

    def form(self, spec: FrameSpec, tenant: str) -> int:
        """The number of this form on this connection, named when it is new."""
        family = (spec.key.family, tenant)
        number = self._forms.get(family)
        if number is not None:
            return number
        with self._lock:
            number = len(self._forms)
            self.call(form_message(number, spec, tenant), protocol.Count)
            self._forms[family] = number
            return number

    def _call(
        self,
        make: Callable[[int], protocol.Request],
        expected: type[_Answer],
        receive: Callable[[], protocol.AnyAnswer],
    ) -> _Answer:
        return self._answer(self._send(make), expected, receive)

    def _answer(self, seq: int, expected: type[_Answer], receive: Callable[[], protocol.AnyAnswer]) -> _Answer:
        while True:
            answer = receive()
            if answer.seq == seq and isinstance(answer, expected):
                return answer
            if isinstance(answer, protocol.Refused):
                self.counts[f"refused_{cause_name(answer.cause)}"] += 1
                if answer.seq == seq:
                    raise RefusedByDaemonError(answer)
                if answer.seq == 0:
                    self._drop("refused")
                    raise LinkDownError
                continue  # of a message that has no other answer
            self._drop("unexpected_answer")
            raise LinkDownError

    def _send(self, make: Callable[[int], protocol.Request]) -> int:
        sock = self._sock
        if sock is None:
            raise LinkDownError
        self._seq += 1
        try:
            sock.send(protocol.encode(make(self._seq)))
        except OSError as error:
            self._drop("timeout" if isinstance(error, BlockingIOError) else "lost")
            raise LinkDownError from error
        return self._seq

    def _receive(self) -> protocol.AnyAnswer:
        sock = self._sock
        if sock is None:
            raise LinkDownError
        try:
            length = sock.recv_into(self._buffer)
            if not length:
                raise ConnectionResetError
            answer: protocol.AnyAnswer = protocol.decode_answer(self._buffer[:length])
            return answer
        except (OSError, msgspec.DecodeError) as error:
            self._drop("timeout" if isinstance(error, BlockingIOError) else "lost")
            raise LinkDownError from error

    # shared memory ---------------------------------------------------------------------------------------------------

    def memory(self, numbers: Sequence[int], *, writable: bool) -> dict[int, ByteRow]:
        """The mappings of these segments, made when they are new."""
        with self._lock:
            known = self._writable if writable else self._readable
            missing = [number for number in dict.fromkeys(numbers) if number not in known]
            for at in range(0, len(missing), protocol.MOST_FDS):
                self._map(missing[at : at + protocol.MOST_FDS], writable)
            return {number: known[number] for number in dict.fromkeys(numbers)}

    def is_unsure(self, since_seconds: float, session: int) -> bool:
        """Whether what was read since may have been overwritten meanwhile, and no checksum would have shown it."""
        is_late = time.monotonic() - since_seconds > self.lease_seconds or session != self.session
        self.counts["lease_ended"] += is_late and not self.checks
        return is_late and not self.checks

    def _map(self, numbers: list[int], writable: bool) -> None:
        received: list[int] = []

        def receive() -> protocol.AnyAnswer:
            assert self._sock is not None
            try:
                message, descriptors, _, _ = socket.recv_fds(
                    self._sock, protocol.LONGEST_BYTES, protocol.MOST_FDS, socket.MSG_CMSG_CLOEXEC
                )
                received.extend(descriptors)
                if not message:
                    raise ConnectionResetError
                answer: protocol.AnyAnswer = protocol.decode_answer(message)
                return answer
            except (OSError, msgspec.DecodeError) as error:
                self._drop("lost")
                raise LinkDownError from error

        try:
            answer = self._call(lambda seq: protocol.Map(seq, numbers, writable), protocol.Segments, receive)
            if len(answer.sizes) != len(numbers) or len(received) > len(numbers):
                self._drop("unexpected_answer")
                raise LinkDownError
            if len(received) < len(numbers):  # this process may have no more
                raise OSError(errno.EMFILE, "descriptors are missing")
            make = map_for_writing if writable else map_for_reading
            known = self._writable if writable else self._readable
            for number, descriptor, size in zip(numbers, received, answer.sizes, strict=True):
                known[number] = make(descriptor, size)
        except OSError as error:  # a shortage here: the connection is as good as it was
            self.counts["map_failed"] += 1
            raise LinkDownError from error
        except TierError as error:
            self._drop("map_failed")
            raise LinkDownError from error
        finally:
            for descriptor in received:
                os.close(descriptor)

    def begin_writes(self, numbers: Sequence[int]) -> None:
        """These segments are not returned until end_writes."""
        with self._lock:
            self._writes.update(numbers)

    def end_writes(self, numbers: Sequence[int]) -> None:
        with self._lock:
            self._writes.subtract(numbers)

    def _forget_mappings(self) -> None:
        self._readable.clear()
        self._writable.clear()

    # the thread ------------------------------------------------------------------------------------------------------

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._keep, name="kvstore-link", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        pause, wake = _RETRY_SECONDS[0], self._wake
        while not self._closed:
            sock = self._sock
            if sock is None:
                wake.wait(pause)
                wake.clear()
                if not self._closed:
                    is_up = self._connect_quietly(max(_PATIENCE_SECONDS, self.timeout_seconds))
                    pause = _RETRY_SECONDS[0] if is_up else min(_RETRY_SECONDS[1], 1.5 * pause)
                continue
            if _has_hung_up(sock, self._tell_tales, _PING_SECONDS):
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)  # who waits for an answer holds the lock
                with self._lock:
                    if self._sock is sock:
                        self._drop("lost")
                continue
            try:
                self._ping()
            except (LinkDownError, RefusedByDaemonError):
                continue

    def _ping(self) -> None:
        with self._lock:
            pong = self.call(protocol.Ping, protocol.Pong)
            self.used_bytes, self.capacity_bytes = pong.used_bytes, pong.capacity_bytes
            live = set(pong.live)
            for number in [one for one in self._readable if one not in live]:
                del self._readable[number]
            self._disown()
            self._tell_epoch()
            back = [number for number in pong.recalled if self._writes[number] <= 0]
            for number in back:
                self._writable.pop(number, None)
            if back:
                self.counts["segments_returned"] += len(back)
                self.tell(lambda seq: protocol.Return(seq, back))

    def _disown(self) -> None:
        """Connections that were cut off, by a timeout say, come to their end at the daemon once nothing is mapped."""
        waiting, self._cut_off = self._cut_off, []
        for place, (token, memories) in enumerate(waiting):
            try:
                is_unmapped = all(memory() is None for memory in memories)
                request = partial(protocol.Disown, token=token)
                if not (is_unmapped and self.call(request, protocol.Count).count):
                    self._cut_off.append((token, memories))
            except LinkDownError:
                self._cut_off += waiting[place:]
                raise

    def _tell_epoch(self) -> None:
        """The daemon lags when it has begun anew, or when the epoch was raised in a tier that only this process has."""
        read = self._read_page
        if read is not None and read()[0] < self.known_epoch:
            self.call(partial(protocol.Epoch, least=self.known_epoch, rising=False), protocol.Count)

    def _connect_quietly(self, patience_seconds: float) -> bool:
        """One attempt; nobody waits for it but this object's thread, and whoever made the link."""
        try:
            self._connect(patience_seconds)
        except (OSError, TierError, LinkDownError, RefusedByDaemonError, msgspec.DecodeError):
            self.counts["connect_failed"] += 1
            return False
        if self.on_up is not None:
            self.on_up()
        return True

    def _connect(self, patience_seconds: float) -> None:
        def on_refused(cause: str) -> None:
            self.counts[f"refused_{cause}"] += 1

        sock, answer, page, tell_tales = greeted(
            self.path, self.name, self.timeout_seconds, on_refused, patience_seconds
        )
        with self._lock:
            if self._closed:
                sock.close()
                for descriptor in tell_tales:
                    os.close(descriptor)
                return
            self._tell_tales = tell_tales
            self._forms.clear()
            self._forget_mappings()
            self._writes.clear()
            if self.boot and self.boot != answer.boot:
                self.counts["daemon_restarts"] += 1  # a daemon that took over waits to hear what is unmapped
            self._token = answer.token
            self.boot, self.capacity_bytes = answer.boot, answer.capacity_bytes
            self.checks, self.lease_seconds = answer.checksums, answer.lease_seconds
            self._page, self._read_page = page, follower(page.data)
            self._seq = 1
            self.session += 1
            self.counts["connected"] += 1
            self._sock = sock

    def _drop(self, cause: str | None) -> None:
        """The connection is over, and its mappings go once nobody copies there any more."""
        self.epoch()
        self._page = self._read_page = None
        sock, self._sock = self._sock, None
        if cause is not None and sock is not None:
            self.counts[f"link_{cause}"] += 1
            self._cut_off.append((self._token, [weakref.ref(memory) for memory in self._writable.values()]))
        self._forms.clear()
        if sock is not None:
            sock.close()
        self._close_tell_tales()
        self._forget_mappings()
        self._wake.set()

    def _close_tell_tales(self) -> None:
        held, self._tell_tales = self._tell_tales, []
        for descriptor in held:
            os.close(descriptor)

    def _after_fork(self) -> None:
        """In the child: the connection, its thread and its mappings are the parent's. None is touched or unmapped."""
        sock = self._sock
        if sock is not None:
            sock.close()
        self._close_tell_tales()
        pages = () if self._page is None else (self._page,)
        for memory in (*self._readable.values(), *self._writable.values(), *pages):
            abandon(memory)
        self._reset()
        if not self._closed:
            self._start_thread()
            self._wake.set()


def form_message(number: int, spec: FrameSpec, tenant: str) -> Callable[[int], protocol.Form]:
    """What names a form on a connection."""
    key = spec.key
    fields = (key.root, key.group, key.codec, key.exact, key.heads, key.layers, key.parameters)
    dims = (spec.block_tokens, spec.key_dim, spec.value_dim, spec.dtype)
    return lambda seq: protocol.Form(seq, number, *fields, *dims, tenant)


def _has_hung_up(sock: socket.socket, tell_tales: Sequence[int], seconds: float) -> bool:
    """Whether the other side is gone; waits for that at most so long."""
    poller = select.poll()
    try:
        poller.register(sock, select.POLLRDHUP)
        for descriptor in tell_tales:
            poller.register(descriptor, 0)  # hanging up is all that it can do
    except (OSError, ValueError):  # closed meanwhile, by a call that failed
        time.sleep(0.001)
        return False
    return any(not event & select.POLLNVAL for _, event in poller.poll(int(seconds * 1000)))


def _fork_links() -> None:
    for link in list(_links):
        link._after_fork()


os.register_at_fork(after_in_child=_fork_links)
