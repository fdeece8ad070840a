"""What the server refuses, and what it gives up: clients that leave, too many at once, too long, a broken loop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from allocator.errors import CapacityError, KVError
from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.request import Request
from engine_adapter.server.__main__ import parse
from engine_adapter.server.engine_thread import EngineThread
from engine_adapter.server.http_app import BODY_BYTES_LIMIT
from engine_adapter.server.messages import TextPieces
from engine_adapter.testing import ToyRunner
from tests.engine_adapter.loop_kit import geometry, make_store
from tests.engine_adapter.server.server_kit import JSON, Client, serving

ROOT = Path(__file__).resolve().parents[3]
LONG: dict[str, Any] = {"prompt": "Tell me all of it. ", "max_tokens": 3500, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(client: Client, stream: bool) -> None:
    connection = client.connect()
    connection.request("POST", "/v1/completions", json.dumps({**LONG, "stream": stream}), JSON)
    if stream:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
    deadline = time.monotonic() + 10
    while client.open_requests() != 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if stream:
        answer.close()
    connection.close()
    client.wait_until_idle(3.0)  # all 3,500 tokens take much longer
    before = client.get("/metrics")[1]
    assert "kvstore_aborted_sequences_total 0" not in before


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": None}, "prompt", "got None"),
    ({"prompt": ["a", "b"]}, "prompt", "one prompt a request"),
    ({"prompt": [1, "a"]}, "prompt", "expected one text"),
    ({"prompt": [True]}, "prompt", "expected one text"),
    ({"prompt": "x" * 4096}, "prompt", "has 4096 tokens; the model has 4096 positions"),
    ({"prompt": "x" * 4000, "max_tokens": 97}, "max_tokens", "expected at most 96"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", "got 0; expected an integer in [1,"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "got 1.5"),
    ({"prompt": "a", "temperature": -1}, "temperature", "got -1; expected a number in [0, 100]"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "got 'hot'"),
    ({"prompt": "a", "top_p": 0}, "top_p", "got 0"),
    ({"prompt": "a", "n": 99}, "n", "got 99"),
    ({"prompt": "a", "seed": 1 << 80}, "seed", "expected an integer"),
    ({"prompt": "a", "stop": [""]}, "stop", "expected a text"),
    ({"prompt": "a", "stop": 5}, "stop", "got 5"),
    ({"prompt": "a", "stream": "yes"}, "stream", "got 'yes'; expected true or false"),
    ({"prompt": "a", "stream_options": 3}, "stream_options", "expected an object"),
    ({"prompt": "a", "logprobs": 5}, "logprobs", "does not support it"),
    ({"prompt": "a", "logprobs": 0}, "logprobs", "got 0; this server does not support it"),
    ({"prompt": "a", "repetition_penalty": 1.2}, "repetition_penalty", "does not support it"),
    ({"prompt": "a", "min_p": 0.1}, "min_p", "does not support it"),
    ({"prompt": "a", "stop_token_ids": [5]}, "stop_token_ids", "does not support it"),
    ({"prompt": [1, 1 << 30], "stream": True}, "prompt", "prompt[1]: got 1073741824; expected a token id in [0,"),
    ({"prompt": "a", "cache_salt": "mine"}, "cache_salt", "does not support it"),
]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""])
def test_a_name_that_is_not_this_machines_is_refused(client: Client, host: str) -> None:
    # A foreign page whose name was made to point to 127.0.0.1 could send what it likes otherwise.
    status, answer = client.send("/v1/completions", b'{"prompt": "a"}', JSON | {"Host": host})
    assert (status, answer["error"]["message"]) == (403, f"host: got {host!r}; expected this machine's, or a token")


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:1", "127.8.0.1", "[::1]:8000", "[::1]"])
def test_this_machines_names_are_answered(client: Client, host: str) -> None:
    assert client.get("/v1/models", {"Host": host})[0] == 200


@pytest.mark.parametrize(("fields", "field", "message"), BAD)
def test_a_bad_field_is_named(client: Client, fields: dict[str, Any], field: str, message: str) -> None:
    status, answer = client.post("/v1/completions", **fields)
    assert status == 400
    assert answer["error"]["param"] == field
    assert message in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", [{"role": "user"}], [{"role": 3, "content": "a"}], [7],
     [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]],
)  # fmt: skip
def test_bad_messages_are_refused(client: Client, messages: Any) -> None:
    status, answer = client.post("/v1/chat/completions", messages=messages)
    assert (status, answer["error"]["param"]) == (400, "messages")


def test_what_is_no_request_at_all(client: Client) -> None:
    assert client.send("/v1/completions", b"{")[0] == 400
    assert client.send("/v1/completions", b"[1]")[0] == 400
    assert client.send("/v1/completions", b"[" * 100_000)[0] == 400
    assert client.send("/v1/completions", b'{"prompt": "\\ud800"}')[0] == 400
    assert client.send("/v1/completions", b"{}", {"Content-Type": "text/plain"})[0] == 415
    assert client.send("/v1/completions", b" " * (BODY_BYTES_LIMIT + 1))[0] == 413
    assert client.post("/v1/completions", prompt="a", model="gpt-9")[0] == 404
    status, answer = client.post("/v1/completions", prompt=[999_999], temperature=0)
    assert status == 400
    assert "999999" in answer["error"]["message"]
    assert client.get("/v1/completions")[0] == 405


def test_too_many_at_once_are_refused_and_a_long_one_ends(tiny_folder: Path) -> None:
    with serving(tiny_folder, "--open-requests", "1", "--request-seconds", "1.0") as client:
        connection = client.connect()
        connection.request("POST", "/v1/completions", json.dumps(LONG), JSON)
        while client.open_requests() != 1:
            time.sleep(0.01)
        status, refused = client.post("/v1/completions", prompt="a", max_tokens=1)
        assert (status, refused["error"]["type"]) == (429, "rate_limit_error")
        answer = json.loads(connection.getresponse().read())
        connection.close()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert 0 < answer["usage"]["completion_tokens"] < LONG["max_tokens"]
        assert client.complete("a", max_tokens=1)


def test_a_token_is_wanted_where_one_is_set(tiny_folder: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a-long-enough-token\n")
    with serving(tiny_folder, "--token-file", str(token)) as client:
        assert client.post("/v1/completions", prompt="a", max_tokens=1)[0] == 401
        assert client.get("/v1/models")[0] == client.get("/metrics")[0] == 401
        assert client.get("/healthz")[0] == 200
        bearer = JSON | {"Authorization": "Bearer a-long-enough-token"}
        assert client.send("/v1/completions", b'{"prompt": "a", "max_tokens": 1}', bearer)[0] == 200
        wrong = JSON | {"Authorization": "Bearer a-long-enough-tokem"}
        assert client.send("/v1/completions", b'{"prompt": "a"}', wrong)[0] == 401


class Ear:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def token(self, index: int, token_id: int) -> None:
        self.heard.append(token_id)

    def done(self, result: Any) -> None:
        self.heard.append(result)

    def failed(self, error: Exception) -> None:
        self.heard.append(error)


def test_a_broken_loop_is_told_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(geometry("full"))
    runner = ToyRunner.over(store)
    engine = EngineThread(DecodeLoop(runner, store), store)
    runner.forward = None  # type: ignore[method-assign, assignment] - the next step raises what no one expects
    ear = Ear()
    engine.submit(Request("one", [1, 2, 3], 4), ear)
    deadline = time.monotonic() + 10
    while engine.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "TypeError" in (engine.failure or "")
    assert not engine.healthy
    assert isinstance(ear.heard[-1], TypeError)
    with pytest.raises(KVError, match="does not run: TypeError"):
        engine.submit(Request("two", [1], 1), Ear())
    engine.close()  # waits for the thread, which says it last
    assert "decode loop has failed" in caplog.text


def test_closing_ends_what_is_open_and_frees_its_blocks() -> None:
    store = make_store(geometry("full"))
    engine = EngineThread(DecodeLoop(ToyRunner.over(store), store), store, open_requests_limit=2)
    ears = [Ear(), Ear()]
    for number, ear in enumerate(ears):
        engine.submit(Request(f"r{number}", [number, 2, 3], 150), ear)
    with pytest.raises(CapacityError):
        engine.submit(Request("r3", [1], 1), Ear())
    engine.close()
    assert [ear.heard[-1].finish_reason.value for ear in ears] == ["abort", "abort"]
    assert store.sequence_ids() == []
    store.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host", "0.0.0.0"], "give --token-file"),
        (["--host", "::"], "give --token-file"),
        (["--port", "99999"], "--port: got 99999"),
        (["--max-batch", "0"], "--max-batch: got 0"),
        (["--request-seconds", "nan"], "--request-seconds"),
        (["--model", "/nonexistent"], "no model in"),
        (["--token-file", "/nonexistent"], "/nonexistent cannot be read (No such file or directory)"),
        (["--token-file", "/dev/null"], "/dev/null holds no token; expected 16 to 512 characters"),
    ],
)
def test_bad_usage_is_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(words)
    assert message in capsys.readouterr().err


def test_the_command_says_where_it_listens_and_ends_on_a_signal(tiny_folder: Path) -> None:
    command = [sys.executable, "-m", "engine_adapter.server", "--model", str(tiny_folder), "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:")
    client = Client(int(line.rsplit(":", 1)[1]), None)
    assert client.complete("a", max_tokens=2)["usage"]["completion_tokens"] <= 2
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) in (0, -signal.SIGTERM)
    process.stdout.close()


@pytest.mark.parametrize("stops", [(), ("dog",), ("✓",), ("日本", "zzz")])
def test_pieces_join_to_the_text_before_the_first_stop(tiny_folder: Path, stops: tuple[str, ...]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    for text in ("Grüße, 日本語 ✓ lazy dog do done", "plain", "✓✓✓", "do dog", "ends in do"):
        pieces = TextPieces(tokenizer, stops)
        out = ""
        for token_id in tokenizer(text).input_ids:
            out += pieces.push(token_id)
            assert "\ufffd" not in out
            if pieces.stopped:
                break
        out += pieces.rest()
        ends = [text.index(stop) for stop in stops if stop in text]
        assert out == (text[: min(ends)] if ends else text)
