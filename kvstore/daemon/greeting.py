"""How a client's connection begins: Hello and Welcome, with the epoch page beside it; and a connection for one slow
request, so that a link need not wait for it. Any thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from allocator.errors import TierError
from kvstore.daemon import protocol
from kvstore.daemon.protocol import Cause
from kvstore.daemon.segments import PAGE_BYTES, map_for_reading
from kvstore.daemon.session import set_timeout
from kvstore.tier import ByteRow

_MOST_TELL_TALES = 8
_SEND_BUFFER_BYTES = 4 * protocol.LONGEST_BYTES
_Answer = TypeVar("_Answer", bound=protocol.Answer)
_AnswerOf = TypeVar("_AnswerOf", bound=protocol.Answer)


class LinkDownError(Exception):
    """There is no daemon now, or it did not answer as it should. Counted; to a tier's caller it is a miss."""


class RefusedByDaemonError(Exception):
    """The daemon did not do it; the connection stays."""

    def __init__(self, refused: protocol.Refused) -> None:
        super().__init__(refused.message)
        self.cause = refused.cause


class Greeting(NamedTuple):
    """A connection that stands. page: the epoch page, mapped for reading; tell_tales: descriptors that hang up when
    the daemon dies, the caller's to close."""

    sock: socket.socket
    welcome: protocol.Welcome
    page: ByteRow
    tell_tales: list[int]


def greeted(
    path: str, name: str, timeout_seconds: float, on_refused: Callable[[str], None], patience_seconds: float
) -> Greeting:
    """Connect. OSError, TierError, DecodeError, or LinkDownError when refused (the cause is told before).

    timeout_seconds: of the calls to come; patience_seconds: for the way in, which others may be crowding.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    received: list[int] = []
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        _set_timeouts(sock, patience_seconds)
        sock.connect(path)
        with suppress(BrokenPipeError):  # refused already: the answer says why
            sock.send(protocol.encode(protocol.Hello(1, protocol.MAGIC, protocol.VERSION, name[:64])))
        message, received, _, _ = socket.recv_fds(
            sock, protocol.LONGEST_BYTES, 1 + _MOST_TELL_TALES, socket.MSG_CMSG_CLOEXEC
        )
        answer = protocol.decode_answer(message)
        if not isinstance(answer, protocol.Welcome) or not received:
            on_refused(cause_name(answer.cause if isinstance(answer, protocol.Refused) else 0))
            raise LinkDownError
        _set_timeouts(sock, timeout_seconds)
        page = map_for_reading(received[0], PAGE_BYTES)
        tell_tales, received = received[1:], received[:1]
        return Greeting(sock, answer, page, tell_tales)
    except BaseException:
        sock.close()
        raise
    finally:
        for descriptor in received:
            os.close(descriptor)


def _set_timeouts(sock: socket.socket, seconds: float) -> None:
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        set_timeout(sock, option, seconds)


class Ask(Protocol):
    """One request, one answer."""

    def __call__(self, make: Callable[[int], protocol.Request], expected: type[_AnswerOf]) -> _AnswerOf: ...


@contextmanager
def aside(path: str, name: str, timeout_seconds: float) -> Iterator[Ask]:
    """A connection of its own for requests that take longer than a lookup may. LinkDownError, RefusedByDaemonError."""
    seq = 1
    try:
        sock, _, _, tell_tales = greeted(path, name, timeout_seconds, lambda cause: None, timeout_seconds)
    except (OSError, TierError, msgspec.DecodeError) as error:
        raise LinkDownError(str(error)) from error
    for descriptor in tell_tales:
        os.close(descriptor)

    def ask(make: Callable[[int], protocol.Request], expected: type[_Answer]) -> _Answer:
        nonlocal seq
        seq += 1
        try:
            sock.send(protocol.encode(make(seq)))
            answer = protocol.decode_answer(sock.recv(protocol.LONGEST_BYTES))
        except (OSError, msgspec.DecodeError) as error:
            raise LinkDownError(f"no answer ({error})") from error
        if isinstance(answer, protocol.Refused):
            raise RefusedByDaemonError(answer)
        if answer.seq != seq or not isinstance(answer, expected):
            raise LinkDownError("an unexpected answer")
        return answer

    with sock:
        yield ask


def cause_name(cause: int) -> str:
    """A cause of refusal, for counters."""
    try:
        return Cause(cause).name.lower()
    except ValueError:
        return "unknown"
