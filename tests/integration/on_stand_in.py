"""`device_cases` on the stand-in. Not collected with the rest: `test_stand_in` runs it in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quant import BlockShape
from tests.engine_adapter.card_copies_suite import SCENARIOS
from tests.engine_adapter.torch_copier import TorchMachine
from tests.engine_adapter.triton.attention_cases import CASES, Case
from tests.integration import device_cases
from tests.integration.stand_in import open_device

DEVICE = open_device()


def test_devices_do_not_mix() -> None:
    """The stand-in would show what it is there for."""
    ours, other = torch.zeros(3, device=DEVICE), torch.zeros(3)
    with pytest.raises(RuntimeError, match="same device"):
        ours + other
    with pytest.raises(RuntimeError):
        ours.numpy()
    assert ours.copy_(other + 2).sum().item() == 6
    assert (ours[1:].cpu() == 2).all()
    device_cases.check_mixed_devices(DEVICE)


@pytest.mark.parametrize("name", device_cases.CODECS)
@pytest.mark.parametrize("shape", device_cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", device_cases.DTYPES, ids=str)
def test_codecs(name: str, shape: BlockShape, dtype: torch.dtype) -> None:
    device_cases.check_codec(DEVICE, name, shape, dtype)


def test_slab() -> None:
    device_cases.check_slab(DEVICE)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention(case: Case) -> None:
    device_cases.check_attention(DEVICE, case)


@pytest.mark.parametrize("family", device_cases.FAMILIES)
def test_the_loop_equals_generate(family: str) -> None:
    device_cases.check_loop(DEVICE, family)


def test_the_loop_over_a_disk(tmp_path: Path) -> None:
    device_cases.check_loop(DEVICE, "llama", tmp_path)


@pytest.mark.parametrize("family", device_cases.FAMILIES)
def test_cold_blocks_in_the_loop(family: str) -> None:
    device_cases.check_cold_loop(DEVICE, family)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_vllm_connector(scenario: str) -> None:
    SCENARIOS[scenario](TorchMachine(torch.device(DEVICE)))
