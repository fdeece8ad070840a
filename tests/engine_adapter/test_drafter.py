from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allocator.errors import ConfigError
from engine_adapter.drafter import PromptLookupDrafter


def test_what_followed_the_last_occurrence_is_proposed() -> None:
    stream = [1, 2, 3, 9, 9, 1, 2, 3, 7, 8, 5, 1, 2, 3]
    assert PromptLookupDrafter(draft_tokens=3).propose(stream, 9) == [7, 8, 5]
    assert PromptLookupDrafter(draft_tokens=3).propose(stream, 2) == [7, 8]


def test_the_longest_ngram_wins_over_a_later_short_one() -> None:
    stream = [1, 2, 3, 4, 3, 6, 1, 2, 3]
    assert PromptLookupDrafter(longest_ngram=3).propose(stream, 1) == [4]
    assert PromptLookupDrafter(longest_ngram=1).propose(stream, 1) == [6]


def test_a_repeated_token_overlaps_itself() -> None:
    assert PromptLookupDrafter(draft_tokens=4).propose([5, 5, 5, 5, 5], 4) == [5]


def test_no_guess_without_a_repeat_or_without_room() -> None:
    drafter = PromptLookupDrafter()
    assert drafter.propose([1, 2, 3], 4) == []
    assert drafter.propose([1], 4) == []
    assert drafter.propose([1, 1, 1], 0) == []


def test_the_window_bounds_the_search() -> None:
    stream = [7, 8, *range(100, 140), 7]
    assert PromptLookupDrafter(window_tokens=20).propose(stream, 2) == []
    assert PromptLookupDrafter(window_tokens=100).propose(stream, 2) == [8, 100]


def test_token_ids_of_any_size_do_not_match_across_token_borders() -> None:
    big = (1 << 32) - 1
    assert PromptLookupDrafter().propose([256, 1, 0, 65536, big, 2, 1], 1) == [0]
    assert PromptLookupDrafter().propose([big, 3, big], 1) == [3]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 6))
def test_equals_a_plain_search(stream: list[int], count: int) -> None:
    expected: list[int] = []
    for length in (3, 2, 1):
        places = [i for i in range(len(stream) - length) if stream[i : i + length] == stream[-length:]]
        if places:
            after = places[-1] + length
            expected = stream[after : after + min(count, 4)]
            break
    assert PromptLookupDrafter().propose(stream, count) == expected


@pytest.mark.parametrize(
    "settings",
    [{"draft_tokens": 0}, {"shortest_ngram": 0}, {"longest_ngram": 1, "shortest_ngram": 2}, {"window_tokens": 3}],
)
def test_impossible_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        PromptLookupDrafter(**settings)
