"""Pins may hold half of the device's memory together; what is beyond is refused, and nothing is pinned by it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from allocator import CapacityError
from tests.kvstore.driving import run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16


def test_a_pin_beyond_the_budget_is_refused_and_what_is_given_back_can_be_pinned(
    make_store: Callable[..., KVStore],
) -> None:
    store = make_store(blocks=20)
    prompts = [[number * 1000 + place for place in range(6 * B + 1)] for number in range(2)]
    for number, prompt in enumerate(prompts):
        run_prompt(store, str(number), prompt)
        store.finish(str(number))
    leases = [store.pin(prompts[0]), store.pin(prompts[0])]  # the same blocks count once
    pinned_bytes = store._parts.leases.pinned_bytes
    assert pinned_bytes > 0
    pins = store.pool.pins.copy()
    with pytest.raises(CapacityError, match=r"needed \d+ bytes to pin: leases may hold 50% of the device's memory"):
        store.pin(prompts[1])
    assert (store.pool.pins == pins).all()
    assert store._parts.leases.pinned_bytes == pinned_bytes
    store.unpin(leases[0])
    assert store._parts.leases.pinned_bytes == pinned_bytes
    store.unpin(leases[1])
    assert store._parts.leases.pinned_bytes == 0
    assert store.pin(prompts[1]).tokens > 0
    store.check_invariants()
