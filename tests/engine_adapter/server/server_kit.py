"""The real server on a free port of this machine, and a plain client: nothing between a test and the wire."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from engine_adapter.server.__main__ import parse
from engine_adapter.server.build import build

JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Client:
    port: int
    app: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
        connection = self.connect()
        connection.request("GET", path, headers=headers or {})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def send(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        connection = self.connect()
        connection.request("POST", path, body, JSON if headers is None else headers)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read() or b"null")
        connection.close()
        return found

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        return self.send(path, json.dumps(fields).encode())

    def complete(self, prompt: Any, **fields: Any) -> Any:
        status, answer = self.post("/v1/completions", **{"prompt": prompt, "temperature": 0, **fields})
        assert status == 200, answer
        return answer

    def stream(self, path: str, **fields: Any) -> Iterator[Any]:
        """The events' JSON; the last event must be [DONE]."""
        connection = self.connect()
        connection.request("POST", path, json.dumps({"temperature": 0, "stream": True, **fields}), JSON)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.getheader("content-type", "").startswith("text/event-stream")
        events = [line.removeprefix(b"data: ").strip() for line in answer if line.strip()]
        connection.close()
        assert events.pop() == b"[DONE]"
        yield from (json.loads(event) for event in events)

    def open_requests(self) -> int:
        return int(json.loads(self.get("/healthz")[1])["open_requests"])

    def wait_until_idle(self, seconds: float = 10.0) -> float:
        """Seconds until no request is open; fails after `seconds`."""
        started = time.monotonic()
        while self.open_requests():
            assert time.monotonic() - started < seconds, "a request is still open"
            time.sleep(0.01)
        return time.monotonic() - started


@contextmanager
def serving(model: Path, *words: str) -> Iterator[Client]:
    """The server of that command line, in this process."""
    settings = model.parent / "store.toml"
    settings.write_text('codec = "raw"\n')  # INT4 blocks would change a random model's answers
    given = parse(["--model", str(model), "--dtype", "float32", "--threads", "1", "--config", str(settings), *words])
    with build(given) as app:
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield Client(server.servers[0].sockets[0].getsockname()[1], app)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive()
