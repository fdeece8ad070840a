"""The runner under the decode loop and the store: real attention over blocks that are shared, evicted and fetched."""

from __future__ import annotations

from typing import Any

import pytest

from engine_adapter import DecodeLoop, HFRunner, Request
from tests.engine_adapter.loop_kit import make_store, prompt
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model

NEW_TOKENS = 20
FAMILIES = ("llama", "gemma3", "mistral", "gpt_oss", "gemma2", "deepseek_v3", "gemma3n")


def _tokens(seed: int, count: int) -> list[int]:
    return [token % 90 + 1 for token in prompt(seed, count)]


def _prompts() -> dict[str, list[int]]:
    """Prompts of 10 to 122 tokens, some with a shared start of one, two or three blocks."""
    shared = _tokens(1, 64)
    return {f"r{at}": shared[: 16 * (at % 4)] + _tokens(at + 5, 10 + 7 * at) for at in range(8)}


class _Served:
    """A loop over a model, a runner and a store of `blocks` blocks."""

    def __init__(self, model: Any, blocks: int) -> None:
        self.runner = HFRunner(model)
        self.store = make_store(self.runner.geometry, blocks=blocks, host_blocks=8)
        self.runner.attach(self.store.slab, self.store.cold_codec)
        self.loop = DecodeLoop(self.runner, self.store)
        self.reused_tokens = 0

    def serve(self, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
        for name, token_ids in prompts.items():
            self.loop.submit(Request(name, token_ids, NEW_TOKENS))
        results = self.loop.run()
        self.store.check_invariants()
        self.reused_tokens += sum(sum(results[name].reused_tokens.values()) for name in prompts)
        return {name: list(results[name].token_ids) for name in prompts}


@pytest.mark.parametrize("blocks", [64, 24], ids=["ample", "tight"])
@pytest.mark.parametrize("family", FAMILIES)
def test_served_tokens_equal_generate(family: str, blocks: int) -> None:
    model = tiny_model(family)
    expected = {name: reference_tokens(model, token_ids, NEW_TOKENS) for name, token_ids in _prompts().items()}
    served = _Served(model, blocks)
    assert served.serve(_prompts()) == expected
    assert served.reused_tokens > 0, "prompts share their starts"
    served.store.close()


@pytest.mark.parametrize("family", ["gemma3", "mistral", "gpt_oss"])
def test_case_037_the_same_prompt_again_and_again_between_evictions(family: str) -> None:
    model = tiny_model(family)
    token_ids = _tokens(3, 90)
    expected = reference_tokens(model, token_ids, NEW_TOKENS)
    served = _Served(model, 24)
    for turn in range(10):
        assert served.serve({f"same {turn}": token_ids})[f"same {turn}"] == expected, f"turn {turn}"
        for other in range(2 * (turn % 4)):
            served.serve({f"other {turn} {other}": _tokens(100 + 10 * turn + other, 40 + 15 * turn)})
    assert 0 < served.reused_tokens < 9 * 80, "hits and evictions both, or this proves nothing"
    served.store.close()
