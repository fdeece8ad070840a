"""An OpenAI-compatible server seen from outside: one streamed request, timed chunk by chunk.

Any thread; every request has a connection of its own, opened before the clock starts. Failures are values, not
exceptions: an endpoint that breaks is a finding.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from allocator.errors import ConfigError

_LINE_LIMIT = 1 << 20
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Times are of one clock. Tokens are as the server counts them, None where it does not say.

    chunk_seconds: when each piece of the answer came.
    """

    started_seconds: float
    chunk_seconds: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def ttft_seconds(self) -> float:
        return self.chunk_seconds[0] - self.started_seconds

    @property
    def total_seconds(self) -> float:
        return self.chunk_seconds[-1] - self.started_seconds

    @property
    def tokens(self) -> int:
        """Tokens of the answer; pieces are counted where the server does not say."""
        return len(self.chunk_seconds) if self.answer_tokens is None else self.answer_tokens

    @property
    def gaps_seconds(self) -> list[float]:
        """Times between tokens, in order; a piece of several tokens counts as that many equal ones on average."""
        scale = len(self.chunk_seconds) / max(len(self.chunk_seconds), self.tokens)
        return [
            (later - earlier) * scale
            for earlier, later in zip(self.chunk_seconds, self.chunk_seconds[1:], strict=False)
        ]

    @property
    def itl_seconds(self) -> float | None:
        """The usual time between tokens: a median, so that a few steps that computed another's prompt do not count."""
        return median(self.gaps_seconds) if len(self.chunk_seconds) > 1 else None


@dataclass(slots=True)
class Endpoint:
    """`url` with or without /v1. model None: the first that the server lists."""

    url: str
    model: str | None = None
    token: str | None = None
    timeout_seconds: float = 120.0
    model_limit: int | None = None
    _refused: set[str] = field(default_factory=set)
    _base: str = ""

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            sound = bool(parts.scheme in ("http", "https") and parts.hostname and parts.port != 0)
        except ValueError:  # of brackets or of a port
            sound = False
        if not sound or parts.query or parts.fragment or any(one <= " " for one in self.url):
            raise ConfigError(f"url: got {self.url!r}; expected http://host:port or https://host/path")
        self._base = parts.path.rstrip("/").removesuffix("/v1")

    def connect(self) -> None:
        """Ask what is served. ConfigError when nothing answers, or no model of that name."""
        try:
            connection = self._open()
            connection.request("GET", f"{self._base}/v1/models", headers=self._headers())
            answer = connection.getresponse()
            body = answer.read(_LINE_LIMIT)
            connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"url: {self.url} does not answer ({type(error).__name__}: {error})") from error
        if answer.status != 200:
            raise ConfigError(f"url: {self.url} answers /v1/models with status {answer.status}; expected 200")
        try:
            models = {str(one["id"]): one for one in json.loads(body)["data"]}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"url: {self.url} lists no models in OpenAI's form") from error
        if not models or (self.model is not None and self.model not in models):
            raise ConfigError(f"model: got {self.model!r}; the server has {', '.join(models) or 'none'}")
        self.model = self.model or next(iter(models))
        limit = models[self.model].get("max_model_len")
        self.model_limit = limit if type(limit) is int else None

    def ask(self, prompt: str, answer_tokens: int) -> Sample:
        """One greedy completion, streamed. Fields beyond OpenAI's are dropped once the server has refused them."""
        while True:
            sample, refused = self._ask(prompt, answer_tokens)
            if refused is None:
                return sample
            self._refused.add(refused)

    def _ask(self, prompt: str, answer_tokens: int) -> tuple[Sample, str | None]:
        fields: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "ignore_eos": True,
        }  # fmt: skip
        body = json.dumps({name: value for name, value in fields.items() if name not in self._refused})
        started = time.perf_counter()
        try:
            connection = self._open()
            connection.connect()
            started = time.perf_counter()
            connection.request("POST", f"{self._base}/v1/completions", body, self._headers())
            answer = connection.getresponse()
            if answer.status != 200:
                said = answer.read(2000).decode("utf-8", "replace")
                connection.close()
                optional = [name for name in ("ignore_eos", "stream_options") if name not in self._refused]
                if answer.status in (400, 422) and optional:
                    return Sample(started), next((name for name in optional if name in said), optional[0])
                return Sample(started, error=f"status {answer.status}: {' '.join(said.split())[:200]}"), None
            sample = _read(answer, started, started + self.timeout_seconds)
            connection.close()
            return sample, None
        except (TypeError, AttributeError):
            return Sample(started, error="the stream is not in OpenAI's form"), None
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Sample(started, error=f"{type(error).__name__}: {error}"), None

    def _open(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=self.timeout_seconds, context=context
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout_seconds)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        return headers | ({"Authorization": f"Bearer {self.token}"} if self.token else {})


def _lines(answer: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    """Lines as they come. TimeoutError when they have not ended by the deadline, however much comes."""
    held = b""
    while piece := answer.read1(_PIECE_BYTES):
        if time.perf_counter() > deadline:
            raise TimeoutError("the stream had not ended when the time was over")
        *lines, held = (held + piece).split(b"\n")
        yield from lines
        if len(held) > _LINE_LIMIT:
            raise ValueError(f"a line of more than {_LINE_LIMIT} bytes")
    yield held


def _read(answer: http.client.HTTPResponse, started: float, deadline: float) -> Sample:
    """The events of a stream, each noted as it arrives."""
    times: list[float] = []
    usage: dict[str, Any] = {}
    error = None
    ended = False
    for line in _lines(answer, deadline):
        now = time.perf_counter()
        if not line.startswith(b"data:"):
            continue
        content = line[5:].strip()
        if content == b"[DONE]":
            ended = True
            break
        event = json.loads(content)
        if event.get("error"):
            error = str(event["error"])[:200]
        usage = event.get("usage") or usage
        choices = event.get("choices") or ()
        ended = ended or any(choice.get("finish_reason") for choice in choices)
        # The last piece may only say why the answer ended; it is no token.
        if any(choice.get("text") or not choice.get("finish_reason") for choice in choices):
            times.append(now)
    if error is None and not times:
        kind = answer.getheader("content-type", "none")
        error = f"the stream held no answer (content-type {kind}; expected text/event-stream)"
    elif error is None and not ended:
        error = f"the stream broke off after {len(times)} pieces"
    details = usage.get("prompt_tokens_details") or {}
    return Sample(
        started,
        tuple(times),
        _count(usage.get("prompt_tokens")),
        _count(usage.get("completion_tokens")),
        _count(details.get("cached_tokens")),
        error,
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
