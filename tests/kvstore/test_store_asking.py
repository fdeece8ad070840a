"""Ask again: while a slow tier is still looking, an engine is told so, for a bounded time, and nothing ever waits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from allocator import UnknownSequence
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from kvstore.redis_tier.tier import RedisOptions, RedisTier
from tests.kvstore.conftest import full_geometry, hybrid_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, run_prompt
from tests.servers import Server, shared_server
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
SETTINGS = {"load_always": True, "io_threads": "thread"}


def prompt_of(blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + blocks * B + 1))


def store_with(make_store: Callable[..., KVStore], url: str, lookups: HeldExecutor, **settings: object) -> KVStore:
    """A store over a real server whose answers to lookups come when the test says so."""
    options = RedisOptions(lookup_executor=lookups, lookup_deadline_seconds=60.0, epoch_seconds=3600.0)
    specs = geometry_specs(settings.get("geometry") or full_geometry())  # type: ignore[arg-type]
    tier = RedisTier(url, ThreadExecutor(), spec_of=specs, options=options)
    return make_store(blocks=48, tiers=[tier], **(SETTINGS | settings))


def stored(store: KVStore, prompt: list[int]) -> None:
    run_prompt(store, "first", prompt)
    store.preempt("first")
    deadline = time.monotonic() + 10
    while store.metrics.get("spilled_blocks", tier="remote") < len(prompt) // B:
        assert time.monotonic() < deadline
        store.wait(0.05)
        store.step()


def test_a_lookup_says_that_a_tier_is_still_looking_and_changes_nothing(make_store: Callable[..., KVStore]) -> None:
    url = shared_server().unix_url + "?namespace=asking"
    prompt = prompt_of(10)
    stored(make_store(blocks=48, redis_url=url, **SETTINGS), prompt)
    lookups = HeldExecutor()
    store = store_with(make_store, url, lookups)
    first = store.lookup(prompt)
    assert (first.tokens, first.pending) == (0, True)
    assert "still being asked" in first.explain()
    used = store.usage()
    for number in range(5):  # case 104: asking has no side effect
        assert store.lookup(prompt) == first
        assert store.admit("b", prompt).ask_again
        assert store.usage() == used, number
    assert store.sequence_ids() == []
    with pytest.raises(UnknownSequence):
        store.fetch("b")
    assert store.metrics.get("requests") == 0
    lookups.run()
    found = store.lookup(prompt)
    assert (found.tokens, found.pending, found.by_tier) == (10 * B, False, {"remote": 10 * B})
    assert run_prompt(store, "b", prompt) == 10 * B
    check_bytes(store, "b", prompt)
    assert store.metrics.get("hit_tokens") == 10 * B  # case 145: once, however often it was asked


def test_a_prompt_that_is_nowhere_is_asked_for_once_and_then_known(make_store: Callable[..., KVStore]) -> None:
    lookups = HeldExecutor()
    store = store_with(make_store, shared_server().unix_url + "?namespace=nowhere", lookups)
    prompt = prompt_of(4)
    assert store.lookup(prompt).pending
    assert store.lookup(prompt_of(0)).pending is False, "too short for a block: there is nothing to look for"
    lookups.run()
    hit = store.lookup(prompt)
    assert (hit.tokens, hit.pending) == (0, False)
    assert not store.admit("a", prompt).ask_again


def test_case_106_what_is_on_the_device_is_told_while_the_rest_is_looked_up(make_store: Callable[..., KVStore]) -> None:
    url = shared_server().unix_url + "?namespace=partly"
    prompt = prompt_of(24)
    stored(make_store(blocks=48, redis_url=url, **SETTINGS), prompt)
    lookups = HeldExecutor()
    store = store_with(make_store, url, lookups)
    store.lookup(prompt[: 16 * B + 1])
    store.lookup(prompt[: 16 * B + 1])
    lookups.run()
    run_prompt(store, "near", prompt[: 16 * B + 1])
    hit = store.lookup(prompt)
    assert (hit.device_tokens, hit.tokens, hit.pending) == (16 * B, 16 * B, True)
    lookups.run()
    for _ in range(3):
        hit = store.lookup(prompt)
        assert (hit.device_tokens, hit.tokens, hit.pending) == (16 * B, 24 * B, False)
    admission = store.admit("far", prompt)
    assert (admission.reused_tokens, admission.pending_tokens) == (16 * B, 8 * B)
    store.finish("near")
    short = store.lookup(prompt[: 10 * B + 1])
    assert (short.device_tokens, short.tokens) == (10 * B, 10 * B)


def test_a_long_prefix_is_found_in_few_rounds(make_store: Callable[..., KVStore]) -> None:
    url = shared_server().unix_url + "?namespace=long"
    prompt = prompt_of(300)
    stored(make_store(blocks=320, redis_url=url, spill_queue_blocks=512, **SETTINGS), prompt)
    lookups = HeldExecutor()
    store = store_with(make_store, url, lookups)
    rounds = 0
    while store.lookup(prompt).pending:
        lookups.run()
        rounds += 1
    assert store.lookup(prompt).tokens == 300 * B
    assert rounds == 4  # 32, 64, 128, 256


def test_a_window_that_is_still_looked_up_is_pending_too(make_store: Callable[..., KVStore]) -> None:
    url = shared_server().unix_url + "?namespace=window"
    geometry = hybrid_geometry(window_tokens=40)
    prompt = prompt_of(10)
    first = make_store(blocks=48, redis_url=url, geometry=geometry, **SETTINGS)
    run_prompt(first, "first", prompt)
    first.preempt("first")
    deadline = time.monotonic() + 10
    while first.metrics.get("spilled_blocks", tier="remote") < 14:  # ten, and what the window has kept
        assert time.monotonic() < deadline
        first.wait(0.05)
        first.step()
    lookups = HeldExecutor()
    store = store_with(make_store, url, lookups, geometry=geometry)
    for _ in range(2):  # the full group, then the window at its end
        assert store.lookup(prompt).pending
        lookups.run()
    hit = store.lookup(prompt)
    assert (hit.tokens, hit.pending) == (10 * B, False)


def test_asking_ends_at_the_deadline_counted_from_the_first_question(make_store: Callable[..., KVStore]) -> None:
    now = [100.0]
    lookups = HeldExecutor()
    url = shared_server().unix_url + "?namespace=late"
    store = store_with(make_store, url, lookups, fetch_deadline_seconds=2.0, clock=lambda: now[0])
    prompt = prompt_of(6)
    assert store.lookup(prompt).pending
    assert store.wait(0.0) is False, "it may be waited for"
    now[0] = 101.9
    assert store.admit("a", prompt).ask_again
    other = prompt_of(6, 5000)
    assert store.lookup(other).pending
    now[0] = 102.1
    assert not store.lookup(prompt).pending
    assert not store.admit("a", prompt).ask_again
    assert store.lookup(other).pending, "it has its own deadline"
    assert store.fetch("a").ready_tokens == 0
    now[0] = 104.1
    assert not store.lookup(other).pending
    lookups.run()


def test_a_hung_server_delays_no_call_and_no_request_past_the_deadline(make_store: Callable[..., KVStore]) -> None:
    with Server() as server:
        store = make_store(blocks=48, redis_url=server.url, fetch_deadline_seconds=0.4, **SETTINGS)
        prompt = prompt_of(8)
        stored(store, prompt)
        with server.hung(), Stopwatch() as watch:
            unknown = prompt_of(8, 9000)
            started = watch.seconds
            longest = 0.0
            while True:
                before = watch.seconds
                given = store.admit("a", unknown)
                store.step()
                longest = max(longest, watch.seconds - before)
                if not given.ask_again:
                    break
                store.wait(0.02)
            waited = watch.seconds - started
            assert waited < 0.8, "the deadline, and what a busy machine needs"
            assert longest < 0.2, "half the server's timeout: no call waited for it"
            assert store.fetch("a").done


def test_a_store_without_a_slow_tier_never_says_so(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=12, host_blocks=12)
    assert not store.lookup(prompt_of(3)).pending
    assert not store.admit("a", prompt_of(3)).ask_again
    assert not store.wait(0.0)
