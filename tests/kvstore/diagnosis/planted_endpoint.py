"""An endpoint whose slowness is known, because it was planted: sleeps by a formula, over real HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Plant:
    """Seconds: a first token takes `first + prompt * prefill_token` (one prompt after the other), a step takes
    `step + context * context_token + others * step_request`. slots: requests at once. caches: a known prompt is free.
    """

    first: float = 0.002
    prefill_token: float = 0.0
    step: float = 0.002
    context_token: float = 0.0
    step_request: float = 0.0
    slots: int = 64
    caches: bool = True
    answer_limit: int = 10**6
    fail: bool = False
    streams: bool = True
    reports_usage: bool = True
    refuses: tuple[str, ...] = ()
    always_cached: float = 0.0
    seen: set[str] = field(default_factory=set)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.places = threading.Semaphore(self.slots)
        self.compute = threading.Lock()
        self.running = 0


class Handler(BaseHTTPRequestHandler):
    plant: Plant

    def log_message(self, *_: Any) -> None: ...

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "planted"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        plant = self.plant
        fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        plant.asked.append(fields)
        refused = [name for name in plant.refuses if name in fields]
        if plant.fail or refused:
            self.send_error(500 if plant.fail else 400, f"unknown field {refused}")
            return
        with plant.places:
            self._answer(fields["prompt"], min(fields["max_tokens"], plant.answer_limit))

    def _answer(self, prompt: str, count: int) -> None:
        plant, length = self.plant, len(prompt.split())
        known = plant.caches and prompt in plant.seen
        plant.seen.add(prompt)
        with plant.compute:
            time.sleep(plant.first + (0 if known else length * plant.prefill_token))
        plant.running += 1
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for number in range(count):
            if number:
                time.sleep(plant.step + length * plant.context_token + (plant.running - 1) * plant.step_request)
            if plant.streams or number == count - 1:
                self._event({"choices": [{"text": "word ", "finish_reason": None}]})
        plant.running -= 1
        if plant.reports_usage:
            cached = length if known else int(length * plant.always_cached)
            self._event(
                {
                    "choices": [],
                    "usage": {
                        "prompt_tokens": length,
                        "completion_tokens": count,
                        "prompt_tokens_details": {"cached_tokens": cached},
                    },
                }
            )
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()


@contextmanager
def planted(plant: Plant) -> Iterator[str]:
    """The URL of an endpoint that is slow as planted."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Planted", (Handler,), {"plant": plant}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
