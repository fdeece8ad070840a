"""Engines of one host over the daemon: what one process stored another loads, and the daemon may come and go."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, prompt
from tests.engine_adapter.vllm.peer import Peer
from tests.engine_adapter.vllm.test_processes import PROMPTS, WHOLE
from tests.kvstore.daemon.kit import ServeProcess, checked_daemon, settings, until

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


def test_the_daemon_says_what_engines_have_found(models: dict[str, Path], tmp_path: Path) -> None:
    """Once a request, whatever was asked for it and for storing: the first computes, the next finds, half of it."""
    with checked_daemon(settings(tmp_path, 64 << 20)) as daemon:

        def lookups() -> dict[str, Any]:
            return daemon.stats()["lookups"]  # type: ignore[no-any-return]

        with kit.engine(models["full"], {"daemon": daemon.settings.socket_path}) as engine:
            asked = prompt(91, 500)
            blocks = 499 // BLOCK
            expected, _ = engine.answer(asked)
            engine.settle()
            until(lambda: lookups()["lookups"] == 1)
            assert lookups()["missed_blocks"] == {"never_stored": blocks}
            engine.forget()
            assert engine.answer(asked) == (expected, blocks * BLOCK)
            until(lambda: lookups()["reused_tokens"] == blocks * BLOCK)
            found = lookups()
            assert found["lookups"] == 2
            assert (found["hit_blocks"], found["asked_blocks"]) == ({"host": blocks}, 2 * blocks)
            assert found["saved_prefill_seconds"] > 0, "the engine has told how fast it computes"
            engine.forget()
            assert engine.answer([*asked[:256], *prompt(92, 244)])[1] == 256 // BLOCK * BLOCK
            until(lambda: lookups()["lookups"] == 3)
            assert lookups()["hit_blocks"] == {"host": blocks + 256 // BLOCK}
            (top,) = daemon.stats()["prefixes"]
            assert (top["lookups"], top["longest_tokens"]) == (2, blocks * BLOCK)
