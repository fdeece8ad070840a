"""Quality as a gate: what a real model predicts over hundreds of tokens decoded behind INT4 blocks, by each backend.

Tokens a second say nothing here: a kernel that reads its blocks wrongly is as quick as one that reads them rightly.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.quality import texts
from engine_adapter.model_source import load_model
from engine_adapter.request import Request
from quant import native
from tests.integration.model_kit import ModelKit

pytestmark = [pytest.mark.model, pytest.mark.slow]

SEQUENCES, PROMPT, DECODED, SPOILED = 4, 256, 150, 4
KL_BAR, TOP1_FLOOR = 0.006, 0.95
"""Twice the bar over all positions, as after a hit: here every token that is scored has cold blocks before it."""

Windows = list[list[int]]


@pytest.fixture(scope="module")
def case() -> tuple[Any, Windows, list[torch.Tensor]]:
    """The model, real text, and per window log-probabilities float32[DECODED + SPOILED, vocab] in full precision."""
    try:
        loaded = load_model(None, torch.float32)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    tokenizer = loaded.tokenizer
    length = PROMPT + DECODED + SPOILED
    windows = [
        one[0].tolist()
        for one in texts.windows(texts.tokenizer_of(tokenizer), SEQUENCES, length, first_token=tokenizer.bos_token_id)
    ]
    with torch.inference_mode():
        expected = [
            torch.log_softmax(loaded.model(torch.tensor([one])).logits[0, PROMPT - 1 : -1].float(), -1)
            for one in windows
        ]
    return loaded.model, windows, expected


def keep(kept: list[torch.Tensor], _branch: int, _position: int, logits: torch.Tensor) -> None:
    kept.append(torch.log_softmax(logits.float(), -1))


def spoil_cold_blocks(kit: ModelKit) -> None:
    """What a kernel sees that takes one sequence's cold blocks for another's: sound numbers, all at the wrong place."""
    slab = kit.store.slab
    assert slab is not None
    tables = [kit.store.tables(name)[0].tolist() for name in kit.store.sequence_ids()]
    records = [slab.slot_bytes_view(1, entry >> 1) for table in tables for entry in table if entry & 1]
    before = [one.clone() for one in records]
    away = len(records) // len(tables)
    for record, other in zip(records, before[away:] + before[:away], strict=True):
        record.copy_(other)


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.nightly)])
def test_case_144_hundreds_of_decoded_tokens_behind_cold_blocks_are_as_good_as_full_precision(
    case: tuple[Any, Windows, list[torch.Tensor]], backend: str
) -> None:
    if backend == "native" and native.kernels is None:
        pytest.skip(f"no C kernels: {native.reason}")
    model, windows, expected = case
    kit = ModelKit(model, blocks=SEQUENCES * 40, codec="int4", backend=backend, step_tokens=1024)
    kept: list[list[torch.Tensor]] = [[] for _ in windows]
    try:
        for number, window in enumerate(windows):
            kit.loop.submit(
                Request(
                    f"r{number}",
                    window[:PROMPT],
                    max_new_tokens=DECODED + SPOILED,
                    forced_token_ids=window[PROMPT:],
                    keep_logits=partial(keep, kept[number]),
                )
            )
        while min(map(len, kept)) < DECODED:
            if kit.loop.step().idle:
                kit.store.wait(0.05)
        tables = [kit.store.tables(name)[0] for name in kit.store.sequence_ids()]
        cold_share = sum(int((one & 1).sum()) for one in tables) / sum(map(len, tables))
        spoil_cold_blocks(kit)
        kit.run()
    finally:
        kit.close()
    assert cold_share > 0.6, "most of what was read at the end was INT4, or this proves nothing"
    found = torch.stack([torch.stack(one) for one in kept])
    truth = torch.stack(expected)
    divergence = (truth.exp() * (truth - found)).sum(-1)
    agrees = (truth.argmax(-1) == found.argmax(-1)).float()
    scored = divergence[:, :DECODED]
    print(f"{backend}: {scored.numel()} tokens, mean KL {scored.mean():.5f}, top-1 {agrees[:, :DECODED].mean():.1%}")
    assert scored.numel() >= 512
    assert 0 < scored.mean() <= KL_BAR
    assert scored[:, DECODED // 2 :].mean() <= KL_BAR, "it goes wrong the longer it decodes"
    assert agrees[:, :DECODED].mean() >= TOP1_FLOOR
    assert divergence[:, DECODED + 1 :].mean() > 10 * KL_BAR, "the control: spoiled blocks must show"
