"""Engines that come and go: what one stored, the next loads in another process, from disk and from a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvstore.simulation import read
from kvstore.trace_recorder import FILE_VARIABLE
from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, prompt
from tests.engine_adapter.vllm.peer import Peer
from tests.servers import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

PROMPTS = [prompt(30, 300), prompt(31, 520)]
LARGE = 64  # a block of so many tokens lies in a slot file, not in the index
WHOLE = [(len(one) - 1) // BLOCK * BLOCK for one in PROMPTS]


def here(model: Path, tiers: dict[str, Any]) -> dict[str, Any]:
    """As the peer's `run`, in this process."""
    with kit.engine(model, tiers) as engine:
        answers = [engine.answer(one) for one in PROMPTS]
        engine.settle()
        return {"answers": [[list(tokens), cached] for tokens, cached in answers], "hits": engine.external_hits()}


def test_disk_serves_the_next_process_and_bad_bytes_are_computed(
    models: dict[str, Path], peer: Peer, tmp_path: Path
) -> None:
    tiers = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "64 MiB", "block_tokens": LARGE}
    first = here(models["full"], tiers)
    assert [cached for _, cached in first["answers"]] == [0, 0]
    second = peer.run(models["full"], tiers, PROMPTS)
    assert [tokens for tokens, _ in second["answers"]] == [tokens for tokens, _ in first["answers"]]
    whole = [(len(one) - 1) // LARGE * LARGE for one in PROMPTS]
    assert [cached for _, cached in second["answers"]] == whole
    assert second["hits"] == sum(whole)
    (slots,) = (tmp_path / "disk").glob("slots-*")
    raw = bytearray(slots.read_bytes())
    for at in range(3000, len(raw), 16384):  # some bytes of every copy
        raw[at] ^= 0x40
    slots.write_bytes(raw)
    third = here(models["full"], tiers)
    assert [tokens for tokens, _ in third["answers"]] == [tokens for tokens, _ in first["answers"]]


def test_a_server_serves_engines_of_the_same_weights_whatever_their_ranks(
    models: dict[str, Path], peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks store half of the heads each; one that has all of them reads both. What it served is recorded."""
    with Server() as server:
        tiers = {"redis_url": server.url}
        first = peer.run(models["hybrid"], tiers, PROMPTS, ranks=2)
        monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "trace.jsonl"))
        second = here(models["hybrid"], tiers)
        monkeypatch.delenv(FILE_VARIABLE)
        other = here(models["hybrid"], {**tiers, "weights": "others"})
    assert second["answers"] == [[tokens, whole] for (tokens, _), whole in zip(first["answers"], WHOLE, strict=True)]
    assert (first["hits"], second["hits"], other["hits"]) == (0, sum(WHOLE), 0)
    trace = read(tmp_path / "trace.jsonl")
    assert trace.input_tokens.tolist() == [len(one) for one in PROMPTS]
    assert trace.output_tokens.tolist() == [len(tokens) for tokens, _ in second["answers"]]
