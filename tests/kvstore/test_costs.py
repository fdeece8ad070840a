"""Load or recompute: estimates follow what was measured, decisions follow the estimates."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import UsageError
from kvstore.costs import CostModel, LinearCost, Stretch


def model(**options: object) -> CostModel:
    return CostModel(**({"prefill_tokens_per_second": 1000.0} | options))  # type: ignore[arg-type]


def tried(*tiers: str, **options: object) -> CostModel:
    """A model whose tiers were loaded from once, so that their first guesses count."""
    costs = model(**options)
    costs.note_choice([Stretch(tier, 1, 1) for tier in tiers], len(tiers))
    return costs


def test_latency_and_bandwidth_are_told_apart() -> None:
    cost = LinearCost(1e-3, 1e9)
    draw = random.Random(1)
    for _ in range(60):
        size = draw.randrange(1 << 16, 1 << 22)
        cost.observe(size, 250e-6 + size / 3e9)
    assert cost.latency_seconds == pytest.approx(250e-6, rel=0.05)
    assert cost.bytes_per_second == pytest.approx(3e9, rel=0.05)


def test_one_size_only_still_prices_that_size() -> None:
    cost = LinearCost(0.0, 1e9)
    for _ in range(20):
        cost.observe(1 << 20, 5e-3)
    assert cost.seconds(1 << 20) == pytest.approx(5e-3, rel=0.01)


def test_a_tier_that_slows_down_is_noticed() -> None:
    cost = LinearCost(0.0, 4e9)
    for _ in range(50):
        cost.observe(1 << 20, (1 << 20) / 4e9)
    for _ in range(30):
        cost.observe(1 << 20, 0.5)
    assert cost.seconds(1 << 20) > 0.4


@given(st.lists(st.tuples(st.integers(-5, 1 << 40), st.floats(allow_nan=True, allow_infinity=True)), max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_measurement_makes_an_estimate_senseless(measured: list[tuple[int, float]]) -> None:
    cost = LinearCost(1e-4, 1e9)
    for size, seconds in measured:
        cost.observe(size, min(seconds, 1e6))
        assert cost.latency_seconds >= 0
        assert 0 < cost.bytes_per_second < float("inf")
        assert cost.seconds(1 << 20) >= 0


def test_a_busy_tier_costs_what_it_still_has_to_move() -> None:
    costs = tried("host", "disk", latency_seconds=1e-3, bytes_per_second=1e9)
    stretch = Stretch("host", 100, 10_000_000)  # saves 100 ms for 11 ms
    assert costs.leading_stretches([stretch]) == 1
    assert costs.leading_stretches([stretch], {"host": 80_000_000}) == 1
    assert costs.leading_stretches([stretch], {"host": 95_000_000}) == 0
    assert costs.leading_stretches([stretch, stretch], {"host": 95_000_000}) == 2, "it is waited for once"
    assert costs.leading_stretches([stretch], {"disk": 95_000_000}) == 1


def test_measured_prefill_speed_replaces_the_guess() -> None:
    costs = model()
    for _ in range(20):
        costs.observe_prefill(512, 512 / 20_000)
    assert costs.prefill_tokens_per_second == pytest.approx(20_000, rel=0.01)
    costs.observe_prefill(0, 1.0)
    costs.observe_prefill(10, 0.0)
    costs.observe_prefill(100, float("nan"))
    costs.observe_prefill(9, 0.3)  # the rest of a prompt that was found: a step's own time, not that of tokens
    assert costs.prefill_tokens_per_second == pytest.approx(20_000, rel=0.01)


def test_a_tier_long_refused_is_tried_again() -> None:
    costs = model()
    stretches = [Stretch("disk", 100, 1 << 20)]
    for _ in range(30):
        costs.observe_load("disk", 1 << 20, 60.0)
    answers = []
    for _ in range(200):
        for _ in range(3):  # asking alone changes nothing
            answer = costs.leading_stretches(stretches)
        answers.append(answer)
        costs.note_choice(stretches, answer)
    assert 1 <= sum(answers) <= 4
    assert not answers[0]
    for _ in range(8):
        costs.observe_load("disk", 1 << 20, 1e-3)
    assert costs.leading_stretches(stretches) == 1


def test_a_tier_that_nobody_has_measured_is_tried_at_once_and_then_by_what_it_took() -> None:
    costs = model(bytes_per_second=1e6)
    stretches = [Stretch("host", 100, 10_000_000)]  # by the first guess 10 s for 0.1 s
    assert costs.leading_stretches(stretches) == 1
    costs.note_choice(stretches, 1)
    assert costs.leading_stretches(stretches) == 0, "one try, not one a request while it lasts"
    costs.observe_load("host", 10_000_000, 0.01)
    assert costs.leading_stretches(stretches) == 1
    measured = model()
    measured.observe_load("host", 10_000_000, 10.0)
    assert measured.leading_stretches(stretches) == 0


def test_the_best_cut_of_a_run_is_found() -> None:
    costs = tried("host", "disk", latency_seconds=10e-3, bytes_per_second=1e9)
    cheap = Stretch("host", 16, 1_000_000)  # saves 16 ms for 1 ms
    dear = Stretch("disk", 16, 100_000_000)  # saves 16 ms for 100 ms
    assert costs.leading_stretches([]) == 0
    assert costs.leading_stretches([cheap]) == 1
    assert costs.leading_stretches([dear, cheap]) == 0, "what follows does not pay for the gap"
    assert costs.leading_stretches([dear] + [cheap] * 20) == 21, "now it does"
    assert costs.leading_stretches([cheap, cheap, dear]) == 2
    assert costs.leading_stretches([Stretch("host", 4, 1000)]) == 0, "latency alone costs more"
    assert model(always_load=True).leading_stretches([dear, dear]) == 2


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 64), st.integers(0, 1 << 27)), max_size=7))
@settings(max_examples=200, deadline=None)
def test_no_other_cut_is_quicker(runs: list[tuple[str, int, int]]) -> None:
    costs = tried("a", "b", latency_seconds=5e-3, bytes_per_second=1e9)
    stretches = [Stretch(*run) for run in runs]

    def seconds(count: int) -> float:
        load = sum(one.byte_count / 1e9 for one in stretches[:count])
        load += 5e-3 * len({one.tier for one in stretches[:count]})
        return load + sum(one.tokens for one in stretches[count:]) / 1000.0

    chosen = seconds(costs.leading_stretches(stretches))
    assert chosen <= min(seconds(count) for count in range(len(stretches) + 1)) + 1e-9


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_guesses_are_numbers(speed: float) -> None:
    with pytest.raises(UsageError):
        model(prefill_tokens_per_second=speed)
    with pytest.raises(UsageError):
        LinearCost(0.0, speed)


def test_a_load_that_seemed_to_take_ages_is_forgotten_after_a_few_good_ones() -> None:
    """An engine that paused, or a clock that jumped."""
    costs = model()
    costs.observe_load("disk", 1 << 20, 1e18)
    for _ in range(12):
        costs.observe_load("disk", 1 << 20, 1e-3)
    assert costs.tier("disk").seconds(1 << 20) < 0.01
