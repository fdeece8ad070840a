"""Tiny random-weight models of each attention family, against transformers' own generate and forward.

A random model proves something only if a mistake would show. So every family also runs with a planted mistake in the
backend (window ignored, one too wide, no softcap, no sinks), which must move the logits by far more than rounding.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from allocator import CacheGroup, ConfigError, UsageError
from engine_adapter.attention import AttentionSettings
from engine_adapter.attention.torch_paged import TorchPagedAttention
from engine_adapter.batch import StepBatch
from engine_adapter.runner import HFRunner
from tests.engine_adapter.paged_kit import Paged, reference_logits, reference_tokens, tiny_model

FAMILIES = ("llama", "mqa", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gemma3n")
SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss")
_draw = random.Random(5)
PROMPT = [_draw.randrange(1, 97) for _ in range(75)]
ROUNDING = 1e-4
MISTAKE = 1e-2


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_greedy_tokens_equal_generate_at_every_chunk_size(family: str) -> None:
    model = tiny_model(family)
    expected = reference_tokens(model, PROMPT, 24)
    assert len(set(expected)) >= 6, "a model that repeats itself would hide mistakes"
    paged = Paged(model)
    for chunk in (200, 30, 16, 7):
        assert paged.generate(f"chunk {chunk}", PROMPT, 24, chunk) == expected, f"chunk {chunk}"


def test_logits_of_every_position_equal_a_plain_forward(family: str) -> None:
    model = tiny_model(family)
    expected = reference_logits(model, PROMPT)
    paged = Paged(model)
    first = paged.step(paged.slice("one", PROMPT[:40], 40))
    second = paged.step(paged.slice("one", PROMPT[40:], 35))
    torch.testing.assert_close(torch.cat((first, second)), expected, rtol=0, atol=ROUNDING)


def test_case_063_resuming_at_every_split_point_equals_computing_all(family: str) -> None:
    model = tiny_model(family)
    expected = reference_logits(model, PROMPT)[-1]
    for split in range(1, len(PROMPT)):
        paged = Paged(model)
        paged.step(paged.slice("one", PROMPT[:split], 0))
        rest = paged.slice("one", PROMPT[split:], 1)
        assert rest.start == split
        torch.testing.assert_close(paged.step(rest)[-1], expected, rtol=0, atol=ROUNDING)
        paged.runner.release()


def test_mixed_batch_of_prefill_verify_and_decode_equals_each_alone(family: str) -> None:
    model = tiny_model(family)
    prompts = {f"s{length}": PROMPT[:length] for length in (1, 15, 16, 17, 33, 60)}
    expected = {name: reference_logits(model, [*ids, 5, 7, 11, 13]) for name, ids in prompts.items()}
    expected_fresh = reference_logits(model, PROMPT[:40])[-3:]
    paged = Paged(model)
    for name, ids in prompts.items():
        paged.step(paged.slice(name, ids, 0))
    fresh = paged.slice("fresh", PROMPT[:40], 3)
    parts = [paged.slice(name, [5] if at % 2 else [5, 7, 11, 13]) for at, name in enumerate(prompts)]
    found = paged.step(parts[0], fresh, *parts[1:])
    wanted = [expected["s1"][len(prompts["s1"]) + 3][None], expected_fresh]
    for at, (name, ids) in list(enumerate(prompts.items()))[1:]:
        wanted.append(expected[name][len(ids) + (0 if at % 2 else 3)][None])
    torch.testing.assert_close(found, torch.cat(wanted), rtol=0, atol=ROUNDING)


def test_rejected_draft_tokens_leave_no_trace(family: str) -> None:
    model = tiny_model(family)
    expected = reference_logits(model, PROMPT[:64])[-4:]
    paged = Paged(model)
    paged.step(paged.slice("one", PROMPT[:60], 0))
    paged.step(paged.slice("one", [1, 2, 3, 4, 5], 5))  # drafts, all rejected
    paged.rewind("one", 60)
    found = paged.step(paged.slice("one", PROMPT[60:64], 4))
    torch.testing.assert_close(found, expected, rtol=0, atol=ROUNDING)


class _Mistaken(TorchPagedAttention):
    """The backend with one planted mistake."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self._mistake = mistake

    def plan(self, cache: Any, group: int, batch: StepBatch) -> Any:
        geometry = cache.geometry
        window = geometry.groups[group].window_tokens
        if window is None or not self._mistake.startswith("window"):
            return super().plan(cache, group, batch)
        wider = 1000 if self._mistake == "window ignored" else window + int(self._mistake.removeprefix("window"))
        groups = list(geometry.groups)
        groups[group] = replace(groups[group], window_tokens=wider)
        cache.geometry = replace(geometry, groups=tuple(groups))
        try:
            return super().plan(cache, group, batch)
        finally:
            cache.geometry = geometry

    def attend(
        self, plan: Any, layer: int, query: Any, keys: Any, values: Any, settings: AttentionSettings
    ) -> torch.Tensor:
        if self._mistake == "no sinks":
            settings = replace(settings, sinks=None)
        if self._mistake == "no softcap":
            settings = replace(settings, softcap=None)
        if self._mistake == "own scaling":
            settings = replace(settings, scaling=query.shape[-1] ** -0.5)
        return super().attend(plan, layer, query, keys, values, settings)


@pytest.mark.parametrize("chunk", [200, 12])
@pytest.mark.parametrize(
    ("family", "mistake"),
    [
        *((family, mistake) for family in SLIDING for mistake in ("window ignored", "window+1", "window-1")),
        ("gpt_oss", "no sinks"),
        ("gemma2", "no softcap"),
        ("gemma2", "own scaling"),
        ("gemma3", "own scaling"),
    ],
)
def test_planted_mistakes_show(family: str, mistake: str, chunk: int) -> None:
    model = tiny_model(family)
    expected = reference_logits(model, PROMPT)[-1]
    wrong = _KeepsAll(model, backend=_Mistaken(mistake))
    assert (wrong.prefill("one", PROMPT, chunk) - expected).abs().max() > MISTAKE
    wrong.runner.release()
    right = _KeepsAll(model, backend=_Mistaken("none"))
    assert (right.prefill("one", PROMPT, chunk) - expected).abs().max() < ROUNDING


class _KeepsAll(Paged):
    """Never drops a block, so that a window that is too wide finds KV to read."""

    def drop(self, table: list[int], count: int) -> None:
        del table, count


def test_wrong_positions_show() -> None:
    model = tiny_model("llama")
    expected = reference_logits(model, PROMPT[:48])[-1]
    paged = Paged(model)
    paged.step(paged.slice("one", PROMPT[:32], 0))
    part = paged.slice("one", PROMPT[32:48], 1)
    flatten = paged.runner._flatten

    def restarted(batch: StepBatch) -> Any:
        token_ids, positions, rows = flatten(batch)
        return token_ids, positions - 32, rows

    paged.runner._flatten = restarted  # type: ignore[method-assign]
    found = paged.step(part)[-1]
    assert (found - expected).abs().max() > MISTAKE


def test_reversed_tables_are_refused_or_show() -> None:
    paged = _KeepsAll(tiny_model("mistral"))
    paged.step(paged.slice("one", PROMPT[:64], 0))
    part = paged.slice("one", PROMPT[64:70], 1)
    with pytest.raises(UsageError, match="slot mapping"):
        paged.step(replace(part, tables=(part.tables[0][::-1].copy(),)))
    swapped = part.tables[0].copy()
    swapped[[2, 3]] = swapped[[3, 2]]
    right, wrong = paged.step(part)[-1], paged.step(replace(part, tables=(swapped,)))[-1]
    assert (right - wrong).abs().max() > MISTAKE


def test_a_geometry_with_another_window_is_refused() -> None:
    model = tiny_model("mistral")
    runner = HFRunner(model)
    geometry = runner.geometry
    runner.release()
    groups: tuple[CacheGroup, ...] = (replace(geometry.groups[0], window_tokens=21),)
    paged = Paged(model, geometry=replace(geometry, groups=groups))
    with pytest.raises(ConfigError, match="window of 20"):
        paged.step(paged.slice("one", PROMPT[:10]))
