"""The kernels compiled for the CPU, built once a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.quant.cuda.shim import ShimDevice, compiler


@pytest.fixture(scope="session")
def shim_modules(tmp_path_factory: pytest.TempPathFactory) -> ShimDevice:
    if compiler() is None:
        pytest.skip("no g++ to compile the kernels with")
    return ShimDevice(tmp_path_factory.mktemp("cuda-shim"))


@pytest.fixture
def shim(shim_modules: ShimDevice) -> Iterator[ShimDevice]:
    shim_modules.order, shim_modules.flush = 0, False
    yield shim_modules
    shim_modules.order, shim_modules.flush = 0, False
