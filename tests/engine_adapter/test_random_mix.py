"""Random loads, checked after each step against the store's invariants and at the end against the oracle."""

from __future__ import annotations

import pytest

from tests.engine_adapter.loop_kit import KitMaker
from tests.engine_adapter.random_load import run_random_mix


@pytest.mark.parametrize("seed", range(60))
def test_random_mix(make_kit: KitMaker, seed: int) -> None:
    run_random_mix(make_kit, seed)
