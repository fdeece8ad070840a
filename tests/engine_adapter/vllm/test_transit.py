"""Bytes that change between a server and a real vLLM engine are noticed, and what they were to be is computed."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, prompt
from tests.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
_LARGE_BYTES = 4096  # payload, and no answer to a question


class Wire:
    """Between a client and a server; while `is_bad`, one bit of each large piece from the server arrives flipped."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.is_bad = False
        self.flipped = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                for source, target, is_reply in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._carry, args=(source, target, is_reply), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while piece := bytearray(source.recv(1 << 16)):
                if is_reply and self.is_bad and len(piece) > _LARGE_BYTES:
                    piece[len(piece) // 2] ^= 4
                    self.flipped += 1
                target.sendall(piece)
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("family", ["full", "hybrid"])
def test_bytes_that_change_on_their_way_are_noticed_and_computed(models: dict[str, Path], family: str) -> None:
    asked = prompt(95, 600)
    with Server() as server:
        wire = Wire(server.port)
        with kit.engine(models[family], {"redis_url": f"redis://127.0.0.1:{wire.port}"}) as engine:
            expected, _ = engine.answer(asked)
            engine.forget()
            wire.is_bad = True
            answer, cached = engine.answer(asked)
            wire.is_bad = False
            counts = engine.shelf.below.counters()
            assert wire.flipped
            assert answer == expected
            assert counts["loads_failed"] == 1
            assert sum(count for name, count in counts.items() if "corrupt" in name)
            assert cached < 599 // BLOCK * BLOCK
            engine.forget()
            assert engine.answer(asked) == (expected, 599 // BLOCK * BLOCK)  # stored anew
        wire.close()
