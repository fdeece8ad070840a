"""One request's answer: from tokens on the engine's thread to pieces of text in the server's event loop.

A client that goes away, or a handler that is cancelled, aborts its request. Runs in the server's event loop, but for
`EventQueue`, which the engine's thread fills.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine_adapter.request import FinishReason
from engine_adapter.server.messages import TextPieces, Wanted

if TYPE_CHECKING:
    from engine_adapter.request import RequestResult
    from engine_adapter.server.engine_thread import EngineThread


class ClientGone(Exception):  # noqa: N818 - what happened, not an error of ours
    """Nobody reads the answer any more."""


class AnswerFailed(Exception):  # noqa: N818 - becomes a status 500
    """The engine could not finish the request."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text of one branch; `finish` with its last piece."""

    index: int
    text: str
    finish: str | None = None


@dataclass(slots=True)
class Usage:
    """Tokens of a request. cached_tokens: of the prompt, not computed because a tier had them."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class EventQueue:
    """The engine's listener: hands everything over to an event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, int] | RequestResult | Exception] = asyncio.Queue()

    def token(self, index: int, token_id: int) -> None:
        self._put((index, token_id))

    def done(self, result: RequestResult) -> None:
        self._put(result)

    def failed(self, error: Exception) -> None:
        self._put(error)

    def _put(self, event: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


@dataclass(slots=True)
class Answer:
    """An answer under way: iterate over `pieces()` once; `usage` is complete when that has ended."""

    engine: EngineThread
    wanted: Wanted
    tokenizer: Any
    usage: Usage = field(init=False)

    def __post_init__(self) -> None:
        self.usage = Usage(len(self.wanted.request.token_ids))

    def submit(self) -> EventQueue:
        """Queue it. Raises what the engine's `submit` raises."""
        queue = EventQueue()
        self.engine.submit(self.wanted.request, queue)
        return queue

    async def pieces(self, queue: EventQueue, gone: Awaitable[object]) -> AsyncGenerator[Piece]:
        """A piece for every token, however short. `gone` ends when the client has left: then ClientGone."""
        request = self.wanted.request
        texts = [TextPieces(self.tokenizer, self.wanted.stops) for _ in range(request.n)]
        leaving = asyncio.ensure_future(gone)
        ended = False
        try:
            while True:
                event = await _next_event(queue, leaving)
                if isinstance(event, Exception):
                    ended = True
                    raise AnswerFailed(str(event)) from event
                if not isinstance(event, tuple):
                    ended = True
                    for piece in self._last_pieces(event, texts):
                        yield piece
                    return
                index, token_id = event
                if texts[index].stopped:
                    continue
                self.usage.completion_tokens += 1
                text = texts[index].push(token_id)
                yield Piece(index, text, "stop" if texts[index].stopped else None)
                if all(one.stopped for one in texts):
                    self.engine.abort(request.request_id)
        finally:
            leaving.cancel()
            if not ended:
                self.engine.abort(request.request_id)

    def _last_pieces(self, result: RequestResult, texts: list[TextPieces]) -> list[Piece]:
        self.usage.cached_tokens = sum(result.reused_tokens.values())
        if result.error is not None:
            raise AnswerFailed(result.error)
        pieces = []
        for completion, text in zip(result.completions, texts, strict=True):
            if not text.stopped:
                finish = completion.finish_reason
                rest = text.rest()
                pieces.append(Piece(completion.index, rest, "stop" if text.stopped else _FINISH[finish]))
        return pieces


_FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


async def _next_event(queue: EventQueue, leaving: asyncio.Future[Any]) -> Any:
    waiting: asyncio.Future[Any] = asyncio.ensure_future(queue.events.get())
    try:
        await asyncio.wait([waiting, leaving], return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            return waiting.result()
        raise ClientGone
    finally:
        waiting.cancel()
