"""What adapters write for `kvstore record`: transformers' caches, and vLLM's connector without vLLM."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_adapter.transformers_cache.recording import CacheRecording
from engine_adapter.vllm_connector.recording import ended_request
from kvstore.simulation import read
from kvstore.trace_recorder import FILE_VARIABLE, TraceRecorder
from tests.engine_adapter.generate_kit import BLOCK, NEW_TOKENS, generate, opened, random_ids
from tests.engine_adapter.paged_kit import tiny_model
from tests.engine_adapter.test_vllm_book import Request, book, nothing
from tests.engine_adapter.vllm_kit import BLOCK as VLLM_BLOCK
from tests.engine_adapter.vllm_kit import identity


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def test_every_prompt_of_generate_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.jsonl"
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    head = random_ids(2 * BLOCK)
    first, second = head + random_ids(5), head + random_ids(5)
    with opened(tiny_model("llama")) as ours:
        for ids in ([first, second], [first]):
            cache = ours.cache()
            generate(ours.model, torch.tensor(ids), cache)
            cache.finish()
        other = ours.cache(tenant="acme")
        generate(ours.model, torch.tensor([first]), other)
        del other
    one, two, again, tenants = lines_of(path)
    assert [line["input_length"] for line in (one, two, again, tenants)] == [2 * BLOCK + 5] * 4
    # The last token that is drawn is never fed, so the cache does not see it.
    assert [line["output_length"] for line in (one, two, again, tenants)] == [NEW_TOKENS - 1] * 4
    assert one["hash_ids"] == again["hash_ids"] == two["hash_ids"]
    assert not set(one["hash_ids"]) & set(tenants["hash_ids"])
    assert "tenant" in tenants
    assert "tenant" not in one
    assert len(read(path)) == 4


def test_the_answer_of_a_row_is_its_own_prompts_alone(tmp_path: Path) -> None:
    """Found here: a prompt that another begins with had the other's tokens as output too."""
    recorder = TraceRecorder(tmp_path / "t.jsonl", bytes(32), BLOCK)
    cache = CacheRecording(recorder, identity(), BLOCK)
    short, long = [1] * BLOCK, [1] * (3 * BLOCK)
    cache.begin([short, long], [[], []])
    cache.end([[*short, 5, 5], [*long, 6, 6, 6]], failed=False)
    recorder.close()
    assert [line["output_length"] for line in lines_of(tmp_path / "t.jsonl")] == [2, 3]


def test_vllm_s_requests_are_named_as_their_blocks_are(tmp_path: Path) -> None:
    made = book(nothing)
    recorder = TraceRecorder(tmp_path / "t.jsonl", identity().root(), VLLM_BLOCK)
    more = {"arrival_time": time.time() - 2.0, "get_finished_reason": lambda: "length"}
    requests = [
        Request("plain", range(10), **more),
        Request("salted", range(10), cache_salt="alice", **more),
        Request("again", range(10), **more),
    ]
    for request in requests:
        made.matched_tokens(request, 0)
        request.all_token_ids += [7, 8, 9]
        chain = made.chain_of(request)
        assert chain is not None
        recorder.record(ended_request(request, chain, VLLM_BLOCK, None))
        made.finished(request.request_id)
        assert made.chain_of(request) is None
    recorder.close()
    plain, salted, again = lines_of(tmp_path / "t.jsonl")
    assert plain["hash_ids"] == again["hash_ids"] == recorder.hash_ids(list(range(10)))
    assert not set(plain["hash_ids"]) & set(salted["hash_ids"])
    assert "tenant" in salted
    assert (plain["input_length"], plain["output_length"], plain["finish"]) == (10, 3, "length")
