"""How the scheduler's side asks the worker's, which owns the tiers: one Unix socket, a few microseconds a question.

vLLM runs the two sides in one process or in two. The socket's name (abstract, nothing in the file system) comes from
the engine's id; only the same user is answered. The client is the scheduler's thread, the server a thread of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from engine_adapter.vllm_connector.book import Found, Note

_LENGTH = struct.Struct("<I")
_LIMIT_BYTES = 64 << 20
_HASH_BYTES = 32
_RESET_SECONDS = 30.0  # the tiers are emptied, and a remote one lets all hosts notice
_CREDENTIALS = struct.Struct("3i")


class Question(msgspec.Struct, frozen=True):
    """epoch that the hashes are of; is_reset: begin a new epoch, and nothing else; note: for statistics, and nothing
    is asked; no hashes: the scales alone."""

    epoch: int = 0
    root: bytes = b""
    hashes: bytes = b""
    local_blocks: int = 0
    is_reset: bool = False
    note: Note | None = None


class Answer(msgspec.Struct, frozen=True):
    """As Found. problem: why a reset failed. scales: name of the scales of an FP8 cache."""

    blocks: int
    pending: bool
    epoch: int
    lossy_at: int | None = None
    problem: str = ""
    scales: str = ""


def socket_name(engine_id: str, rank: int = 0) -> str:
    name = engine_id if rank == 0 else f"{engine_id} {rank}"
    return "\0kvstore-vllm-" + hashlib.sha256(name.encode()).hexdigest()[:32]


class LookupClient:
    """Asks the workers of all ranks; one that does not answer in time has nothing. ConnectionError not from `find`."""

    def __init__(self, engine_id: str, ranks: int = 1, timeout_seconds: float = 1.0) -> None:
        self._links = [_Link(socket_name(engine_id, rank), timeout_seconds) for rank in range(ranks)]

    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found:
        """What all ranks have. Where one has less, the others are asked again: a shorter hit needs other windows."""
        blocks, pending = len(hashes), False
        try:
            while True:
                question = Question(epoch, root, b"".join(hashes[:blocks]), local_blocks)
                answers = [link.ask(question) for link in self._links]
                epoch_now = max(one.epoch for one in answers)
                pending = pending or any(one.pending for one in answers)
                blocks = min(one.blocks for one in answers)
                if epoch_now != epoch or blocks <= local_blocks or all(one.blocks == blocks for one in answers):
                    break
        except ConnectionError:
            return Found(0, False, epoch)
        lossy = [one.lossy_at for one in answers if one.lossy_at is not None]
        return Found(blocks, pending, epoch_now, min(lossy, default=None))

    def note(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int, note: Note) -> None:
        """Tell the first rank, which tells its tiers. A worker that is away misses it."""
        with contextlib.suppress(ConnectionError):
            self._links[0].ask(Question(epoch, root, b"".join(hashes), local_blocks, note=note))

    def reset(self, epoch: int) -> int:
        """Begin a new epoch in all tiers; which one. ConnectionError with the reason where one was not reached."""
        answers = [link.ask(Question(epoch, is_reset=True), _RESET_SECONDS) for link in self._links]
        problems = [one.problem for one in answers if one.problem]
        if problems:
            raise ConnectionError(problems[0])
        return max(one.epoch for one in answers)

    def scales(self, patience_seconds: float = 10.0) -> str:
        """The workers' name of their scales. ConnectionError where they have none or are not there in time."""
        until = time.monotonic() + patience_seconds
        while True:
            try:
                found = {link.ask(Question()).scales for link in self._links}
            except ConnectionError:
                if time.monotonic() > until:
                    raise
                found = set()
            if found and "" not in found:
                return ",".join(sorted(found))
            if time.monotonic() > until:
                raise ConnectionError("the worker does not know its scales")
            time.sleep(0.05)

    def close(self) -> None:
        for link in self._links:
            link.close()


class _Link:
    """A connection to one worker, made when it is first needed and anew after a failure."""

    def __init__(self, name: str, timeout_seconds: float) -> None:
        self._name = name
        self._timeout_seconds = timeout_seconds
        self._socket: socket.socket | None = None

    def ask(self, question: Question, timeout_seconds: float | None = None) -> Answer:
        """ConnectionError where there is no answer in time."""
        try:
            if self._socket is None:
                self._socket = self._connected()
            self._socket.settimeout(timeout_seconds or self._timeout_seconds)
            _send(self._socket, msgspec.msgpack.encode(question))
            return msgspec.msgpack.decode(_receive(self._socket), type=Answer)
        except (OSError, msgspec.MsgspecError) as error:
            self.close()
            raise ConnectionError(f"the worker did not answer ({error})") from error

    def _connected(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(self._timeout_seconds)
        try:
            link.connect(self._name)
        except OSError:
            link.close()
            raise
        return link

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _not_noted(question: Question, hashes: list[bytes]) -> None:
    """Nobody counts."""


class LookupServer:
    """Answers on a thread of its own until `close`. note: what to do with a question that is a note."""

    def __init__(
        self,
        engine_id: str,
        answer: Callable[[Question, list[bytes]], Answer],
        rank: int = 0,
        note: Callable[[Question, list[bytes]], None] = _not_noted,
    ) -> None:
        self._answer, self._note = answer, note
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(socket_name(engine_id, rank))
            self._listener.listen(2)
        except OSError:
            self._listener.close()
            raise
        self._links: list[socket.socket] = []
        threading.Thread(target=self._accept, name="kvstore-vllm-lookup", daemon=True).start()

    def close(self) -> None:
        for one in [self._listener, *self._links]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(peer)[1] != os.getuid():
                link.close()
                continue
            self._links.append(link)
            threading.Thread(target=self._serve, args=(link,), name="kvstore-vllm-lookup", daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            while True:
                question = msgspec.msgpack.decode(_receive(link), type=Question)
                joined = question.hashes
                hashes = [joined[at : at + _HASH_BYTES] for at in range(0, len(joined), _HASH_BYTES)]
                if question.note is not None:
                    _send(link, msgspec.msgpack.encode(Answer(0, False, question.epoch)))
                    self._note(question, hashes)  # a note in a queue: the next question waits for nothing more
                else:
                    _send(link, msgspec.msgpack.encode(self._answer(question, hashes)))
        except (OSError, msgspec.MsgspecError):
            link.close()


def _send(link: socket.socket, payload: bytes) -> None:
    link.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(link: socket.socket) -> bytes:
    (size,) = _LENGTH.unpack(_receive_exactly(link, _LENGTH.size))
    if size > _LIMIT_BYTES:
        raise ConnectionError(f"a message of {size} bytes; expected at most {_LIMIT_BYTES}")
    return _receive_exactly(link, size)


def _receive_exactly(link: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        count = link.recv_into(view[got:])
        if not count:
            raise ConnectionError("the other side is gone")
        got += count
    return bytes(buffer)
