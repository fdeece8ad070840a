"""Small real stores and loops over the toy model, and the checks that every loop test makes after each step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from allocator import CacheGroup, GroupKind, KVGeometry
from engine_adapter.decode_loop import DecodeLoop, StepOutcome
from engine_adapter.request import Request, RequestResult
from engine_adapter.testing import ToyModel, ToyRunner, toy_generate
from kvstore import HostTier, Identity, KVStore, KVStoreConfig
from kvstore.executor import InlineExecutor, ThreadExecutor
from kvstore.testing import Faults, FaultyTier

VOCAB = 97


def geometry(kind: str, block_tokens: int = 4) -> KVGeometry:
    """One of the attention families, tiny: full, sliding, hybrid, latent."""
    full = CacheGroup(kind=GroupKind.FULL, layers=(0, 2), kv_heads=2, key_dim=8, value_dim=4)
    window = CacheGroup(kind=GroupKind.SLIDING, layers=(1, 3), kv_heads=1, key_dim=8, value_dim=8, window_tokens=10)
    if kind == "full":
        return KVGeometry.uniform(layers=2, kv_heads=2, head_dim=8, dtype="float32", block_tokens=block_tokens)
    if kind == "sliding":
        return KVGeometry.uniform(
            layers=2, kv_heads=1, head_dim=8, dtype="float32", block_tokens=block_tokens, window_tokens=10
        )
    if kind == "hybrid":
        return KVGeometry(groups=(full, window), block_tokens=block_tokens, dtype="float32")
    if kind == "latent":
        return KVGeometry.latent(layers=2, latent_dim=12, rope_dim=4, dtype="float32", block_tokens=block_tokens)
    raise ValueError(kind)


FAMILIES = ("full", "sliding", "hybrid", "latent")


def make_store(
    kv: KVGeometry,
    *,
    blocks: int = 64,
    host_blocks: int = 0,
    faults: Faults | None = None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> KVStore:
    """A store with room for about `blocks` full blocks of each group; raw and without threads unless told otherwise.

    With `faults` its host tier loses, tears, flips, delays and repeats, drawn from `seed`.
    """
    block_bytes = sum(-(-kv.full_slot_bytes(group) // 64) * 64 for group in range(len(kv.groups)))
    chosen: dict[str, Any] = {
        "device_bytes": blocks * block_bytes,
        "host_bytes": host_blocks * (block_bytes + 4096),
        "codec": "raw",
        "io_threads": "inline",
        "share": True,  # stores of one test stand for processes, and names that repeat make runs repeat
        "fetch_deadline_seconds": 20.0,  # where none is meant: a busy machine is slow
        **settings,
    }
    identity = Identity(model="toy", weights="0" * 64, geometry=kv)
    tiers = None
    if faults is not None:
        executor = InlineExecutor() if chosen["io_threads"] == "inline" else ThreadExecutor()
        tiers = [FaultyTier(HostTier(chosen["host_bytes"], executor), faults, seed=seed)]
    return KVStore(kv, identity, KVStoreConfig(**chosen), tiers=tiers, clock=clock)


def prompt(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@dataclass
class Kit:
    """A store, a loop over it, and the oracle."""

    store: KVStore
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = ToyRunner.over(self.store, vocab_size=VOCAB)
        self.model: ToyModel = self.runner.model
        self.loop = DecodeLoop(self.runner, self.store, **{"max_batch_sequences": 4, "step_tokens": 16, **self.options})
        self.outcomes: list[StepOutcome] = []
        self.available_at_start = self.available()

    def step(self) -> StepOutcome:
        outcome = self.loop.step()
        self.outcomes.append(outcome)
        self.store.check_invariants()
        for stream in self.loop._scheduler.running:
            written = self.store.written_tokens(stream.sequence_id)
            assert written == self.store.committed_tokens(stream.sequence_id) == stream.computed, stream.sequence_id
        if outcome.idle:
            self.store.wait(0.05)
        return outcome

    def drive(self, *requests: Request, limit: int = 5000) -> dict[str, RequestResult]:
        """Submit, step to the end with all checks, and return the results."""
        for request in requests:
            self.loop.submit(request)
        for _ in range(limit):
            if not self.loop.busy:
                return self.loop.collect()
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def expect(self, prompt_ids: Sequence[int], count: int) -> tuple[int, ...]:
        return tuple(toy_generate(self.model, prompt_ids, count))

    def check(self, results: dict[str, RequestResult], requests: Iterable[Request]) -> None:
        """Every request's tokens are the oracle's."""
        for request in requests:
            result = results[request.request_id]
            assert result.error is None, (request.request_id, result.error)
            assert result.token_ids == self.expect(request.token_ids, request.output_limit), request.request_id

    def run_checked(self, *requests: Request) -> dict[str, RequestResult]:
        results = self.drive(*requests)
        self.check(results, requests)
        self.nothing_left()
        return results

    def nothing_left(self) -> None:
        """No sequence lives, nothing is in flight, and every slot can be had again."""
        assert not self.loop.busy
        assert self.store.sequence_ids() == []
        for _ in range(6000):
            for _ in range(40):  # a late completion comes some polls later, and queued copies follow it
                self.store.step()
            if not self.store.wait(0.01) and not self.store._upkeep.mover.is_moving:
                break
        self.store.check_invariants()
        assert self.available() == self.available_at_start, "blocks leak"

    def available(self) -> list[int]:
        return [self.store.pool.available(group) for group in range(len(self.store.geometry.groups))]


KitMaker = Callable[..., Kit]
