"""A host tier that loses, tears, flips, delays, reorders and repeats: tokens come later or anew, never wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.testing import Faults, FaultyTier
from tests.engine_adapter.loop_kit import KitMaker
from tests.engine_adapter.random_load import run_random_mix

SEEDS = range(24)


def test_faults_below_never_reach_the_output(make_kit: KitMaker) -> None:
    injected: Counter[str] = Counter()
    expected = {"lost", "torn", "flipped", "partial", "vanished", "late", "duplicated"}
    for seed in range(4 * len(SEEDS)):
        if seed >= len(SEEDS) and expected <= injected.keys():  # reads are few, and with a thread they vary
            break
        (tier,) = run_random_mix(make_kit, seed, faults=Faults.everywhere(0.25)).store.tiers
        assert isinstance(tier, FaultyTier)
        injected.update(tier.injected)
    assert expected <= injected.keys(), injected


@pytest.mark.parametrize(
    "faults",
    [
        Faults(lost=1.0),
        Faults(torn=1.0),
        Faults(flipped=1.0),
        Faults(partial=1.0),
        Faults(vanished=1.0),
        Faults(late=1.0),
        Faults(duplicated=1.0),
    ],
    ids=["lost", "torn", "flipped", "partial", "vanished", "late", "duplicated"],
)
def test_a_tier_with_one_fault_all_the_time(make_kit: KitMaker, faults: Faults) -> None:
    for seed in range(3):
        run_random_mix(make_kit, seed, faults=faults)


def first_wrong_seed(make_kit: KitMaker, faults: Faults) -> int | None:
    for seed in SEEDS:
        try:
            run_random_mix(make_kit, seed, faults=faults)
        except AssertionError:
            return seed
    return None


def test_the_control_damage_that_is_let_through_does_reach_the_output(
    make_kit: KitMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first_wrong_seed(make_kit, Faults(flipped=1.0)) is None
    monkeypatch.setattr(FaultyTier, "_settle", lambda self, completion: completion)
    assert first_wrong_seed(make_kit, Faults(flipped=1.0)) is not None
