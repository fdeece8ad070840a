"""The fallback wire: redis-py's public calls only, for versions whose connections we do not know.

Copies each value once more and needs it in one piece. One thread at a time. Works on the client object it is
given and imports nothing of redis-py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kvstore.redis_tier.protocol import ErrorReply, PutOrder, Reply, Sink, WireError, WireTimeoutError, error_reply

_CODES = {
    "MovedError": "MOVED",
    "AskError": "ASK",
    "OutOfMemoryError": "OOM",
    "ReadOnlyError": "READONLY",
    "BusyLoadingError": "LOADING",
    "NoPermissionError": "NOPERM",
    "MasterDownError": "MASTERDOWN",
    "ClusterDownError": "CLUSTERDOWN",
    "TryAgainError": "TRYAGAIN",
}
"""redis-py strips an error's first word for these classes."""


class PlainWire:
    """See Wire in redis_tier.wire. `client` is redis-py's client of one server."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, items: Iterable[PutOrder], ttl_ms: int, asking: bool) -> list[Reply]:
        commands = []
        for key, pieces, _ in items:
            value = b"".join(memoryview(piece).cast("B") for piece in pieces)
            commands.append([b"SET", key, value, b"PX", b"%d" % ttl_ms])
        return self.call(commands, asking)

    def get(self, items: Sequence[tuple[bytes, Sink]], ttl_ms: int, getex: bool, asking: bool) -> list[Reply]:
        ttl = b"%d" % ttl_ms
        replies: list[Reply] = []
        for key, sink in items:
            if getex:
                (reply,) = self.call([[b"GETEX", key, b"PX", ttl]], asking)
            else:
                reply = self.call([[b"GET", key], [b"PEXPIRE", key, ttl]], asking)[0]
            replies.append(_pour(reply, sink) if isinstance(reply, bytes) else reply)
        return replies

    def get_parts(self, items: Sequence[tuple[bytes, tuple[int, int], Sink]], ttl_ms: int, asking: bool) -> list[Reply]:
        replies: list[Reply] = []
        for key, (start, stop), sink in items:
            commands = [[b"GETRANGE", key, b"%d" % start, b"%d" % (stop - 1)]]
            if ttl_ms:
                commands.append([b"PEXPIRE", key, b"%d" % ttl_ms])
            reply = self.call(commands, asking)[0]
            replies.append(_pour(reply, sink) if isinstance(reply, bytes) else reply)
        return replies

    def call(self, commands: Sequence[Sequence[bytes]], asking: bool = False) -> list[Reply]:
        before = [[b"ASKING"]] if asking else []
        try:
            with self._client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    for one in (*before, command):  # names as bytes: then no callback of redis-py reshapes replies
                        pipeline.execute_command(*one)
                found = pipeline.execute(raise_on_error=False)
        except Exception as error:  # carried on as what it means for the connection
            name = type(error).__name__
            if name in ("TimeoutError", "timeout"):
                raise WireTimeoutError("timeout", str(error)) from None
            if name == "AuthenticationError":
                raise WireError("auth", "refused") from None
            if name in ("ConnectionError", "BusyLoadingError") or isinstance(error, OSError):
                raise WireError("unreachable", str(error)) from None
            raise
        return [_plain_reply(reply) for reply in found[len(before) :: 1 + len(before)]]


def _pour(value: bytes, sink: Sink) -> Reply:
    view, at = memoryview(value), 0
    for target in sink.targets(len(value)):
        if at + target.nbytes > len(value):
            raise WireError("out_of_step", "a sink wants more than there is")
        target[:] = view[at : at + target.nbytes]
        at += target.nbytes
    return len(value)


def _plain_reply(reply: Any) -> Reply:
    if isinstance(reply, Exception):
        text = f"{reply.args[0] if reply.args else reply}"
        code = _CODES.get(type(reply).__name__)
        if code in ("MOVED", "ASK"):
            text = f"{reply.slot_id} {reply.host}:{reply.port}"  # type: ignore[attr-defined]
        return ErrorReply(code, f"{code} {text}") if code else error_reply(text)
    if reply is True:
        return b"OK"
    if isinstance(reply, list | tuple):
        return [_plain_reply(one) for one in reply]
    if isinstance(reply, str):
        return reply.encode()
    return reply  # type: ignore[no-any-return]
