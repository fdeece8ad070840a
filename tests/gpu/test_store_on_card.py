"""The main job on a card: what `tests/integration/test_stand_in.py` shows of the devices, shown with a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quant import BlockShape
from quant.cuda import CudaDevice
from tests.engine_adapter.triton.attention_cases import CASES, Case
from tests.integration import device_cases

pytestmark = pytest.mark.gpu


@pytest.fixture
def device(card: CudaDevice) -> str:
    return f"cuda:{torch.cuda.current_device()}"


@pytest.mark.parametrize("name", device_cases.CODECS)
@pytest.mark.parametrize("shape", device_cases.SHAPES, ids=str)
@pytest.mark.parametrize("dtype", device_cases.DTYPES, ids=str)
def test_codecs(device: str, name: str, shape: BlockShape, dtype: torch.dtype) -> None:
    device_cases.check_codec(device, name, shape, dtype)


def test_slab_and_mixed_devices(device: str) -> None:
    device_cases.check_slab(device)
    device_cases.check_mixed_devices(device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_torchs_attention(device: str, case: Case) -> None:
    device_cases.check_attention(device, case)


@pytest.mark.parametrize("family", device_cases.FAMILIES)
@pytest.mark.parametrize("backend", ["torch", None])
def test_the_loop_equals_generate(device: str, family: str, backend: str | None) -> None:
    device_cases.check_loop(device, family, backend=backend)


def test_the_loop_over_a_disk(device: str, tmp_path: Path) -> None:
    device_cases.check_loop(device, "llama", tmp_path)
