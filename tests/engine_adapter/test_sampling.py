from __future__ import annotations

import pytest
import torch

from engine_adapter.request import Request
from engine_adapter.sampling import Sampler, distribution, draw, first_choices, uniform_at


def sampled(**settings: float | int) -> Request:
    return Request("r", [1], 4, **{"temperature": 1.0, **settings})  # type: ignore[arg-type]


def test_uniform_depends_on_each_field_and_on_nothing_else() -> None:
    base = uniform_at(1, 2, 3, 4)
    assert base == uniform_at(1, 2, 3, 4)
    others = [uniform_at(0, 2, 3, 4), uniform_at(1, 0, 3, 4), uniform_at(1, 2, 0, 4), uniform_at(1, 2, 3, 0)]
    assert len({base, *others}) == 5
    assert uniform_at(-1, 2, 3, 4) != base
    values = [uniform_at(0, 0, 0, position) for position in range(4000)]
    assert min(values) >= 0.0
    assert max(values) < 1.0
    assert abs(sum(values) / len(values) - 0.5) < 0.02


def test_top_k_keeps_exactly_k_and_orders_ties_by_token() -> None:
    probabilities, tokens = distribution(torch.tensor([1.0, 3.0, 1.0, 1.0, -5.0]), sampled(top_k=3))
    assert tokens.tolist() == [1, 0, 2]
    assert probabilities.sum().item() == pytest.approx(1.0)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert distribution(logits, sampled(top_p=0.5))[1].tolist() == [0]
    assert distribution(logits, sampled(top_p=0.51))[1].tolist() == [0, 1]
    assert distribution(logits, sampled(top_p=0.96))[1].tolist() == [0, 1, 2, 3]
    assert distribution(logits, sampled(top_p=1e-9))[1].tolist() == [0]


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.1, 0.6, 0.3]))
    counts = [0, 0, 0]
    for position in range(3000):
        counts[draw(logits, sampled(), uniform_at(5, 0, 0, position))] += 1
    assert [count / 3000 for count in counts] == pytest.approx([0.1, 0.6, 0.3], abs=0.03)


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0])
    assert {draw(logits, sampled(), u) for u in (0.0, 0.3, 0.7, 0.999999999999, 1.0 - 2.0**-53)} == {0, 2}


def test_temperature_sharpens() -> None:
    logits = torch.tensor([0.0, 1.0])
    cold = distribution(logits, sampled(temperature=0.1))[0][0].item()
    warm = distribution(logits, sampled(temperature=10.0))[0][0].item()
    assert cold > 0.99 > 0.6 > warm > 0.5


def test_forced_then_greedy_then_drawn() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    forced = Sampler().choose(logits, 1, Request("r", [1], 2, forced_token_ids=[2, 0]), 0, 1)
    assert (forced.token_id, forced.argmax_token_id) == (0, 1)
    assert Sampler().choose(logits, 1, Request("r", [1], 2), 0, 0).token_id == 1
    drawn = {Sampler(seed).choose(logits, 1, sampled(temperature=5.0), 0, 0).token_id for seed in range(40)}
    assert drawn == {0, 1, 2}


def test_rows_without_a_finite_maximum_have_no_choice() -> None:
    rows = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [-torch.inf, -torch.inf], [torch.inf, 0.0], [-torch.inf, 0.0]])
    assert first_choices(rows) == [1, None, None, None, 1]
    assert first_choices(torch.empty(0, 5)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_first_choices_are_torchs_and_the_first_of_equals(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (50, 997), generator=generator).to(dtype)
    assert first_choices(logits) == torch.max(logits, dim=-1).indices.tolist()
    logits[3, 500] = torch.nan
    logits[4] = -torch.inf
    logits[5, 7] = torch.inf
    logits[6, 0] = -torch.inf
    found = first_choices(logits)
    assert found[3:6] == [None, None, None]
    assert found[6] is not None
    assert first_choices(logits[:0]) == []
