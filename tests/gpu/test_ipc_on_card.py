"""Device memory read by a second process."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quant.cuda import CudaDevice, CudaMemoryError, MemoryExporter, MemoryOpener

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]


def test_case_090_tensors_of_one_allocation_and_one_after_it_grew(card: CudaDevice) -> None:
    segment = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    tensors = [segment[:4096], segment[512 + 4096 : 3 * 4096], segment[2 << 20 :]]
    tensors.append(torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    for number, tensor in enumerate(tensors):
        tensor.random_(number, 256)
    torch.cuda.synchronize()
    exporter = MemoryExporter(card)
    handles = [exporter.export(tensor.data_ptr(), tensor.nbytes, tensor) for tensor in tensors]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.ipc_reader"],
        input="".join(f"{handle.to_bytes().hex()}\n" for handle in handles),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    expected = [hashlib.sha256(tensor.cpu().numpy().tobytes()).hexdigest() for tensor in tensors]
    assert done.stdout.split() == expected


def test_the_exporting_process_cannot_open_its_own_memory(card: CudaDevice) -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    handle = MemoryExporter(card).export(tensor.data_ptr(), tensor.nbytes, tensor)
    with pytest.raises(CudaMemoryError, match="cannot open"):
        MemoryOpener(card).open(handle)
