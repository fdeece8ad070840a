"""Stores that share copies through a real server: the second reuses the first one's; a hung server delays none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from allocator.errors import TierError
from kvstore import Identity
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import check_bytes, run_prompt
from tests.servers import Server, shared_server

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
PROMPT = list(range(10 * B + 5))


def stored(store: KVStore, blocks: int) -> None:
    """Compute the prompt and have its blocks copied down."""
    run_prompt(store, "a", PROMPT)
    store.preempt("a")
    deadline = time.monotonic() + 10
    while store.metrics.get("spilled_blocks", tier="remote") < blocks:
        assert time.monotonic() < deadline
        store.wait(0.05)
        store.step()


@pytest.mark.parametrize("secret", ["", "a secret of the fleet"], ids=["checksum", "signed"])
def test_a_second_store_reuses_what_the_first_stored(make_store: Callable[..., KVStore], secret: str) -> None:
    url = shared_server().unix_url + f"?namespace=stores{len(secret)}"
    first = make_store(blocks=16, redis_url=url, secret=secret, load_always=True, io_threads="thread")
    stored(first, 10)
    second = make_store(blocks=16, redis_url=url, secret=secret, load_always=True, io_threads="thread")
    deadline = time.monotonic() + 10
    while not second.lookup(PROMPT).by_tier.get("remote"):  # asked for by the first look, and answered soon after
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert run_prompt(second, "b", PROMPT) == 10 * B
    check_bytes(second, "b", PROMPT)
    stranger = make_store(blocks=16, redis_url=url, secret="another secret altogether", load_always=True)
    assert run_prompt(stranger, "c", PROMPT) == 0
    other = Identity(model="toy", weights="w1", geometry=full_geometry())
    assert make_store(blocks=16, redis_url=url, secret=secret, identity=other).lookup(PROMPT).tokens == 0


def test_steps_do_not_wait_for_a_hung_server_and_a_reset_says_that_it_failed(
    make_store: Callable[..., KVStore],
) -> None:
    with Server() as server:
        store = make_store(blocks=16, redis_url=server.url, load_always=True, io_threads="thread")
        stored(store, 10)
        with server.hung():
            run_prompt(store, "b", list(range(5000, 5000 + 12 * B)))
            store.preempt("b")  # its copies are on their way to a server that does not answer
            waited = []
            for number in range(300):
                start = time.perf_counter()
                store.lookup(list(range(1000 * number, 1000 * number + 3 * B)))
                store.step()
                waited.append(time.perf_counter() - start)
                time.sleep(0.002)
            # Half the server's timeout: what a busy machine may take once, a wait for the server may not.
            assert sorted(waited)[-3] < 0.25
            assert store.metrics.get("dropped_blocks", tier="remote", cause="failed") > 0, "nothing hung"
            with pytest.raises(TierError):
                store.reset()
        store.close()
