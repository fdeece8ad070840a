"""One connection: messages in, answers out, on a thread of its own. What it holds ends with it.

A message that does not decode ends the connection, and so does a fatal refusal; every refusal is counted by cause. A
client that does not read its answers blocks only this thread, and not for longer than the send timeout.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from allocator.errors import TierError, UsageError
from kvstore.copy_key import CopyKey
from kvstore.daemon import dropping, outcomes, protocol
from kvstore.daemon.core import Core, RefusedError
from kvstore.daemon.forms import Form
from kvstore.daemon.protocol import Cause, Place, split_hashes

if TYPE_CHECKING:
    from kvstore.daemon.holder import Holder
    from kvstore.daemon.pace import Pace

HELLO_SECONDS = 1.0
SEND_SECONDS = 1.0
_BURST_SECONDS = 0.25  # of the rate that one connection may take at once
_LONGEST_WAIT_SECONDS = 0.1  # well within what clients wait for an answer
_REFUSED_DEBT_SECONDS, _MOST_DEBT_SECONDS = 1.0, 2.0  # of the rate
_LEAST_RATE = 200
_REQUEST_SECONDS = 5e-6  # of processor time: what takes longer counts as so many requests
_REFUSAL_REQUESTS = 20  # counts as so many: who is refused should ask less often
_MISS_REQUESTS = 2  # the same for each copy asked for that is not there: who looks up first asks for few of these
_DYING_SECONDS = 0.02  # a process closes its sockets a little before it is dead
_SHORT_BYTES = 1024  # a lookup up to here counts as one, in shared memory alone


def set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """Kernel timeouts: no poll before each call, as Python's own would make."""
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))


class Session:
    """See the module. uid, pid: the peer's, from the kernel; pace: how much it may ask."""

    def __init__(self, core: Core, sock: socket.socket, uid: int, pid: int, pid_fd: int, pace: Pace) -> None:
        self.uid, self.pid = uid, pid
        self.request_count = 0
        self.refused_count = 0
        self.was_cut_off = False  # for what no client of ours sends
        self._costs = 0.0  # in requests, beyond one each
        self.holder: Holder | None = None
        self._core = core
        self._sock = sock
        self._pid_fd = pid_fd
        self._pace = pace
        self._forms: dict[int, Form] = {}
        self._form_bytes = 0
        self._said_goodbye = False
        self._tokens = 1.0
        self._refilled = time.monotonic()

    @property
    def spent(self) -> float:
        """What was asked, in requests of usual length."""
        return self.request_count + self._costs

    def serve(self) -> None:
        """Until the connection ends. Never raises for what a client does."""
        sock = self._sock
        try:
            set_timeout(sock, socket.SO_RCVTIMEO, HELLO_SECONDS)
            set_timeout(sock, socket.SO_SNDTIMEO, SEND_SECONDS)
            buffer = memoryview(bytearray(protocol.LONGEST_BYTES + 1))
            if self._hello(sock.recv_into(buffer), buffer):
                set_timeout(sock, socket.SO_RCVTIMEO, 0)
                while self._next(sock.recv_into(buffer), buffer):
                    pass
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                self._count("refused_slow")
        finally:
            self.end()

    def interrupt(self) -> None:
        """End it from another thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    # messages --------------------------------------------------------------------------------------------------------

    def _hello(self, length: int, buffer: memoryview) -> bool:
        core = self._core
        message = self._decoded(length, buffer)
        if message is None:
            return False
        if not isinstance(message, protocol.Hello) or message.magic != protocol.MAGIC:
            self._refuse(message.seq, RefusedError(Cause.EARLY, "expected Hello first", is_fatal=True))
            return False
        if message.version != protocol.VERSION:
            text = f"version {message.version}; expected {protocol.VERSION}"
            self._refuse(message.seq, RefusedError(Cause.VERSION, text, is_fatal=True))
            return False
        self.holder = core.join(message.client, self.uid, self.pid, self._pid_fd)
        self._pid_fd = -1
        settings = core.settings
        capacity = core.pool.limit * settings.segment_bytes
        times = (settings.lease_seconds, settings.write_lease_seconds)
        domain = settings.domain_of(self.uid)
        more = (self.holder.token, settings.checks(domain))
        welcome = protocol.Welcome(message.seq, protocol.VERSION, core.boot, capacity, *times, *more)
        page = core.epochs.of(domain).descriptor
        socket.send_fds(self._sock, [protocol.encode(welcome)], [page, *core.tell_tales.read_fds])
        return True

    def _next(self, length: int, buffer: memoryview) -> bool:
        """One message; False ends the connection. What a long one costs, to be read and answered too, counts against
        the rate, so that few of these are no cheaper than many short ones."""
        if length <= _SHORT_BYTES:
            return self._one(length, buffer)
        started = time.thread_time()
        try:
            return self._one(length, buffer)
        finally:
            self._charge((time.thread_time() - started) / _REQUEST_SECONDS)

    def _one(self, length: int, buffer: memoryview) -> bool:
        message = self._decoded(length, buffer)
        if message is None:
            return False
        self.request_count += 1
        self._tokens -= 1
        if self._tokens < 0 and not self._has_time(message):
            self._refuse(message.seq, RefusedError(Cause.PACE, "asked for more than its part, for long"))
            return True
        handler = _HANDLERS.get(type(message))
        if handler is None:
            if isinstance(message, protocol.Goodbye):
                self._said_goodbye = True
            else:
                self._refuse(message.seq, RefusedError(Cause.EARLY, "a second Hello", is_fatal=True))
            return False
        try:
            is_charged = length > _SHORT_BYTES or (isinstance(message, protocol.Run) and not self._core.lowers)
            answer = handler(self, message) if is_charged else self._charged(handler, message)
        except RefusedError as refused:
            self._refuse(message.seq, refused)
            return not refused.is_fatal
        except (TierError, UsageError) as error:
            self._refuse(message.seq, RefusedError(Cause.LOWER, str(error)))
            return True
        if answer is not None:
            self._send(answer)
        return True

    def _charged(self, handler: _Handler, message: protocol.Request) -> Any:
        """The same for a short one. A lookup has been paid for as a request, but for what tiers below make of it."""
        started = time.thread_time()
        try:
            return handler(self, message)
        finally:
            requests = (time.thread_time() - started) / _REQUEST_SECONDS
            self._charge(max(0.0, requests - 1) if isinstance(message, protocol.Run) else requests)

    def _charge(self, requests: float) -> None:
        self._costs += requests
        self._tokens -= requests

    def _decoded(self, length: int, buffer: memoryview) -> Any:
        """The message, or None when there is none (the end) or it cannot be one (counted)."""
        if length == 0:
            return None
        if length > protocol.LONGEST_BYTES:
            self._refuse(
                0, RefusedError(Cause.OVERSIZED, f"expected at most {protocol.LONGEST_BYTES} bytes", is_fatal=True)
            )
            return None
        try:
            return protocol.decode_request(buffer[:length])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(0, RefusedError(Cause.GARBAGE, str(error)[:200], is_fatal=True))
            return None

    def _send(self, answer: protocol.Answer) -> None:
        self._sock.send(protocol.encode(answer))

    def _refuse(self, seq: int, refused: RefusedError) -> None:
        self.refused_count += 1
        if refused.cause not in (Cause.LOWER, Cause.PACE):  # nobody's fault up here; has waited for it
            self._charge(_REFUSAL_REQUESTS)
        self.was_cut_off |= refused.is_fatal
        self._count(f"refused_{refused.cause.name.lower()}")
        self._send(protocol.Refused(seq, refused.cause, refused.message))

    def _count(self, cause: str) -> None:
        with self._core.lock:
            self._core.counts[cause] += 1

    def _has_time(self, message: protocol.Request) -> bool:
        """This connection's part of the request rate is used up: its next request waits a little; one that has asked
        for much more, and asks on, is told so."""
        now = time.monotonic()
        rate, may_borrow = self._pace.rate(self)
        rate = max(_LEAST_RATE, rate)
        gained = (now - self._refilled) * rate
        self._tokens = max(-rate * _MOST_DEBT_SECONDS, min(rate * _BURST_SECONDS, self._tokens + gained))
        self._refilled = now
        if self._tokens < 0 and may_borrow:
            self._tokens += self._pace.borrow(-self._tokens)
        if self._tokens >= 0:
            return True
        self._count("throttled")
        owed_seconds = -self._tokens / rate
        time.sleep(min(owed_seconds + 0.002, _LONGEST_WAIT_SECONDS))
        return owed_seconds < _REFUSED_DEBT_SECONDS or type(message) not in _ASKING

    def end(self) -> None:
        """Nothing more is served."""
        try:
            if self.holder is not None:
                holder = self.holder
                is_over = self._said_goodbye or not holder.segments
                self._core.leave(holder, is_dead=is_over or has_died(holder.pid_fd, _DYING_SECONDS))
        finally:
            close_heard(self._sock)
            if self._pid_fd >= 0:
                os.close(self._pid_fd)

    # handlers --------------------------------------------------------------------------------------------------------

    def _named(self, number: int) -> tuple[Holder, Form]:
        form, holder = self._forms.get(number), self.holder
        if form is None or holder is None:
            raise RefusedError(Cause.FORM, f"form {number} has not been named")
        return holder, form

    def _hashes(self, hashes: bytes) -> tuple[bytes, ...]:
        try:
            return split_hashes(hashes)
        except ValueError as error:
            raise RefusedError(Cause.GARBAGE, str(error), is_fatal=True) from None

    @property
    def _own(self) -> Holder:
        assert self.holder is not None
        return self.holder

    def _form(self, message: protocol.Form) -> protocol.Answer:
        self._form_bytes += len(message.parameters)
        is_over = len(self._forms) >= protocol.MOST_FORMS or self._form_bytes > protocol.MOST_FORM_BYTES
        if message.form in self._forms or is_over:
            raise RefusedError(Cause.FORM, f"form {message.form}: named before, or one too many")
        spans = (message.heads, message.layers)
        try:
            template = CopyKey(
                message.root, message.group, bytes(32), message.codec, message.exact, *spans, message.parameters
            )
            domain = self._core.settings.domain_of(self.uid)
            dims = (message.block_tokens, message.key_dim, message.value_dim, message.dtype)
            form = self._forms[message.form] = Form(template, *dims, message.tenant, domain)
            self._core.known_forms.learn(form)
        except UsageError as error:
            raise RefusedError(Cause.GARBAGE, str(error), is_fatal=True) from None
        return protocol.Count(message.seq, 0)

    def _run(self, message: protocol.Run) -> protocol.Answer:
        found, pending = self._core.run(*self._named(message.form), self._hashes(message.hashes))
        return protocol.Count(message.seq, found, pending)

    def _contains(self, message: protocol.Contains) -> protocol.Answer:
        flags = self._core.contains(*self._named(message.form), self._hashes(message.hashes))
        return protocol.Flags(message.seq, flags)

    def _acquire(self, message: protocol.Acquire) -> protocol.Answer:
        holder, form = self._named(message.form)
        lease, places = self._core.acquire(holder, form, self._hashes(message.hashes), message.payload_bytes)
        self._charge(_MISS_REQUESTS * places[:: protocol.PLACE.size].count(Place.MISS))
        return protocol.Places(message.seq, lease, places)

    def _release(self, message: protocol.Release) -> None:
        self._count_stale(self._core.release(self._own, message.leases))

    def _reserve(self, message: protocol.Reserve) -> protocol.Answer:
        hashes, parents = self._hashes(message.hashes), self._hashes(message.parents)
        places = self._core.reserve(*self._named(message.form), hashes, parents, message.frame_bytes)
        return protocol.Places(message.seq, 0, places)

    def _publish(self, message: protocol.Publish) -> protocol.Answer:
        return protocol.Flags(message.seq, self._core.publish(self._own, message.leases))

    def _abandon(self, message: protocol.Abandon) -> None:
        self._count_stale(self._core.abandon(self._own, message.leases))

    def _touch(self, message: protocol.Touch) -> None:
        self._core.touch(*self._named(message.form), self._hashes(message.hashes))

    def _delete(self, message: protocol.Delete) -> protocol.Answer:
        count = dropping.delete(self._core, *self._named(message.form), self._hashes(message.hashes))
        return protocol.Count(message.seq, count)

    def _clear(self, message: protocol.Clear) -> protocol.Answer:
        is_owner = self.uid == os.geteuid()
        roots = {form.template.root for form in self._forms.values()}
        count = dropping.clear(self._core, self._own.arena, roots, all_allowed=is_owner)
        return protocol.Count(message.seq, count)

    def _pin(self, message: protocol.Pin) -> protocol.Answer:
        flags = self._core.pin(*self._named(message.form), self._hashes(message.hashes))
        return protocol.Flags(message.seq, flags)

    def _unpin(self, message: protocol.Unpin) -> protocol.Answer:
        self._core.unpin(*self._named(message.form), self._hashes(message.hashes))
        return protocol.Count(message.seq, 0)

    def _suspect(self, message: protocol.Suspect) -> None:
        dropping.suspect(self._core, *self._named(message.form), self._hashes(message.hashes))

    def _map(self, message: protocol.Map) -> None:
        if _unread_bytes(self._sock) or len(set(message.segments)) < len(message.segments):
            raise RefusedError(Cause.SEGMENT, "expected each once, and that what was sent before has been read")
        sizes, descriptors = self._core.descriptors(self._own, message.segments, writable=message.writable)
        try:
            socket.send_fds(self._sock, [protocol.encode(protocol.Segments(message.seq, sizes))], descriptors)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            raise RefusedError(Cause.SEGMENT, "too many descriptors are on their way") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _return(self, message: protocol.Return) -> None:
        self._core.give_back(self._own, message.segments)

    def _ping(self, message: protocol.Ping) -> protocol.Answer:
        return protocol.Pong(message.seq, *self._core.news(self._own))

    def _disown(self, message: protocol.Disown) -> protocol.Answer:
        return protocol.Count(message.seq, int(self._core.disown(self._own, message.token)))

    def _speed(self, message: protocol.Speed) -> None:
        self._core.tally.told_speed(self._own, message.prefill_tokens_per_second)

    def _looked(self, message: protocol.Looked) -> None:
        holder, form = self._named(message.form)
        hashes, forms = self._hashes(message.hashes), [self._named(number)[1] for number in message.forms]
        if len(message.outcomes) != len(hashes) or max(message.outcomes, default=0) >= protocol.HERE + len(forms):
            raise RefusedError(Cause.GARBAGE, "outcomes: expected one a hash, and none beyond the forms", is_fatal=True)
        outcomes.note(self._core, holder, form, forms, message, hashes)

    def _reused(self, message: protocol.Reused) -> None:
        self._core.tally.reused(*self._named(message.form), message.blocks)

    def _epoch(self, message: protocol.Epoch) -> protocol.Answer:
        epoch = self._core.epochs.of(self._core.settings.domain_of(self.uid))
        return protocol.Count(message.seq, (epoch.rise if message.rising else epoch.at_least)(message.least))

    def _count_stale(self, count: int) -> None:
        if count:
            self.refused_count += count
            with self._core.lock:
                self._core.counts["refused_stale"] += count


_Handler: TypeAlias = Callable[[Session, Any], protocol.Answer | None]
_HANDLERS: dict[type[protocol.Request], _Handler] = {
    protocol.Form: Session._form,
    protocol.Run: Session._run,
    protocol.Contains: Session._contains,
    protocol.Acquire: Session._acquire,
    protocol.Release: Session._release,
    protocol.Reserve: Session._reserve,
    protocol.Publish: Session._publish,
    protocol.Abandon: Session._abandon,
    protocol.Touch: Session._touch,
    protocol.Delete: Session._delete,
    protocol.Clear: Session._clear,
    protocol.Pin: Session._pin,
    protocol.Unpin: Session._unpin,
    protocol.Suspect: Session._suspect,
    protocol.Map: Session._map,
    protocol.Return: Session._return,
    protocol.Ping: Session._ping,
    protocol.Disown: Session._disown,
    protocol.Looked: Session._looked,
    protocol.Reused: Session._reused,
    protocol.Speed: Session._speed,
    protocol.Epoch: Session._epoch,
}
"""Of the class: a session that held methods of its own would be a cycle, and wait for the collector."""
_ASKING = {
    *(protocol.Run, protocol.Contains, protocol.Acquire, protocol.Reserve),
    *(protocol.Touch, protocol.Delete, protocol.Pin, protocol.Suspect),
    *(protocol.Looked, protocol.Reused),
}
"""What may be refused to who asks too much: the rest gives something back."""


def _unread_bytes(sock: socket.socket) -> int:
    """What the peer has not read. Descriptors in it count against the daemon's user, who may have so many on their way
    in all: a client that let them lie would keep others from getting theirs."""
    return int.from_bytes(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


def has_died(pid_fd: int, wait_seconds: float = 0.0) -> bool:
    """Whether the process is gone; where it cannot be known (-1), its connection's end is taken for its own."""
    if pid_fd < 0:
        return True
    import select

    poller = select.poll()
    poller.register(pid_fd, select.POLLIN)
    return bool(poller.poll(1000 * wait_seconds))


def close_heard(sock: socket.socket) -> None:
    """Close so that what was sent last is still read: unread packets would make the kernel drop it."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
        while sock.recv(1, socket.MSG_DONTWAIT):
            pass
    except OSError:
        pass
    finally:
        sock.close()
