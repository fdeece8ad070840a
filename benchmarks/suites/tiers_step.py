"""A decode step beside a server that hangs: `KVStore.step()` while the remote tier answers, and while it is stopped.

The `tiers` suite calls `rows`. One store, one real server, stopped and continued by signals in turn.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from allocator import CapacityError, KVGeometry
from benchmarks.redis_server import RedisServer, server_binary
from benchmarks.rows import Options, Row, compared
from kvstore import Identity, KVStore, KVStoreConfig

_GEOMETRY = KVGeometry.uniform(layers=8, kv_heads=4, head_dim=64, dtype="bfloat16")  # 128 KiB a block
_BLOCKS = 256
_SEQUENCES = 8
_PROMPT_BLOCKS = 8
_PROMPTS = 24
_OUTPUT_TOKENS = 40
_FORWARD_SECONDS = 1e-3
_STEPS = 600
_QUICK = 6
_RECOVERY_SECONDS = 20.0
_NOTE = (
    "p99 of step() over 600 steps of a loop of 8 sequences that admits, commits, finishes and preempts, with every "
    "block written behind to Valkey on a Unix socket; 1 ms between steps stands for the forward pass. The baseline is "
    "the same loop while the server answers."
)


class _Loop:
    """As an engine drives a store: who cannot be admitted yet is asked for again, the others go on."""

    def __init__(self, store: KVStore, seed: int) -> None:
        self.store = store
        self._draw = random.Random(seed)
        self._count = 0
        self._live: dict[str, int] = {}  # output tokens so far
        self._waiting: deque[tuple[str, list[int]]] = deque()

    def steps(self, count: int) -> list[float]:
        """Seconds of each step()."""
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            self.store.step()
            seconds.append(time.perf_counter() - start)
            self._serve()
            time.sleep(_FORWARD_SECONDS)
        return seconds

    def _serve(self) -> None:
        while len(self._live) + len(self._waiting) < _SEQUENCES:
            self._count += 1
            prompt = self._draw.randrange(_PROMPTS) if self._draw.random() < 0.5 else _PROMPTS + self._count
            tokens = [(prompt * 131 + place) % 50_000 for place in range(_PROMPT_BLOCKS * 16 + 1)]
            self._waiting.append((f"s{self._count}", tokens))
        for _ in range(len(self._waiting)):
            name, tokens = self._waiting.popleft()
            if self.store.admit(name, tokens).ask_again:
                self._waiting.append((name, tokens))
            else:
                self._live[name] = -1
        for name in list(self._live):
            self._advance(name)

    def _advance(self, name: str) -> None:
        store = self.store
        state = store.fetch(name)
        if not state.done:
            return
        done = self._live[name]
        count = _PROMPT_BLOCKS * 16 + 1 - state.ready_tokens if done < 0 else 1
        try:
            store.grow(name, count)
        except CapacityError:
            store.preempt(name)
            del self._live[name]
            return
        if done < 0:
            store.commit_prompt(name, count)
            store.prefill_done(name)
        else:
            store.commit(name, [done])
        self._live[name] += 1
        if self._live[name] >= _OUTPUT_TOKENS:
            (store.preempt if self._draw.random() < 0.25 else store.finish)(name)
            del self._live[name]


def rows(options: Options) -> Iterator[Row]:
    """The row, or none and a line that says why where there is no server to start."""
    binary = server_binary()
    if binary is None:
        options.log("tiers: no Valkey or Redis here: steps beside a hung server are not measured")
        return
    count = _STEPS // (_QUICK if options.quick else 1)
    with RedisServer(binary) as server:
        identity = Identity(model="bench", weights="none", geometry=_GEOMETRY)
        config = KVStoreConfig(
            device_bytes=_BLOCKS * _GEOMETRY.full_slot_bytes(0),
            codec="raw",
            redis_url=f"unix://{server.path}",
            spill_policy="everything",
            load_always=True,
        )
        with KVStore(_GEOMETRY, identity, config) as store:
            loop = _Loop(store, options.seed)
            loop.steps(count)  # warms up
            healthy: list[float] = []
            hung: list[float] = []
            for round_number in range(options.rounds):
                sides = [(healthy, False), (hung, True)]
                for samples, stopped in sides if round_number % 2 else reversed(sides):
                    samples.append(_round(loop, server, count, stopped=stopped))
    yield compared(
        "tiers",
        "step_p99_remote_hung_vs_healthy",
        "us",
        [one * 1e6 for one in hung],
        better="smaller",
        baseline="server answers",
        theirs=[one * 1e6 for one in healthy],
        note=_NOTE,
    )


def _round(loop: _Loop, server: RedisServer, count: int, *, stopped: bool) -> float:
    """p99 of one side's steps, in seconds."""
    if stopped:
        server.stop()
    else:
        _recover(loop)
    try:
        return float(np.percentile(loop.steps(count), 99))
    finally:
        if stopped:
            server.resume()


def _recover(loop: _Loop) -> None:
    """Go on until copies reach the server again."""
    metrics = loop.store.metrics
    before, deadline = metrics.get("spilled_blocks", tier="remote"), time.monotonic() + _RECOVERY_SECONDS
    while metrics.get("spilled_blocks", tier="remote") <= before:
        if time.monotonic() > deadline:
            raise RuntimeError("the tier did not come back after the server did")
        loop.steps(20)
