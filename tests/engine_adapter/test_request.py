from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from allocator.errors import UsageError
from engine_adapter.request import Request, check_request


def request(**changes: Any) -> Request:
    return dataclasses.replace(Request("r", [1, 2, 3], 4), **changes)


def test_a_plain_request_is_accepted() -> None:
    check_request(request(), 10)
    check_request(request(token_ids=(0, 9), n=3, temperature=0.5, top_p=0.1, forced_token_ids=[9]), 10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"request_id": ""}, "non-empty string"),
        ({"request_id": "a#1"}, "'a#1'"),
        ({"request_id": 7}, "got 7"),
        ({"token_ids": []}, "prompt is empty"),
        ({"token_ids": [1, 10]}, r"token_ids\[1\] is 10, expected 0 <= id < 10"),
        ({"token_ids": [-1]}, r"token_ids\[0\] is -1"),
        ({"token_ids": [1, 2.5]}, r"token_ids\[1\] must be an int, got 2.5"),
        ({"token_ids": [True]}, "must be an int, got True"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1, got 0"),
        ({"n": 0}, "n must be"),
        ({"top_k": -1}, "top_k must be"),
        ({"temperature": -0.1}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": float("inf")}, "temperature must be"),
        ({"top_p": 0.0}, "top_p must be"),
        ({"top_p": 1.1}, "top_p must be"),
        ({"forced_token_ids": []}, "forced_token_ids is empty"),
        ({"forced_token_ids": 5}, "forced_token_ids must be None, a list of token ids, .* got 5"),
        ({"token_ids": None}, "token_ids must be a list of token ids, .* got None"),
        ({"token_ids": {5, 6}}, r"token_ids must be a list of token ids, .* got \{5, 6\} \(set\)"),
        ({"token_ids": {5: 6}}, r"token_ids must be a list .* got \{5: 6\} \(dict\)"),
        ({"token_ids": b"ab"}, r"token_ids must be a list .* \(bytes\)"),
        ({"token_ids": "ab"}, r"token_ids must be a list .* got 'ab' \(str\)"),
        ({"token_ids": iter([1])}, "token_ids must be a list"),
        ({"token_ids": torch.tensor([[1, 2]])}, r"token_ids must be a list .* \(Tensor of shape \[1, 2\]\)"),
        ({"token_ids": torch.tensor([1.5])}, r"token_ids\[0\] must be an int, got 1.5"),
        ({"token_ids": torch.tensor([True])}, r"token_ids\[0\] must be an int, got True"),
        ({"token_ids": np.array([1, 10])}, r"token_ids\[1\] is 10"),
        ({"token_ids": np.zeros((2, 2), int)}, r"\(ndarray of shape \[2, 2\]\)"),
        ({"eos_token_ids": 2}, r"eos_token_ids must be a collection of token ids, got 2 \(int\)"),
        ({"eos_token_ids": "ab"}, r"eos_token_ids must be a collection of token ids, got 'ab' \(str\)"),
        ({"eos_token_ids": {2: 3}}, r"eos_token_ids must be a collection .*\(dict\)"),
        ({"eos_token_ids": [None]}, "eos_token_ids must be ints, got None"),
        ({"eos_token_ids": [True]}, "eos_token_ids must be ints, got True"),
        ({"on_token": 5}, r"on_token must be None or a function of .*, got 5 \(int\)"),
        ({"keep_logits": "x"}, "keep_logits must be None or a function of .*, got 'x'"),
        ({"media": 5}, "media must be a list of EmbeddedMedia, got 5"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"seed": "x"}, "seed must be an int, got 'x'"),
        ({"exact": "no"}, "exact must be True or False, got 'no'"),
        ({"forced_token_ids": [3, 99]}, r"forced_token_ids\[1\] is 99"),
    ],
)
def test_what_cannot_be_served_is_refused_with_what_was_given(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_request(request(**changes), 10)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, tuple, lambda ids: array("I", ids)])
def test_arrays_and_tensors_of_one_dimension_are_token_ids(kind: Callable[[list[int]], Any]) -> None:
    given = request(token_ids=kind([1, 2, 3]), forced_token_ids=kind([4, 5]), eos_token_ids=kind([6]))
    check_request(given, 10)
    assert [list(given.token_ids), list(given.forced_token_ids or ()), list(given.eos_token_ids)] == [
        [1, 2, 3],
        [4, 5],
        [6],
    ]
    assert all(type(token) is int for token in given.token_ids)


@pytest.mark.parametrize("given", [None, {"request_id": "r"}])
def test_what_is_no_request_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="expected a Request"):
        check_request(given, 10)


def test_forced_tokens_end_the_output() -> None:
    assert request(max_new_tokens=9, forced_token_ids=[1, 2]).output_limit == 2
    assert request(max_new_tokens=1, forced_token_ids=[1, 2]).output_limit == 1
