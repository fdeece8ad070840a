"""RESP2 over a socket: values go straight from and into the caller's buffers. Knows sockets and bytes, no client.

One thread at a time. The reader takes every byte of every reply itself; whatever is out of order is a WireError, after
which the connection must be dropped: a reply that was not read would answer the next call.

Plain sockets are blocking with the kernel's own timeouts (SO_RCVTIMEO, SO_SNDTIMEO): one system call a chunk instead of
poll and read for each arrival. TLS sockets keep Python's timeout and have no sendmsg.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable, Sequence

from kvstore.page_pipe import LEAST_BYTES, PagePipe
from kvstore.redis_tier.protocol import (
    ASKING,
    InterruptedCallError,
    PutOrder,
    Reply,
    Sink,
    WireError,
    WireTimeoutError,
    bulk,
    encode,
    error_reply,
)
from kvstore.tier import Buffer, as_byte_row

_LINE_BYTES = 2048  # read ahead at most: what of it is payload is copied once more
_LONGEST_LINE_BYTES = 1024
_LONGEST_BULK_BYTES = 1 << 20  # of a reply that is not a value for a sink
_MOST_ELEMENTS = 1 << 16
_DEEPEST = 4
_MOST_SKIPPED_BYTES = 64 << 20  # of a small command's reply
_DRAIN_BYTES = 4 << 20  # more than this to skip: dropping the connection is cheaper
_MOST_BUFFERS = 1000  # of one sendmsg; the system's limit is 1,024
_AHEAD_BYTES = 4 << 20  # of values asked for and not read: the server holds as much, and never waits for us to ask
_SEND_BYTES = 256 << 10  # small values are sent together, large ones as soon as their checksum is known
_SLOWEST_BYTES_PER_SECOND = 16e6  # a batch may take the timeout and its bytes at this rate


class DirectWire:
    """See the module and Wire."""

    def __init__(
        self,
        sock: socket.socket,
        timeout_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        stopped: Callable[[], bool] | None = None,
    ) -> None:
        self._sock = sock
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self.stopped = stopped
        self._deadline = 0.0
        self._line = bytearray(_LINE_BYTES)
        self._view = memoryview(self._line)
        self._start = self._end = 0
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        if self._is_tls:
            sock.settimeout(timeout_seconds)
            self._wait_all = 0
        else:
            whole = int(timeout_seconds)
            limit = struct.pack("ll", whole, max(1000, int((timeout_seconds - whole) * 1e6)))
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._wait_all = socket.MSG_WAITALL
        self._pipe = None if self._is_tls else PagePipe.open_for(sock)

    @property
    def is_quiet(self) -> bool:
        """Nothing unread and not closed by the server: fit for the next call."""
        if self._start != self._end:
            return False
        try:
            if self._is_tls:
                self._sock.settimeout(0)
                try:
                    self._sock.recv(1)  # an SSL socket cannot peek; any byte is one too many
                finally:
                    self._sock.settimeout(self._timeout_seconds)
            else:
                self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Give up what belongs to the wire; the socket is its owner's."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None

    # batches ---------------------------------------------------------------------------------------------------------

    def put(self, items: Iterable[PutOrder], ttl_ms: int, asking: bool) -> list[Reply]:
        self._begin()
        end = b"\r\n" + bulk(b"PX") + bulk(b"%d" % ttl_ms)
        buffers: list[Buffer] = []
        count = unsent_bytes = 0
        for key, pieces, size in items:
            head = b"*5\r\n$3\r\nSET\r\n%b$%d\r\n" % (bulk(key), size)
            buffers.append(ASKING + head if asking else head)
            buffers += pieces
            buffers.append(end)
            self._deadline += size / _SLOWEST_BYTES_PER_SECOND
            count += 1
            unsent_bytes += size
            if unsent_bytes >= _SEND_BYTES or len(buffers) > _MOST_BUFFERS // 2:
                self._send(buffers[:-1])
                buffers, unsent_bytes = [end], 0
        self._send(buffers)
        return [self._answer(asking) for _ in range(count)]

    def get(self, items: Sequence[tuple[bytes, Sink]], ttl_ms: int, getex: bool, asking: bool) -> list[Reply]:
        ttl = b"%d" % ttl_ms
        before = ASKING if asking else b""
        if getex:
            head, end = before + b"*4\r\n" + bulk(b"GETEX"), bulk(b"PX") + bulk(ttl)
            sent = [b"%b%b%b" % (head, bulk(key), end) for key, _ in items]
        else:
            sent = [before + encode([b"GET", key]) + before + encode([b"PEXPIRE", key, ttl]) for key, _ in items]
        return self._values(sent, [sink for _, sink in items], asking, 0 if getex else 1)

    def get_parts(self, items: Sequence[tuple[bytes, tuple[int, int], Sink]], ttl_ms: int, asking: bool) -> list[Reply]:
        before = ASKING if asking else b""
        sent = [before + encode([b"GETRANGE", key, b"%d" % at, b"%d" % (stop - 1)]) for key, (at, stop), _ in items]
        if ttl_ms:
            sent = [
                one + before + encode([b"PEXPIRE", key, b"%d" % ttl_ms])
                for one, (key, _, _) in zip(sent, items, strict=True)
            ]
        return self._values(sent, [sink for _, _, sink in items], asking, 1 if ttl_ms else 0)

    def _values(self, sent: Sequence[bytes], sinks: Sequence[Sink], asking: bool, extra_replies: int) -> list[Reply]:
        """Send the commands, a few ahead, and take the value that each brings; `extra_replies` after it say nothing."""
        self._begin(sum([sink.size_bytes for sink in sinks]))
        replies: list[Reply] = []
        asked = under_way_bytes = 0
        for place, sink in enumerate(sinks):
            if under_way_bytes <= _AHEAD_BYTES // 2:
                start = asked
                while asked < len(sinks) and (asked == place or under_way_bytes < _AHEAD_BYTES):
                    under_way_bytes += sinks[asked].size_bytes
                    asked += 1
                if asked > start:
                    self._send([b"".join(sent[start:asked])])
            self._skip_asking(asking)
            replies.append(self._value(sink))
            for _ in range(extra_replies):
                self._answer(asking)
            under_way_bytes -= sink.size_bytes
        return replies

    def call(self, commands: Sequence[Sequence[bytes]], asking: bool = False) -> list[Reply]:
        self._begin()
        before = ASKING if asking else b""
        self._send([b"".join([before + encode(command) for command in commands])])
        return [self._answer(asking) for _ in commands]

    # sending ---------------------------------------------------------------------------------------------------------

    def _begin(self, byte_count: int = 0) -> None:
        self._deadline = self._clock() + self._timeout_seconds + byte_count / _SLOWEST_BYTES_PER_SECOND
        if self._start != self._end:
            raise WireError("out_of_step", "bytes that nobody asked for")

    def _check(self) -> None:
        if self.stopped is not None and self.stopped():
            raise InterruptedCallError
        if self._clock() > self._deadline:
            raise WireTimeoutError("timeout", "a batch took too long")

    def _send(self, buffers: Sequence[Buffer]) -> None:
        try:
            if self._is_tls:
                for one in buffers:
                    self._sock.sendall(one)
                return
            small: list[memoryview] = []
            for one in buffers:
                view = memoryview(one).cast("B")
                if self._pipe is not None and view.nbytes >= LEAST_BYTES:
                    self._send_views(small)
                    small = []
                    if self._pipe.send(as_byte_row(view)):
                        self._check()
                        continue
                    self.close()  # refused before anything was sent: from now on they are copied
                if view.nbytes:
                    small.append(view)
            self._send_views(small)
        except TimeoutError:
            raise WireTimeoutError("timeout", "sending") from None
        except BlockingIOError:
            raise WireTimeoutError("timeout", "sending") from None
        except OSError as error:
            raise WireError("connection_lost", str(error)) from None

    def _send_views(self, left: list[memoryview]) -> None:
        while left:
            sent = self._sock.sendmsg(left[:_MOST_BUFFERS])
            done = 0
            while done < len(left) and sent >= left[done].nbytes:
                sent -= left[done].nbytes
                done += 1
            left = left[done:]
            if left:
                if sent:
                    left[0] = left[0][sent:]
                self._check()

    # receiving -------------------------------------------------------------------------------------------------------

    def _receive(self, view: memoryview, flags: int) -> int:
        try:
            count = self._sock.recv_into(view, 0, flags)
        except (TimeoutError, BlockingIOError):
            raise WireTimeoutError("timeout", "receiving") from None
        except OSError as error:
            raise WireError("connection_lost", str(error)) from None
        if not count:
            raise WireError("connection_lost", "closed by the server")
        return count

    def _read_line(self, ahead_bytes: int = _LINE_BYTES) -> bytes:
        """ahead_bytes: how much to ask the socket for at once. What belongs to a payload should not be among it."""
        searched = self._start
        while True:
            at = self._line.find(b"\r\n", searched, self._end)
            if at >= 0:
                line = bytes(self._view[self._start : at])
                self._start = at + 2
                return line
            if self._end - self._start > _LONGEST_LINE_BYTES:
                raise WireError("out_of_step", "a line that does not end")
            self._check()
            if self._start:
                rest = bytes(self._view[self._start : self._end])
                self._view[: len(rest)] = rest
                self._start, self._end = 0, len(rest)
            searched = max(self._start, self._end - 1)
            self._end += self._receive(self._view[self._end : max(ahead_bytes, self._end + 1)], 0)

    def _fill(self, view: memoryview) -> None:
        size = view.nbytes
        at = min(size, self._end - self._start)
        if at:
            view[:at] = self._view[self._start : self._start + at]
            self._start += at
        while at < size:
            at += self._receive(view[at:], self._wait_all)
            if at < size:
                self._check()

    def _fill_to_end(self, view: memoryview) -> None:
        """The last of a value and the two bytes after it, in one call where possible."""
        size = view.nbytes
        if self._start != self._end or self._is_tls:
            at = min(size, self._end - self._start)
            self._fill(view[:at])
            view, size = view[at:], size - at
            if not size or self._is_tls or self._start != self._end:
                self._fill(view)
                self._end_of_bulk()
                return
        at, end = 0, bytearray(2)
        while at < size:
            try:
                at += self._sock.recvmsg_into([view[at:], end], 0, socket.MSG_WAITALL)[0] or self._closed()
            except BlockingIOError:
                raise WireTimeoutError("timeout", "receiving") from None
            except OSError as error:
                raise WireError("connection_lost", str(error)) from None
            if at < size:
                self._check()
        got = at - size
        if got < 2:
            self._fill(memoryview(end)[got:])
        if end != b"\r\n":
            raise WireError("out_of_step", "a value longer than announced")

    def _closed(self) -> int:
        raise WireError("connection_lost", "closed by the server")

    def _end_of_bulk(self) -> None:
        if self._end - self._start >= 2 and self._line[self._start : self._start + 2] == b"\r\n":
            self._start += 2
        elif self._read_line(2) != b"":
            raise WireError("out_of_step", "a value longer than announced")

    def _value(self, sink: Sink) -> Reply:
        line = self._read_line(3 + len(str(sink.size_bytes)) + sink.head_bytes)
        if line[:1] != b"$":
            return self._small(line, 0)
        length = _number(line)
        if length < 0:
            return None
        left = length
        ended = False
        for view in sink.targets(length):
            if view.nbytes > left:
                raise WireError("out_of_step", "a sink wants more than there is")
            left -= view.nbytes
            if left:
                self._fill(view)
            else:
                self._fill_to_end(view)
                ended = True
            if self._clock() > self._deadline or (self.stopped is not None and self.stopped()):
                self._check()
        if not ended:
            self._drain(left)
            self._end_of_bulk()
        return length

    def _drain(self, left: int, limit: int = _DRAIN_BYTES) -> None:
        if left > limit:
            raise WireError("value_refused", f"{left} bytes that nobody wants")
        scratch = memoryview(bytearray(min(left, 1 << 16)))
        while left:
            part = scratch[: min(left, scratch.nbytes)]
            self._fill(part)
            left -= part.nbytes
            self._check()

    def _skip_asking(self, asking: bool) -> None:
        if asking:
            self._small(self._read_line(), 0)  # an error here is an error of the command after it, too

    def _answer(self, asking: bool) -> Reply:
        self._skip_asking(asking)
        return self._small(self._read_line(), 0)

    def _small(self, line: bytes, depth: int) -> Reply:
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return error_reply(line[1:].decode("utf-8", "replace"))
        if kind == b":":
            return _number(line)
        if kind == b"$":
            length = _number(line)
            if length < 0:
                return None
            if length > _LONGEST_BULK_BYTES:  # a name that somebody else made: nobody wants it, the rest goes on
                self._drain(length, _MOST_SKIPPED_BYTES)
                self._end_of_bulk()
                return error_reply(f"TOOLONG a reply of {length} bytes")
            value = bytearray(length)
            self._fill(memoryview(value))
            self._end_of_bulk()
            return bytes(value)
        if kind == b"*" and depth < _DEEPEST:
            count = _number(line)
            if count > _MOST_ELEMENTS:
                raise WireError("out_of_step", f"a reply of {count} elements")
            return None if count < 0 else [self._small(self._read_line(), depth + 1) for _ in range(count)]
        raise WireError("out_of_step", f"a reply that begins with {line[:16]!r}")


def _number(line: bytes) -> int:
    text = line[1:]
    if not (text[1:] if text[:1] == b"-" else text).isdigit() or len(text) > 20:
        raise WireError("out_of_step", f"a number that is none: {line[:24]!r}")
    return int(text)
