"""Stores that share copies through a real server: the second reuses the first one's; a hung server delays none."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from allocator.errors import TierError
from kvstore import HostTier, Identity
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import check_bytes, run_prompt
from tests.servers import Server, shared_server
from tests.stopwatch import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore import KVStore
    from kvstore.tier import CopyKey, Loan

B = 16
PROMPT = list(range(10 * B + 5))


def stored(store: KVStore, blocks: int) -> None:
    """Compute the prompt and have its blocks copied down."""
    run_prompt(store, "a", PROMPT)
    store.preempt("a")
    deadline = time.monotonic() + 60
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
    deadline = time.monotonic() + 60
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
        with server.hung(), Stopwatch() as watch:
            run_prompt(store, "b", list(range(5000, 5000 + 12 * B)))
            store.preempt("b")  # its copies are on their way to a server that does not answer
            waited = []
            for number in range(300):
                start = watch.seconds
                store.lookup(list(range(1000 * number, 1000 * number + 3 * B)))
                store.step()
                waited.append(watch.seconds - start)
                time.sleep(0.002)
            # Half the server's timeout: what a busy machine may take once, a wait for the server may not.
            assert sorted(waited)[-3] < 0.25
            assert store.metrics.get("dropped_blocks", tier="remote", cause="failed") > 0, "nothing hung"
            with pytest.raises(TierError):
                store.reset()
        store.close()


def references(tier: HostTier) -> int:
    """Readers and pins of all its copies, and slots that are still being written."""
    held = {entry for extent in tier._index._room.extents for entry in extent.entries}
    return sum(entry.reader_count + entry.pin_count for entry in held)


@pytest.mark.parametrize("codec", ["raw", "int4", "int8k"])
def test_case_077_round_trips_leave_no_reference_and_a_full_host_tier_admits_on(
    make_store: Callable[..., KVStore], monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """Down into host memory, from there to the server, and up again, through every codec, at three times its room."""
    lent: list[CopyKey] = []
    real = HostTier.lend

    def lend(tier: HostTier, keys: Sequence[CopyKey]) -> list[Loan | None]:
        loans = real(tier, keys)
        lent.extend(key for key, loan in zip(keys, loans, strict=True) if loan is not None)
        return loans

    monkeypatch.setattr(HostTier, "lend", lend)
    store = make_store(
        blocks=40,
        host_blocks=10 if codec == "raw" else 6,
        redis_url=shared_server().unix_url + f"?namespace=case077{codec}",
        codec=codec,
        residual_tokens=0,
        load_always=True,
        io_threads="thread",
    )
    host = store.tiers[0]
    assert isinstance(host, HostTier)

    def settle() -> None:
        deadline = time.monotonic() + 60
        while store.step().cooled_blocks or store._parts.upkeep.mover.is_moving:
            assert time.monotonic() < deadline, "something is never brought to an end"
            store.wait(0.05)

    prompts = [list(range(1000 * number, 1000 * number + 6 * B)) for number in range(12)]
    for prompt in prompts:
        before = store.metrics.get("spilled_blocks", tier="host")
        for _ in range(2):  # computed, and once more from below: what is used goes on to the server
            run_prompt(store, "s", prompt)
            settle()
            store.preempt("s")
            settle()
            store.pool.drop_all_idle()
        assert store.metrics.get("spilled_blocks", tier="host") > before, "a full host tier admits no more"
        assert references(host) == 0
        host.check_invariants()
    assert lent, "nothing went from host memory to the server"
    copy_bytes = host.used_bytes / host.copy_count
    assert store.metrics.get("spilled_blocks", tier="host") * copy_bytes >= 3 * host.capacity_bytes
    for prompt in (prompts[-1], prompts[0]):  # out of host memory, and from the server alone
        assert run_prompt(store, "s", [*prompt, 7]) == 6 * B
        check_bytes(store, "s", [*prompt, 7])
        store.finish("s")
        settle()
        assert references(host) == 0
    store.pool.drop_all_idle()
    assert store.usage().used_bytes == 0
