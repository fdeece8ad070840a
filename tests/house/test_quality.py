"""The fidelity harness: it must see a form's errors, only where the cache would be cold, and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.quality import texts
from benchmarks.quality.after_hit import BAR
from benchmarks.quality.cold_forms import Fp8Form, Int4Form, Pair, RotatedQ40Form, Tally, as_blocks, as_rows
from benchmarks.quality.latent import LatentForm, PrincipalAxes
from benchmarks.quality.paged_reading import Fidelity, PagedReading, compare

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    """A Llama of random weights: says nothing of quality, but reads its cache as any does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def window() -> torch.Tensor:
    return torch.randint(0, 97, (1, 200), generator=torch.Generator().manual_seed(1))


class Recorder:
    """A form that notes what it was given and reads it back as it is, or emptied."""

    name = "recorder"

    def __init__(self, emptied: bool = False, protects_first_block: bool = True) -> None:
        self.protects_first_block = protects_first_block
        self.emptied = emptied
        self.seen: list[tuple[int, int]] = []

    def cooled(self, layer: int, keys: torch.Tensor, values: torch.Tensor, tally: Tally) -> Pair:
        self.seen.append((layer, keys.shape[1]))
        return (torch.zeros_like(keys), torch.zeros_like(values)) if self.emptied else (keys, values)


def kl(model: Any, window: torch.Tensor, form: Any, **reading: Any) -> float:
    found: dict[str, Fidelity] = {}
    compare(PagedReading(model, **reading), window, [form], found)
    return found[form.name].mean_kl


def test_emulation_without_a_form_is_the_models_own_attention(tiny_model: Any, window: torch.Tensor) -> None:
    positions = torch.arange(window.shape[1])
    tiny_model.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = tiny_model.model(window, use_cache=False).last_hidden_state[0]
    found = PagedReading(tiny_model).hidden(window, positions, None, Tally())
    assert (found - expected).norm() / expected.norm() < 0.02  # its cache is bf16
    assert (found - expected.roll(1, 0)).norm() / expected.norm() > 0.5


def test_a_form_that_changes_nothing_costs_nothing(tiny_model: Any, window: torch.Tensor) -> None:
    assert kl(tiny_model, window, Recorder(), hot_tokens=32) == pytest.approx(0, abs=1e-6)


def test_a_form_is_given_whole_blocks_of_every_layer_without_the_first(tiny_model: Any, window: torch.Tensor) -> None:
    form = Recorder()
    kl(tiny_model, window, form, hot_tokens=32)
    assert form.seen == [(0, 176), (1, 176)]  # 200 tokens: 12 whole blocks, the first left out
    form = Recorder(protects_first_block=False)
    kl(tiny_model, window, form, hot_tokens=32)
    assert form.seen == [(0, 192), (1, 192)]


def test_only_what_is_cold_is_read_in_its_form(tiny_model: Any, window: torch.Tensor) -> None:
    assert kl(tiny_model, window, Recorder(emptied=True), hot_tokens=32) > 0.01
    assert kl(tiny_model, window, Recorder(emptied=True), hot_tokens=192) == pytest.approx(0, abs=1e-6)


def test_a_constant_on_a_key_channel_is_invisible_to_softmax_but_not_to_fp8(
    tiny_model: Any, window: torch.Tensor
) -> None:
    plain, pushed = (kl(tiny_model, window, Fp8Form(), hot_tokens=32, stress=stress) for stress in (0.0, 30.0))
    assert pushed > 3 * plain


def test_blocks_and_rows_are_inverse() -> None:
    rows = torch.randn(3, 64, 8)
    blocks = as_blocks(rows)
    assert blocks.shape == (4, 1, 3, 16, 8)
    assert torch.equal(blocks[1, 0, 2], rows[2, 16:32])
    assert torch.equal(as_rows(blocks), rows)


def test_bits_are_counted_with_scales_and_padding() -> None:
    tally = Tally()
    keys = torch.randn(2, 64, 64).bfloat16().float()
    Int4Form().cooled(0, keys, keys, tally)
    assert tally.blocks == 4
    assert tally.values == 2 * keys.numel()
    assert tally.bits_a_value() == pytest.approx(1_180 * 8 / (2 * 16 * 64))
    assert tally.padded_bits_a_value() == pytest.approx(1_216 * 8 / (2 * 16 * 64))
    assert tally.bits_a_value() <= 4.65
    assert tally.padded_bits_a_value() <= 4.76


def test_a_refused_block_is_read_raw_and_counted_in_full() -> None:
    tally = Tally()
    keys = torch.randn(1, 32, 64)
    keys[0, 20, 3] = float("inf")
    read, _ = Int4Form().cooled(0, keys, torch.randn(1, 32, 64), tally)
    assert tally.raw_blocks == 1
    assert torch.equal(read[0, 16:], keys[0, 16:])
    assert not torch.equal(read[0, :16], keys[0, :16])
    assert tally.payload_bits == 8 * 1_180 + 16 * 2 * 16 * 64


def test_q4_0_is_within_half_a_step_in_rotated_space() -> None:
    rows = torch.randn(1, 16, 128)
    read, _ = RotatedQ40Form().cooled(0, rows, rows, Tally())
    error = (read - rows).norm() / rows.norm()
    assert 0.05 < error < 0.12


def test_latent_turns_there_and_back() -> None:
    axes = PrincipalAxes(rope_theta=10_000.0)
    keys, values = torch.randn(2, 48, 16), torch.randn(2, 48, 16)
    axes.cooled(0, keys, values, Tally())
    turn = axes.turns[0]
    back = axes.parted((axes.joined(keys, values) @ turn) @ turn.T, 2, 16)
    assert torch.allclose(back[0], keys, atol=1e-4)
    assert torch.allclose(back[1], values, atol=1e-4)
    int4 = LatentForm("int4", axes).cooled(0, keys, values, Tally())
    assert 0 < (int4[0] - keys).norm() / keys.norm() < 0.2


def test_windows_do_not_overlap_and_say_when_the_text_ends() -> None:
    found = texts.windows(lambda text: list(range(min(len(text), 1_000))), 6, 100, first_token=5)
    assert [len(window[0]) for window in found] == [100] * 6
    assert {int(window[0, 0]) for window in found} == {5}
    with pytest.raises(RuntimeError, match="hold"):
        texts.windows(lambda text: list(range(50)), 1, 100)


@pytest.mark.model
@pytest.mark.slow
def test_case_144_the_gate_is_quality_fidelity_holds_its_bars_on_a_short_window() -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--suite",
        "fidelity",
        "--quick",
        "--model",
        "smollm2",
        "--json",
        "-",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["smollm2_bits_a_value"]["value"] <= 4.65
    assert rows["smollm2_bits_a_value_padded"]["value"] <= 4.76
    assert 0 < rows["smollm2_mean_kl_vs_fp8"]["value"] <= BAR
    assert rows["smollm2_mean_kl_vs_q4_0"]["ratio"] >= 1 / 0.7
    assert rows["smollm2_stress30_mean_kl"]["value"] <= 0.004
    assert rows["smollm2_stress30_mean_kl"]["ratio"] >= 1 / 0.15
    assert {"latent_rewritten_mean_kl", "latent_random_outlier30_attention_error"} <= set(rows)
