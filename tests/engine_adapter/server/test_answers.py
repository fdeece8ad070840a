"""What the server answers, over real HTTP, against transformers' own generate."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine_adapter.server.server_kit import Client

PROMPT = "The quick brown fox jumps over the lazy dog, and then over everything else. " * 2


@pytest.fixture(scope="module")
def truth(tiny_folder: Path) -> Any:
    """(prompt, tokens) -> the text and token count that transformers' generate gives, greedily."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)

    def generate(prompt: str, count: int) -> tuple[str, int]:
        ids = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            out = model.generate(**ids, max_new_tokens=count, do_sample=False, pad_token_id=0)[
                0, ids.input_ids.shape[1] :
            ]
        return tokenizer.decode(out, skip_special_tokens=True), len(out)

    return generate


@pytest.mark.parametrize("prompt", [PROMPT, "a", "Grüße aus Österreich: 日本語 ✓", "x" * 700])
def test_a_completion_is_what_the_model_says(client: Client, truth: Any, prompt: str) -> None:
    text, count = truth(prompt, 24)
    answer = client.complete(prompt, max_tokens=24)
    (choice,) = answer["choices"]
    assert choice["text"] == text
    assert choice["finish_reason"] == ("length" if count == 24 else "stop")
    assert answer["usage"]["completion_tokens"] == count
    assert answer["usage"]["prompt_tokens"] == len(prompt.encode())
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")


def test_a_stream_is_the_same_in_pieces(client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=40, ignore_eos=True)
    asked = {"prompt": PROMPT, "max_tokens": 40, "ignore_eos": True, "stream_options": {"include_usage": True}}
    events = list(client.stream("/v1/completions", **asked))
    *pieces, usage = events
    assert "".join(one["choices"][0]["text"] for one in pieces) == whole["choices"][0]["text"]
    assert [one["choices"][0]["finish_reason"] for one in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len(pieces) == 40 + 1, "a piece for every token, and the end"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 40
    assert len({one["id"] for one in events}) == 1


def test_usage_says_what_was_reused(client: Client) -> None:
    prompt = "Something that nobody has asked before, at least not here. " * 4
    first, second = client.complete(prompt, max_tokens=4), client.complete(prompt, max_tokens=4)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert len(prompt) - 32 < cached < len(prompt)
    assert first["choices"] == second["choices"]


def test_chat_goes_through_the_models_template(client: Client) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    plain = client.complete("<system>Be brief.\u0003<user>Hi\u0003<assistant>", max_tokens=12, ignore_eos=True)
    asked = {"messages": messages, "max_tokens": 12, "ignore_eos": True}
    status, answer = client.post("/v1/chat/completions", **asked, temperature=0)
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": plain["choices"][0]["text"]}
    pieces = list(client.stream("/v1/chat/completions", **asked))
    deltas = [one["choices"][0]["delta"] for one in pieces]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == plain["choices"][0]["text"]


def test_token_ids_are_a_prompt_too(client: Client) -> None:
    text = client.complete("Hello there", max_tokens=6)
    ids = client.complete(text_ids := [*b"placeholder"], max_tokens=6)
    assert ids["usage"]["prompt_tokens"] == len(text_ids)
    assert client.complete([text_ids], max_tokens=6)["choices"] == ids["choices"]
    assert client.complete(["Hello there"], max_tokens=6)["choices"] == text["choices"]


def test_a_stop_text_ends_the_answer_before_it(client: Client) -> None:
    whole = client.complete(PROMPT, max_tokens=60, ignore_eos=True)["choices"][0]["text"]
    stop = whole[20:23]
    expected = whole[: whole.index(stop)]
    answer = client.complete(PROMPT, max_tokens=60, ignore_eos=True, stop=["not there at all", stop])
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (expected, "stop")
    assert answer["usage"]["completion_tokens"] < 60
    pieces = list(client.stream("/v1/completions", prompt=PROMPT, max_tokens=60, ignore_eos=True, stop=stop))
    assert "".join(one["choices"][0]["text"] for one in pieces) == expected
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
    client.wait_until_idle()


def test_several_branches(client: Client) -> None:
    answer = client.complete(PROMPT, max_tokens=10, n=3, temperature=1.0, seed=7, ignore_eos=True)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    again = client.complete(PROMPT, max_tokens=10, n=3, temperature=1.0, seed=7, ignore_eos=True)
    assert [choice["text"] for choice in again["choices"]] == texts
    assert answer["usage"]["completion_tokens"] == 30


def test_many_at_once_get_what_each_gets_alone(client: Client) -> None:
    prompts = [f"{number} {PROMPT[: 20 + 9 * number]}" for number in range(12)]
    alone = [client.complete(prompt, max_tokens=16, ignore_eos=True)["choices"][0]["text"] for prompt in prompts]

    def streamed(prompt: str) -> str:
        events = client.stream("/v1/completions", prompt=prompt, max_tokens=16, ignore_eos=True)
        return "".join(one["choices"][0]["text"] for one in events)

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(streamed, prompts)) == alone


def test_models_health_and_metrics(client: Client) -> None:
    assert client.get("/healthz")[0] == 200
    status, models = client.get("/v1/models")
    assert status == 200
    assert '"id":"tiny"' in models
    client.complete(PROMPT, max_tokens=4)
    status, text = client.get("/metrics")
    assert status == 200
    assert "kvstore_computed_tokens_total" in text
    assert 'kvstore_server_ttft_seconds{quantile="0.5"}' in text
