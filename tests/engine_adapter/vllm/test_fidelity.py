"""What encoded copies cost a real model's answers in vLLM."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from engine_adapter.model_source import packaged_model_dir
from engine_adapter.vllm_connector.forms import Forms
from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import Engine

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
BAR = 0.006  # mean KL over the tokens that follow a hit on encoded copies, as in our own loop
DOCS = Path(__file__).parents[3] / "docs"
PREFIX, WHOLE = 512, 768
POSITIONS = range(PREFIX + 8, PREFIX + 128, 16)


@pytest.fixture(scope="module", params=["host_bytes", "device_int4_bytes"])
def smollm(request: pytest.FixtureRequest) -> Iterator[Engine]:
    try:
        folder = packaged_model_dir()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    settings = {"kv_cache_memory_bytes": 256 << 20, "max_logprobs": 64}
    with kit.engine(folder, {request.param: "256 MiB", "codec": "int4"}, **settings) as made:
        made.folder = folder  # type: ignore[attr-defined]
        yield made


def windows(folder: Path, count: int) -> list[list[int]]:
    """Pieces of our own documentation, WHOLE tokens each."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("architecture.md", "formats/frame.md")]
    token_ids = tokenizer("\n".join(pages))["input_ids"]
    assert len(token_ids) >= count * WHOLE
    return [token_ids[at * WHOLE : (at + 1) * WHOLE] for at in range(count)]


def next_token(engine: Engine, token_ids: list[int]) -> dict[int, float]:
    """Log-probabilities of the likeliest 64."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, logprobs=64)
    (out,) = engine.llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False)
    (found,) = out.outputs[0].logprobs
    return {token: one.logprob for token, one in found.items()}


def divergence(expected: dict[int, float], found: dict[int, float]) -> float:
    """KL where both name a token, all others taken as one."""
    shared = [token for token in expected if token in found]
    rest = [max(1e-9, 1.0 - sum(math.exp(one[token]) for token in shared)) for one in (expected, found)]
    named = sum(math.exp(expected[token]) * (expected[token] - found[token]) for token in shared)
    return named + rest[0] * math.log(rest[0] / rest[1])


def after_a_hit(engine: Engine, texts: list[list[int]]) -> tuple[float, float]:
    """Mean KL and agreement of the likeliest token, behind a prefix that lies in the middle of what was stored."""
    engine.forget(store_too=True)
    expected = [[next_token(engine, text[:at]) for at in POSITIONS] for text in texts]
    engine.forget(store_too=True)
    for text in texts:
        engine.answer(text, 1)
    engine.forget()
    loaded = engine.shelf.below.counters().get("loaded_tokens", 0)
    found = [[next_token(engine, text[:at]) for at in POSITIONS] for text in texts]
    assert engine.shelf.below.counters()["loaded_tokens"] - loaded >= len(texts) * PREFIX
    pairs = [pair for one in zip(expected, found, strict=True) for pair in zip(*one, strict=True)]
    agreed = sum(max(one, key=one.__getitem__) == max(other, key=other.__getitem__) for one, other in pairs)
    return sum(divergence(*pair) for pair in pairs) / len(pairs), agreed / len(pairs)


def test_a_real_model_keeps_the_fidelity_bar_after_a_hit(smollm: Engine) -> None:
    tier = smollm.shelf.below.tiers[0].name
    count = 4 if tier == "host" else 2
    mean_kl, agreement = after_a_hit(smollm, windows(smollm.folder, count))  # type: ignore[attr-defined]
    assert smollm.shelf.below.counters()[f"loaded_blocks_{tier}"] >= count * PREFIX // kit.BLOCK
    print(f"{tier}: mean KL {mean_kl:.5f}, agreement {agreement:.3f}")
    assert 0 < mean_kl <= BAR
    assert agreement >= 0.9


def test_planted_coarser_values_break_the_bar(smollm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Forms._decode

    def coarser(self: Forms, group: int, form: int, heads: Any, payloads: Any, count: int, target: Any) -> None:
        real(self, group, form, heads, payloads, count, target)
        target[0].mul_(1.2)

    from_slots = Forms.read_places

    def coarser_slots(self: Forms, group: int, form: int, memory: Any, places: Any, target: Any) -> None:
        from_slots(self, group, form, memory, places, target)
        self._tensors(group, self.own[group], target, len(places))[0].mul_(1.2)

    monkeypatch.setattr(Forms, "_decode", coarser)
    monkeypatch.setattr(Forms, "read_places", coarser_slots)
    mean_kl, _ = after_a_hit(smollm, windows(smollm.folder, 1))  # type: ignore[attr-defined]
    assert mean_kl > BAR
