"""The routes, as a starlette application. The one file here that imports starlette.

Errors have OpenAI's form. Every answer streams from the same generator; what is not streamed is collected first.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from allocator.errors import CapacityError, KVError, UsageError
from engine_adapter.server.answers import Answer, AnswerFailed, ClientGone, EventQueue, Piece
from engine_adapter.server.messages import BadRequest, Limits, Wanted, parse_body, wanted
from kvstore.http_access import has_token

if TYPE_CHECKING:
    from engine_adapter.decode_loop import DecodeLoop
    from engine_adapter.server.engine_thread import EngineThread
    from kvstore import KVStore

BODY_BYTES_LIMIT = 8 << 20
_METRICS_SECONDS = 5.0
_RETRY_SECONDS = "1"
_STATUS_CLIENT_GONE = 499


@dataclass(frozen=True, slots=True)
class Served:
    """What the routes serve. `token`: what a client must send as bearer token, None for none."""

    engine: EngineThread
    tokenizer: Any
    model: str
    eos_token_ids: frozenset[int]
    limits: Limits
    token: str | None = None


def make_app(served: Served) -> Starlette:
    """The application; `served.engine` stays the caller's to close."""
    routes = _Routes(served)
    return Starlette(
        routes=[
            Route("/healthz", routes.health),
            Route("/metrics", routes.metrics),
            Route("/v1/models", routes.models),
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
        ]
    )


class _Routes:
    def __init__(self, served: Served) -> None:
        self._served = served
        self._created = int(time.time())

    async def health(self, _request: Request) -> Response:
        engine = self._served.engine
        if engine.healthy:
            return JSONResponse({"status": "ok", "open_requests": engine.open_requests})
        return JSONResponse({"status": "failed", "reason": engine.failure}, status_code=503)

    async def metrics(self, request: Request) -> Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        asked = asyncio.wrap_future(self._served.engine.ask(_metrics_text))
        try:
            text = await asyncio.wait_for(asked, _METRICS_SECONDS)
        except (TimeoutError, KVError):
            return _error(503, "the engine does not answer", kind="server_error")
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        one = {"id": self._served.model, "object": "model", "created": self._created, "owned_by": "local"}
        limit = self._served.limits.position_limit
        return JSONResponse({"object": "list", "data": [one if limit is None else one | {"max_model_len": limit}]})

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def chat_completions(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        if (refusal := self._unauthorized(request)) is not None:
            return refusal
        try:
            asked = await self._read(request, chat=chat)
            answer = Answer(self._served.engine, asked, self._served.tokenizer)
            queue = answer.submit()
        except BadRequest as error:
            return _error(error.status, str(error), field=error.field)
        except CapacityError:
            refused = _error(429, "too many requests are open; ask again", kind="rate_limit_error")
            refused.headers["Retry-After"] = _RETRY_SECONDS
            return refused
        except KVError as error:
            return _error(503, str(error), kind="server_error")
        except ClientDisconnect:
            return Response(status_code=_STATUS_CLIENT_GONE)
        form = _Form(asked, self._served.model)
        if asked.stream:
            events = _stream(answer, queue, form, request)
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        return await _whole(answer, queue, form, request)

    async def _read(self, request: Request, *, chat: bool) -> Wanted:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a foreign web page can send without asking the browser's leave is not
            raise BadRequest(f"content-type: got {kind!r}; expected application/json", status=415)
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES_LIMIT:
                raise BadRequest(f"the body has more than {BODY_BYTES_LIMIT} bytes", status=413)
        served = self._served
        fields = parse_body(bytes(body))
        model = fields.get("model")
        if model is not None and model != served.model:
            raise BadRequest(f"model: got {model!r:.80}; this server has {served.model!r}", "model", status=404)
        return await asyncio.to_thread(
            wanted, fields, chat=chat, tokenizer=served.tokenizer, eos_token_ids=served.eos_token_ids,
            limits=served.limits,
        )  # fmt: skip

    def _unauthorized(self, request: Request) -> Response | None:
        token = self._served.token
        if token is None:
            return None
        if has_token(request.headers.get("authorization", ""), token):
            return None
        return _error(401, "expected the server's token as 'Authorization: Bearer ...'", kind="authentication_error")


class _Form:
    """The JSON that answers of one request have."""

    def __init__(self, asked: Wanted, model: str) -> None:
        self._chat = asked.chat
        self._begun: set[int] = set()
        self._head = {"id": asked.request.request_id, "created": int(time.time()), "model": model}

    def chunk(self, piece: Piece) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish, "logprobs": None}
        if self._chat:
            delta = {"content": piece.text} if piece.text or piece.finish is None else {}
            choice["delta"] = delta if piece.index in self._begun else {"role": "assistant", **delta}
            self._begun.add(piece.index)
        else:
            choice["text"] = piece.text
        return {**self._head, "object": self._object("chunk"), "choices": [choice]}

    def usage(self, answer: Answer) -> dict[str, Any]:
        return {**self._head, "object": self._object("chunk"), "choices": [], "usage": answer.usage.to_json()}

    def whole(self, answer: Answer, texts: dict[int, str], finishes: dict[int, str]) -> dict[str, Any]:
        choices: list[dict[str, Any]] = []
        for index, text in sorted(texts.items()):
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            choices.append({"index": index, "finish_reason": finishes[index], "logprobs": None, **said})
        return {**self._head, "object": self._object(""), "choices": choices, "usage": answer.usage.to_json()}

    def _object(self, part: str) -> str:
        if not self._chat:
            return "text_completion"
        return "chat.completion" + (f".{part}" if part else "")


async def _gone(request: Request) -> None:
    """Ends when the client has closed its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(answer: Answer, queue: EventQueue, form: _Form, request: Request) -> AsyncIterator[str]:
    pieces = answer.pieces(queue, _gone(request))
    try:
        async for piece in pieces:
            yield _event(form.chunk(piece))
        if answer.wanted.include_usage:
            yield _event(form.usage(answer))
        yield "data: [DONE]\n\n"
    except AnswerFailed as error:
        yield _event(_error_body(str(error), None, "server_error"))
    except ClientGone:
        return
    finally:
        await pieces.aclose()  # so that a cancelled stream aborts at once


async def _whole(answer: Answer, queue: EventQueue, form: _Form, request: Request) -> Response:
    texts = dict.fromkeys(range(answer.wanted.request.n), "")
    finishes: dict[int, str] = {}
    try:
        async for piece in answer.pieces(queue, _gone(request)):
            texts[piece.index] += piece.text
            if piece.finish is not None:
                finishes[piece.index] = piece.finish
    except AnswerFailed as error:
        status = 400 if isinstance(error.__cause__, UsageError | CapacityError) else 500
        return _error(status, str(error), kind="invalid_request_error" if status == 400 else "server_error")
    except ClientGone:
        return Response(status_code=_STATUS_CLIENT_GONE)
    return JSONResponse(form.whole(answer, texts, finishes))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n"


def _error(status: int, message: str, *, field: str | None = None, kind: str = "invalid_request_error") -> Response:
    return JSONResponse(_error_body(message, field, kind), status_code=status)


def _error_body(message: str, field: str | None, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


def _metrics_text(loop: DecodeLoop, store: KVStore) -> str:
    """The store's series and the loop's latencies; read between two steps."""
    lines = [store.metrics.prometheus_text().rstrip("\n")]
    for name, summary in loop.latency.snapshot().items():
        series = f"kvstore_server_{name}"
        lines.append(f"# HELP {series} Of the newest requests\n# TYPE {series} gauge")
        lines += [
            f'{series}{{quantile="{percent / 100}"}} {summary[f"p{percent}"]}'
            for percent in (50, 95, 99)
            if summary[f"p{percent}"] is not None
        ]
    return "\n".join(lines) + "\n"
