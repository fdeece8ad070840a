"""A cause is planted, the doctor must name it; data that carry no verdict get none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from allocator.errors import ConfigError
from kvstore.diagnosis.endpoint import Endpoint
from kvstore.diagnosis.measurements import Probes, measure
from kvstore.diagnosis.verdict import Diagnosis, diagnose
from tests.kvstore.diagnosis.planted_endpoint import Plant, planted

PROBES = Probes((20, 100, 400), answer_tokens=12, concurrency=(4,), rounds=2)


def examined(plant: Plant, probes: Probes = PROBES, seed: int = 1) -> Diagnosis:
    with planted(plant) as url:
        endpoint = Endpoint(url)
        endpoint.connect()
        return diagnose(measure(endpoint, probes, seed))


def named(make: Callable[[], Plant], probes: Probes = PROBES) -> Diagnosis:
    """A busy machine adds to every phase, so that the doctor may refuse or find none that takes most: then ask again.

    Naming something else is never forgiven; so a plant takes several times what a busy machine may add.
    """
    for seed in range(6):
        found = examined(make(), probes, seed)
        if found.verdict.bottleneck is not None and found.verdict.refused is None:
            return found
    pytest.fail(f"no cause named in six tries: {found.verdict}")


QUEUE = replace(PROBES, concurrency=(10,))
CAUSES: list[tuple[str, Plant, str, str]] = [
    ("long prompts are computed", Plant(prefill_token=0.5e-3, step=0.003), "prompt", "compute"),
    ("and never reused", Plant(prefill_token=0.5e-3, step=0.003, caches=False), "prompt", "cache misses"),
    ("a slow network or proxy", Plant(first=0.1), "prompt", "overhead"),
    ("KV is read", Plant(step=0.004, context_token=40e-6), "decode", "bandwidth"),
    ("weights are read", Plant(step=0.025), "decode", "bandwidth"),
    ("every request costs a step", Plant(step=0.015, step_request=0.02), "decode", "compute"),
    ("one at a time", Plant(step=0.01, slots=1), "queue", "queueing"),
]


@pytest.mark.parametrize(("plant", "bottleneck", "cause"), [row[1:] for row in CAUSES], ids=[row[0] for row in CAUSES])
def test_a_planted_cause_is_named(plant: Plant, bottleneck: str, cause: str) -> None:
    probes = QUEUE if plant.slots == 1 else PROBES  # nine before the last one: four fifths of the time
    verdict = named(lambda: replace(plant, seen=set(), asked=[]), probes).verdict
    assert (verdict.bottleneck, verdict.cause) == (bottleneck, cause), verdict
    assert verdict.evidence
    assert verdict.remedies


def test_both_phases_are_fitted_apart() -> None:
    """A busy machine adds to some of what is measured: then it is measured again."""
    planted_costs = {"prompt": (0.4e-3, 0.02), "decode": (20e-6, 0.004)}
    for _ in range(6):
        found = named(lambda: Plant(first=0.02, prefill_token=0.4e-3, step=0.004, context_token=20e-6))
        assert found.ttft is not None
        assert found.itl is not None
        fits = {"prompt": found.ttft, "decode": found.itl}
        costs = {phase: (fit.token_seconds, fit.fixed_seconds) for phase, fit in fits.items()}
        per_token = all(costs[phase][0] == pytest.approx(planted_costs[phase][0], rel=0.3) for phase in costs)
        fixed = [costs[phase][1] == pytest.approx(planted_costs[phase][1], abs=most) for phase, most in _FIXED.items()]
        if per_token and all(fixed):
            break
    else:
        pytest.fail(f"fitted {costs}, planted {planted_costs}")
    assert found.repeated_share is not None
    assert found.repeated_share < 0.5


_FIXED = {"prompt": 0.02, "decode": 0.002}
"""Seconds by which a phase's fixed cost may be off."""

ALONE = replace(PROBES, concurrency=(1,), rounds=4)
REFUSED: list[tuple[str, Plant, Probes, str]] = [
    ("failures", Plant(fail=True), PROBES, "requests failed"),
    ("short answers", Plant(answer_limit=3), PROBES, "answers ended after 3 tokens"),
    ("no stream", Plant(streams=False), PROBES, "not token by token|too few"),
    ("seen before", Plant(always_cached=0.9), PROBES, "in the server's cache"),
    ("too little time", Plant(), replace(PROBES, seconds_limit=0.05), "limit of 0.05 s"),
    ("one length", Plant(prefill_token=1e-3), replace(PROBES, prompt_tokens=(200,)), "expected three lengths"),
    ("close lengths", Plant(prefill_token=1e-3), replace(PROBES, prompt_tokens=(200, 210, 220)), "3 times the"),
    ("steps, one at a time", Plant(step=0.02), replace(PROBES, concurrency=(1,)), "only several requests at once tell"),
    ("half and half", Plant(first=0.08, prefill_token=0.2e-3), PROBES, "longer prompts would tell"),
    ("nothing is slow", Plant(first=0, step=0), ALONE, "too little to be divided"),
]


@pytest.mark.parametrize(("plant", "probes", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_data_that_carry_no_verdict_get_none(plant: Plant, probes: Probes, reason: str) -> None:
    for seed in range(6):  # a busy machine is a reason of its own, and makes what is quick slow
        verdict = examined(replace(plant, seen=set()), probes, seed).verdict
        if any(one in (verdict.refused or "") for one in reason.split("|")):
            break
    assert verdict.cause is None
    assert verdict.remedies == ()
    assert verdict.refused is not None
    assert any(one in verdict.refused for one in reason.split("|")), verdict.refused


def test_no_single_bottleneck_is_an_answer_too() -> None:
    """A third of the time each: whatever a busy machine adds, in one of the tries none takes half."""
    probes = replace(PROBES, concurrency=(3,))
    for seed in range(6):
        plant = Plant(first=0.002, prefill_token=0.15e-3, step=0.0095, slots=1)
        verdict = examined(plant, probes, seed).verdict
        if verdict.bottleneck is None and verdict.refused is None:
            break
    assert verdict.refused is None
    assert "no single bottleneck" in verdict.because, verdict


def test_no_prompt_begins_as_another_did_and_one_is_asked_again() -> None:
    plant = Plant()
    examined(plant)
    prompts = [fields["prompt"] for fields in plant.asked]
    repeated = [prompt for prompt in set(prompts) if prompts.count(prompt) > 1]
    assert [prompts.count(prompt) for prompt in repeated] == [3]  # once new, twice again
    assert len({prompt.split()[0] for prompt in set(prompts)}) == len(set(prompts))


def test_a_server_that_refuses_extensions_is_asked_without_them() -> None:
    plant = Plant(refuses=("ignore_eos", "stream_options"), prefill_token=0.5e-3)
    assert "requests failed" not in (examined(plant).verdict.refused or "")
    assert "ignore_eos" not in plant.asked[-1]
    assert sum("ignore_eos" in fields for fields in plant.asked) <= 2


def test_without_usage_lengths_are_those_asked_for() -> None:
    found = examined(Plant(prefill_token=0.5e-3, reports_usage=False))
    assert [point.tokens for point in found.ttft_points] == [20, 100, 400]


@pytest.mark.parametrize("url", ["localhost:80", "ftp://a", "http://", "http://a/?x=1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http://host:port"):
        Endpoint(url)


def test_nothing_that_answers() -> None:
    with pytest.raises(ConfigError, match="does not answer"):
        Endpoint("http://127.0.0.1:1").connect()
    with planted(Plant()) as url, pytest.raises(ConfigError, match="got 'other'; the server has planted"):
        Endpoint(url, model="other").connect()
