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
from collections.abc import Callable, Sequence

import msgspec

from engine_adapter.vllm_connector.book import Found

_LENGTH = struct.Struct("<I")
_LIMIT_BYTES = 64 << 20
_HASH_BYTES = 32
_CREDENTIALS = struct.Struct("3i")


class Question(msgspec.Struct, frozen=True):
    """epoch that the hashes are of; is_reset: begin a new epoch, and nothing else."""

    epoch: int = 0
    root: bytes = b""
    hashes: bytes = b""
    local_blocks: int = 0
    is_reset: bool = False


class Answer(msgspec.Struct, frozen=True):
    blocks: int
    pending: bool
    epoch: int
    problem: str = ""


def socket_name(engine_id: str) -> str:
    return "\0kvstore-vllm-" + hashlib.sha256(engine_id.encode()).hexdigest()[:32]


class LookupClient:
    """Asks; a worker that does not answer in time has nothing. ConnectionError only from `reset`."""

    def __init__(self, engine_id: str, timeout_seconds: float = 1.0) -> None:
        self._name = socket_name(engine_id)
        self._timeout_seconds = timeout_seconds
        self._socket: socket.socket | None = None

    def find(self, epoch: int, root: bytes, hashes: Sequence[bytes], local_blocks: int) -> Found:
        try:
            answer = self._ask(Question(epoch, root, b"".join(hashes), local_blocks))
        except (OSError, msgspec.MsgspecError):
            self.close()
            return Found(0, False, epoch)
        return Found(answer.blocks, answer.pending, answer.epoch)

    def reset(self, epoch: int) -> int:
        """Begin a new epoch in all tiers; which one. ConnectionError with the reason where one was not reached."""
        try:
            answer = self._ask(Question(epoch, is_reset=True))
        except (OSError, msgspec.MsgspecError) as error:
            self.close()
            raise ConnectionError(f"the worker did not answer ({error})") from error
        if answer.problem:
            raise ConnectionError(answer.problem)
        return answer.epoch

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _ask(self, question: Question) -> Answer:
        if self._socket is None:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            link.settimeout(self._timeout_seconds)
            try:
                link.connect(self._name)
            except OSError:
                link.close()
                raise
            self._socket = link
        _send(self._socket, msgspec.msgpack.encode(question))
        return msgspec.msgpack.decode(_receive(self._socket), type=Answer)


class LookupServer:
    """Answers on a thread of its own until `close`."""

    def __init__(self, engine_id: str, answer: Callable[[Question, list[bytes]], Answer]) -> None:
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(socket_name(engine_id))
        self._listener.listen(2)
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
