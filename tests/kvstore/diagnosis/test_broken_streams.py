"""Streams that do not end, or end too early, or are none: every request ends in time, and its error says why."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest

from allocator.errors import ConfigError
from kvstore.diagnosis.endpoint import Endpoint, Sample

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
PLAIN = HEAD.replace(b"text/event-stream", b"application/json")
TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
LAST = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'


@contextmanager
def answering(pieces: Iterable[bytes], pause_seconds: float) -> Iterator[str]:
    """A server that sends the pieces to one client, whatever it asks."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while not connection.recv(1 << 16).endswith(b"}"):
                    pass
                try:
                    for piece in pieces:
                        connection.sendall(piece)
                        time.sleep(pause_seconds)
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


def asked(pieces: Iterable[bytes], pause_seconds: float = 0.0, timeout_seconds: float = 10.0) -> Sample:
    with answering(pieces, pause_seconds) as url:
        endpoint = Endpoint(url, model="m", timeout_seconds=timeout_seconds)
        return endpoint.ask("hello", 4)


@pytest.mark.parametrize(("piece", "pause"), [(TOKEN, 0.01), (b": still here\n\n", 0.01), (b"x", 0.01), (TOKEN, 0.0)])
def test_a_stream_without_end_ends_with_the_time(piece: bytes, pause: float) -> None:
    began = time.monotonic()
    sample = asked(itertools.chain([HEAD], itertools.repeat(piece)), pause, timeout_seconds=0.5)
    assert time.monotonic() - began < 5
    assert "had not ended when the time was over" in (sample.error or "")


def test_a_line_without_end() -> None:
    sample = asked(itertools.chain([HEAD], itertools.repeat(b"x" * 65536)))
    assert "a line of more than" in (sample.error or "")


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([HEAD, TOKEN, TOKEN], "the stream broke off after 2 pieces"),
        ([PLAIN, json.dumps({"choices": [{"text": "a", "finish_reason": "stop"}]}).encode()], "content-type applic"),
        ([HEAD, b"data: [1]\n\n"], "not in OpenAI's form"),
        ([HEAD, b'data: {"choices": ["a"]}\n\n'], "not in OpenAI's form"),
        ([HEAD, b"data: {nonsense\n\n"], "JSONDecodeError"),
        ([HEAD], "held no answer"),
    ],
)
def test_a_stream_that_is_none_says_why(pieces: list[bytes], said: str) -> None:
    assert said in (asked(pieces).error or "")


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", LAST, LAST.replace(b"\n", b"\r\n"), b"data:[DONE]"])
def test_a_whole_stream_is_sound(end: bytes) -> None:
    sample = asked([HEAD, TOKEN, TOKEN[:10], TOKEN[10:], end])
    assert (sample.error, len(sample.chunk_seconds)) == (None, 2)


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://a b", "http://127.0.0.1:x"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        Endpoint(url)
