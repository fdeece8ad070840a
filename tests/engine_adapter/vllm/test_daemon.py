"""Engines of one host over the daemon: what one process stored another loads, and the daemon may come and go."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, prompt
from tests.engine_adapter.vllm.peer import Peer
from tests.engine_adapter.vllm.test_processes import PROMPTS, WHOLE
from tests.kvstore.daemon.kit import ServeProcess, until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]


def test_another_process_loads_and_a_daemon_that_restarts_is_missed_and_found_again(
    models: dict[str, Path], peer: Peer, tmp_path: Path
) -> None:
    socket = tmp_path / "socket"
    daemon = ServeProcess(socket, "--host-bytes", "64MiB")
    stored = peer.run(models["hybrid"], {"daemon": str(socket)}, PROMPTS)
    assert stored["hits"] == 0
    with kit.engine(models["hybrid"], {"daemon": str(socket)}) as engine:
        for asked, (tokens, _), whole in zip(PROMPTS, stored["answers"], WHOLE, strict=True):
            assert engine.answer(asked) == (tuple(tokens), whole)
        assert engine.external_hits() == engine.shelf.below.counters()["loaded_tokens"] == sum(WHOLE)

        asked = prompt(90, 500)
        expected, _ = engine.answer(asked)
        engine.settle()
        daemon.kill()
        engine.forget()
        begun = time.monotonic()
        assert engine.answer(asked) == (expected, 0)
        assert time.monotonic() - begun < 30  # nothing waits for who is not there
        tier = engine.shelf.below.tiers[0]
        assert not tier.is_up

        daemon = ServeProcess(socket, "--host-bytes", "64MiB")
        until(lambda: tier.contains([]) == [] and tier.used_bytes >= 0 and tier.is_up, 30, "the tier connects again")
        engine.forget()
        assert engine.answer(asked) == (expected, 0)  # it restarted empty
        engine.forget()
        assert engine.answer(asked) == (expected, 499 // BLOCK * BLOCK)
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        daemon.stop()
        assert not engine.llm.reset_prefix_cache(reset_connector=True)  # a store that is not reached is not reset
