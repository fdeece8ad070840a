"""Small pools for the tests of the allocator."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from allocator import BlockPool, ExtentLayout, pool_core
from allocator.block_references import BlockReferences

MakePool = Callable[..., BlockPool]


@pytest.fixture
def make_pool() -> MakePool:
    """make_pool(full_blocks, cold=True, groups=1): a pool whose whole span holds that many full blocks of 512 bytes.

    Two full blocks an extent, or eight cold ones of 128 bytes; one extent is the spare when there is INT4.
    """

    def make(full_blocks: int, cold: bool = True, groups: int = 1, **options: object) -> BlockPool:
        layout = ExtentLayout(512 * full_blocks, (512,) * groups, (128,) * groups if cold else (), extent_bytes=1024)
        return BlockPool(layout, **options)  # type: ignore[arg-type]

    return make


def hashes(count: int, salt: int = 0) -> list[bytes]:
    """Distinct 32-byte block hashes."""
    return [hashlib.sha256(f"{salt}/{number}".encode()).digest() for number in range(count)]


@pytest.fixture(name="hashes")
def hashes_fixture() -> Callable[..., list[bytes]]:
    return hashes


@pytest.fixture(params=["c", "python"])
def each_form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the C core of the pool, and without."""
    if request.param == "python":
        monkeypatch.setattr(BlockReferences, "_core", None)
    elif pool_core.core is None:
        pytest.skip(f"no C core: {pool_core.reason}")
