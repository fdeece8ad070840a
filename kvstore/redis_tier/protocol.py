"""The words between a tier and a connection: replies, errors, batches, and commands as RESP2 bytes.

Types and pure functions; any thread. Implemented by wire (our own reader) and plain (redis-py's calls).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kvstore.tier import Buffer


class ErrorReply(NamedTuple):
    """The server refused one command: the first word of its error, and the line."""

    code: str
    line: str


Reply: TypeAlias = "int | bytes | list[Reply] | ErrorReply | None"


PutOrder: TypeAlias = tuple[bytes, Sequence[Buffer], int]
"""Key, the value's pieces in order, their bytes in all."""


class WireError(Exception):
    """The connection cannot be used any more. `cause` is a word to count by."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


class WireTimeoutError(WireError):
    """Nothing came, or too little, in the time given."""


class InterruptedCallError(WireError):
    """The caller gave up while replies were on their way."""

    def __init__(self) -> None:
        super().__init__("interrupted")


class Sink(Protocol):
    """Takes one value: yields buffers to be filled one after the other; ends early when it wants no more."""

    size_bytes: int  # of the value that is expected, and of its first target
    head_bytes: int

    def targets(self, length: int) -> Iterator[memoryview]: ...


class Wire(Protocol):
    """Batches to one server. Replies come in order, an ErrorReply in place of what was refused.

    `asking` sends ASKING before each command (a slot that is being moved). `stopped` is asked between replies.
    """

    def put(self, items: Iterable[PutOrder], ttl_ms: int, asking: bool) -> list[Reply]:
        """SET each with PX ttl_ms. `items` is consumed as they are sent, so what was just looked at is in cache."""

    def get(self, items: Sequence[tuple[bytes, Sink]], ttl_ms: int, getex: bool, asking: bool) -> list[Reply]:
        """Values into sinks, their time to live set anew; the reply is the value's length, None where there is none."""

    def get_parts(self, items: Sequence[tuple[bytes, tuple[int, int], Sink]], ttl_ms: int, asking: bool) -> list[Reply]:
        """Bytes [start, stop) of values into sinks; the reply is how many there are. ttl_ms 0: leave times to live."""

    def call(self, commands: Sequence[Sequence[bytes]], asking: bool = False) -> list[Reply]:
        """Small commands with small replies."""


def bulk(argument: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(argument), argument)


def encode(command: Sequence[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(command), b"".join(map(bulk, command)))


ASKING = encode([b"ASKING"])


def error_reply(line: str) -> ErrorReply:
    return ErrorReply(line.split(" ", 1)[0], line[:200])
