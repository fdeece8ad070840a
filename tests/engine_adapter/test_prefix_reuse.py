"""Prefixes come back whole, at every boundary, and never more of them than may be."""

from __future__ import annotations

import pytest

from allocator import UsageError
from engine_adapter.request import Request
from kvstore import Retention
from tests.engine_adapter.loop_kit import FAMILIES, KitMaker, prompt

BLOCK = 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 10 * BLOCK])
def test_case_023_whole_prompt_cached_leaves_one_token_to_compute(make_kit: KitMaker, family: str, length: int) -> None:
    kit = make_kit(family)
    tokens = prompt(length, length)
    cold = kit.run_checked(Request("cold", tokens, 6))["cold"]
    before = kit.runner.computed_tokens
    warm = kit.run_checked(Request("warm", tokens, 6))["warm"]
    expected = (length - 1) // BLOCK * BLOCK
    assert sum(warm.reused_tokens.values()) == expected
    assert warm.computed_prefill_tokens == length - expected >= 1
    assert kit.runner.computed_tokens - before == length - expected + 5
    assert warm.token_ids == cold.token_ids
    assert sum(cold.reused_tokens.values()) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_case_063_every_split_between_cached_and_computed(make_kit: KitMaker, family: str) -> None:
    tokens = prompt(1, 33)
    for split in range(1, len(tokens) + 1):
        kit = make_kit(family)
        kit.run_checked(Request("first", tokens[:split], 1))
        second = kit.run_checked(Request("second", tokens, 4))["second"]
        assert sum(second.reused_tokens.values()) == min(split, len(tokens) - 1) // BLOCK * BLOCK
        starts = kit.runner.computed_tokens - split
        assert starts == len(tokens) - sum(second.reused_tokens.values()) + 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_reuses_what_it_generated(make_kit: KitMaker, family: str) -> None:
    kit = make_kit(family)
    tokens = prompt(1, 13)
    reused = []
    for turn in range(5):
        result = kit.run_checked(Request(f"turn{turn}", tokens, 6))[f"turn{turn}"]
        reused.append(sum(result.reused_tokens.values()))
        previous = len(tokens) + 5  # the newest token has no KV yet
        tokens = [*tokens, *result.token_ids, *prompt(turn + 50, 5)]
        expected = previous // BLOCK * BLOCK
        assert kit.store.lookup(tokens).tokens == expected
    assert reused == [0, 16, 28, 40, 48]


def test_a_request_says_how_long_what_it_leaves_is_kept_and_its_tenant_has_a_quota(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=24)
    kit.store.set_quota("small", 4 * kit.store.pool.layout.raw_slot_bytes[0])
    kept, usual = prompt(1, 8 * BLOCK + 1), prompt(2, 8 * BLOCK + 1)
    kit.run_checked(Request("kept", kept, 1, retention=[Retention(priority=80)]))
    kit.run_checked(Request("usual", usual, 1))
    refused = kit.drive(Request("refused", prompt(3, 8 * BLOCK), 1, tenant="small"))["refused"]
    assert "quota of tenant 'small'" in (refused.error or "")
    kit.run_checked(Request("more", prompt(4, 12 * BLOCK), 1))
    assert kit.store.lookup(kept).tokens == 8 * BLOCK
    assert kit.store.lookup(usual).tokens < 8 * BLOCK
    with pytest.raises(UsageError, match="retention: got 80; expected a list of"):
        kit.loop.submit(Request("wrong", kept, 1, retention=80))  # type: ignore[arg-type]


def test_case_106_what_is_on_the_device_is_not_loaded_again(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=24, host_blocks=200, prefill_tokens_per_second=1e-3)
    tokens = prompt(1, 41)
    kit.run_checked(Request("a", tokens, 1))
    hit = kit.store.lookup(tokens)
    assert hit.device_tokens == hit.tokens == 40
    for _ in range(3):
        assert kit.store.lookup(tokens) == hit
    again = kit.run_checked(Request("b", tokens, 1))["b"]
    assert dict(again.reused_tokens) == {"device": 40}


def test_blocks_pushed_to_the_host_come_back_to_their_places(make_kit: KitMaker) -> None:
    """Case 21: restored blocks go to the front of the table, behind those that are there, never to its end."""
    kit = make_kit(blocks=24, host_blocks=400, prefill_tokens_per_second=1e-3, loop={"max_batch_sequences": 1})
    first = [Request(f"a{index}", prompt(index, 41), 3) for index in range(6)]
    kit.run_checked(*first)
    again = [Request(f"b{index}", prompt(index, 45)[:41] + prompt(index + 90, 7), 3) for index in range(6)]
    results = kit.run_checked(*again)
    from_host = sum(result.reused_tokens.get("host", 0) for result in results.values())
    assert from_host > 0


def test_case_148_a_prompt_below_the_unit_says_so(make_kit: KitMaker) -> None:
    kit = make_kit()
    kit.run_checked(Request("a", prompt(1, 3), 1))
    hit = kit.store.lookup(prompt(1, 3))
    assert (hit.tokens, hit.reason) == (0, "below_unit")
    assert str(BLOCK + 1) in hit.explain()


def test_prompts_in_flight_together_are_computed_once(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=80, loop={"max_batch_sequences": 4, "step_tokens": 8})
    shared = prompt(1, 40)
    requests = [Request(f"r{index}", [*shared, *prompt(index + 5, 3)], 5) for index in range(4)]
    requests.append(Request("other", prompt(77, 10), 5))
    results = kit.run_checked(*requests)
    computed = sum(result.computed_prefill_tokens for result in results.values())
    assert computed == 43 + 3 * 3 + 10


def test_a_follower_goes_on_when_its_leader_is_aborted(make_kit: KitMaker) -> None:
    kit = make_kit(blocks=80, loop={"step_tokens": 8})
    tokens = prompt(1, 40)
    kit.loop.submit(Request("leader", tokens, 5))
    follower = Request("follower", tokens, 5)
    kit.loop.submit(follower)
    kit.step()
    kit.step()
    kit.loop.abort("leader")
    result = kit.drive()
    kit.check(result, [follower])
    kit.nothing_left()


def test_exact_requests_reuse_raw_blocks(make_kit: KitMaker) -> None:
    kit = make_kit()
    tokens = prompt(1, 30)
    kit.run_checked(Request("a", tokens, 2))
    result = kit.run_checked(Request("b", tokens, 2, exact=True))["b"]
    assert dict(result.reused_tokens) == {"device": 28}
