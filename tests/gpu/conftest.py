"""A real card, or a skip that says why there is none. A card whose kernels do not compile or fail is a failure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quant.cuda import CudaDevice, PageCopier, cuda_device, status


@pytest.fixture(scope="session")
def card() -> CudaDevice:
    usable, reason = status()
    if not usable:
        if reason.startswith(("no cupy", "no device")) or not torch.cuda.is_available():
            pytest.skip(reason)
        pytest.fail(reason)
    if not torch.cuda.is_available():
        pytest.skip("this build of torch has no CUDA")
    return cuda_device(torch.cuda.current_device())


@pytest.fixture
def copier(card: CudaDevice) -> Iterator[PageCopier]:
    """On a stream of its own."""
    stream = card.new_stream()
    made = PageCopier(card, stream.ptr, stream)
    yield made
    made.close()
