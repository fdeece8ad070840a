"""The triton kernels in Triton's interpreter, case by case. Run by test_triton_backend.py in a process of its own.

By hand: TRITON_INTERPRET=1 python -m pytest tests/engine_adapter/triton/interpreted_suite.py
"""

from __future__ import annotations

import pytest
import torch

from engine_adapter.attention import AttentionSettings, get_backend, triton_paged
from engine_adapter.attention.triton_check import device_error
from engine_adapter.attention.triton_paged import CHECK_ERROR, TritonPagedAttention
from tests.engine_adapter.triton.attention_cases import CASES, Case, TritonScene, check_case

torch.set_num_threads(1)


def backend() -> TritonPagedAttention:
    """Items of at most three blocks or so: every sequence of some length is split."""
    return TritonPagedAttention(programs=1000, item_tokens_min=48)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_equals_float64(case: Case) -> None:
    check_case(case, "cpu", backend())


def test_the_interpreter_is_what_runs() -> None:
    assert triton_paged.status() == (True, triton_paged.status()[1])
    assert "interpreted" in triton_paged.status()[1]
    assert triton_paged.supports("cpu")
    assert not triton_paged.supports("cuda")
    assert isinstance(get_backend("triton"), TritonPagedAttention)


@pytest.mark.parametrize("layer", [0, 1])
def test_other_layers(layer: int) -> None:
    scene, settings = TritonScene([(70, 1)], cold_share=0.5), AttentionSettings(0.25)
    found = scene.attend(backend(), layer, settings)
    torch.testing.assert_close(found, scene.expected(layer, settings), rtol=0, atol=2e-6)


def test_one_item_and_many_give_the_same() -> None:
    scene, settings = TritonScene([(150, 1), (64, 5)], cold_share=0.5), AttentionSettings(0.25)
    whole = scene.attend(TritonPagedAttention(programs=1, item_tokens_min=1 << 20), 0, settings)
    single_blocks = scene.attend(TritonPagedAttention(programs=1 << 20, item_tokens_min=1), 0, settings)
    assert not torch.equal(whole, single_blocks)
    torch.testing.assert_close(whole, single_blocks, rtol=0, atol=2e-6)


def test_queries_of_any_strides() -> None:
    scene, settings = TritonScene([(100, 1), (64, 5)], cold_share=0.5), AttentionSettings(0.25)
    straight = scene.attend(backend(), 0, settings)
    scene.query = scene.query.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert torch.equal(scene.attend(backend(), 0, settings), straight)


def test_the_self_test_passes_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_error("cpu") < CHECK_ERROR / 2
    monkeypatch.setattr("engine_adapter.attention.triton_launch._LOG2_E", 1.0)
    assert device_error("cpu") > CHECK_ERROR


@pytest.mark.parametrize("change", ["zeros", "scales", "codes", "bases"])
def test_a_changed_part_of_a_record_is_seen(change: str) -> None:
    """Each part of a record really takes part: a suite that never looked at one would pass with it ignored."""
    scene, settings = TritonScene([(100, 1)], cold_share=1.0), AttentionSettings(0.25)
    before = scene.attend(backend(), 0, settings)
    starts = {"codes": (0, 128, 256), "scales": (256, 288), "zeros": (272, 304), "bases": (312, 314)}[change]
    slot = int(scene.sequences[0].part.tables[0][2]) >> 1
    for start in starts:
        record = scene.slab.slot_bytes_view(1, slot)
        kept = record[start].clone()
        record[start] ^= 0x10
        assert not torch.equal(scene.attend(backend(), 0, settings), before), f"byte {start}"
        record[start] = kept
    assert torch.equal(scene.attend(backend(), 0, settings), before)
