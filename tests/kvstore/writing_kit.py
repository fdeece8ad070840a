"""Stores whose lower tiers are slow: copies go there by write-behind, through a queue, a policy and a buffer."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvstore import HostTier, KVStore
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import HeldExecutor, run_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.executor import Executor

B = 16
SLOT = full_geometry().full_slot_bytes(0)


class DistantTier(HostTier):
    """A real arena that the store takes for somebody else's: asked about by the policy, staged, written behind."""

    private_memory = False
    put_batch_copies = 16


def distant(blocks: int = 64, executor: Executor | None = None, name: str = "disk") -> tuple[DistantTier, HeldExecutor]:
    held = HeldExecutor()
    return DistantTier(blocks * SLOT, held if executor is None else executor, name=name), held


def prompt(seed: int, blocks: int) -> list[int]:
    return list(range(1000 * seed, 1000 * seed + blocks * B + 1))


def serve(store: KVStore, name: str, token_ids: Sequence[int]) -> int:
    """One request from beginning to end; the tokens it reused."""
    reused = run_prompt(store, name, token_ids)
    store.finish(name)
    store.step()
    return reused


def settle(store: KVStore, seconds: float = 10.0) -> None:
    """Step until nothing moves down any more."""
    deadline = time.monotonic() + seconds
    writes = store._parts.upkeep.writes
    while writes.waiting_blocks or writes.under_way_blocks:
        assert time.monotonic() < deadline, "copies still under way"
        store.wait(0.02)
        store.step()


def offered(store: KVStore, tier: str) -> dict[str, int]:
    """What became of the copies offered to a tier."""
    outcomes = ("admitted", "refused", "coalesced")
    return {one: int(store.metrics.get("offered_blocks", tier=tier, outcome=one)) for one in outcomes}
