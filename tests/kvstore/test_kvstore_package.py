"""The package: its public names, and what importing it does not load."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import allocator.errors
import kvstore
import kvstore.testing

WORKTREE = Path(__file__).parents[2]
EXPECTED_LATER = {"KVStore": "kvstore.store", "Lease": "kvstore.sequence"}


def test_every_public_name_loads_and_is_listed() -> None:
    assert sorted(kvstore.__all__) == sorted(kvstore._HOME_OF)
    assert dir(kvstore) == sorted(kvstore.__all__)
    for name in kvstore.__all__:
        home = EXPECTED_LATER.get(name)
        if home is None or importlib.util.find_spec(home) is not None:
            assert getattr(kvstore, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvstore.Nothing
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = kvstore.testing.Nothing


def test_errors_are_the_allocators_own() -> None:
    for name in ("KVError", "CapacityError", "IntegrityError", "TierError", "LeaseError", "ConfigError", "UsageError"):
        assert getattr(kvstore, name) is getattr(allocator.errors, name)


_SCRIPT = """
import sys
import kvstore, kvstore.testing
light = set(sys.modules)
from kvstore import CopyKey, EventStream, HashChain, HostTier, Identity, KVStoreConfig, Media, Tier
import kvstore.costs, kvstore.frame.parsing, kvstore.metrics
from kvstore.testing import FaultyTier, ManualClock, SteppedExecutor, TierContract
assert not light & {"numpy", "torch", "xxhash", "prometheus_client", "pytest"}, sorted(light)
heavy = {"torch", "cupy", "redis", "lmdb", "transformers", "pytest", "hypothesis"} & set(sys.modules)
assert not heavy, heavy
"""


def test_importing_the_package_loads_neither_torch_nor_any_backend() -> None:
    environment = os.environ | {"PYTHONPATH": str(WORKTREE)}
    run = subprocess.run([sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
