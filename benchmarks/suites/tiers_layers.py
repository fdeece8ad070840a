"""Layers of a prefix as they come: when the first can be computed, and when the first token is there.

The `tiers` suite calls `rows`. One store a tier, which loads the same prefix by layers and not, in turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from allocator import KVGeometry
from benchmarks.redis_server import RedisServer, server_binary
from benchmarks.rows import Options, Row, compared, rotated
from kvstore import Identity, KVStore, KVStoreConfig

_LAYERS, _HEADS, _KV_HEADS, _DIM, _WIDTH = 32, 32, 8, 128, 4096  # an 8B model's attention
_GEOMETRY = KVGeometry.uniform(layers=_LAYERS, kv_heads=_KV_HEADS, head_dim=_DIM, dtype="bfloat16")  # 2 MiB a block
_BLOCKS = 64
_QUICK = 16  # times less in a quick run
_CHUNK_TOKENS = 8
_FIRST_NOTE = (
    "Seconds from admit until layer 0 of a prefix of 1,024 tokens (32 layers, 8 KV heads of 128, bf16: 128 MiB) is on "
    "the device and verified. The baseline fetches the same blocks one after the other, whole."
)
_TTFT_NOTE = (
    "Seconds from admit until the last 8 tokens behind that prefix are computed, by an attention stack of this shape "
    "with random weights (no MLP, one set of weights for all layers), one thread; loading runs on the tier's thread. "
    "The baseline begins to compute when all is there."
)


class _Times(NamedTuple):
    first_seconds: float
    token_seconds: float


class _Stack:
    """32 layers of attention over a store's blocks."""

    def __init__(self, store: KVStore, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)

        def weights(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=draw).div(rows**0.5).to(torch.bfloat16)

        kv = _KV_HEADS * _DIM
        self._query, self._out = weights(_WIDTH, _WIDTH), weights(_WIDTH, _WIDTH)
        self._key, self._value = weights(_WIDTH, kv), weights(_WIDTH, kv)
        self._keys, self._values = store.slab.keys_view(0), store.slab.values_view(0)  # type: ignore[union-attr]

    def layer(self, number: int, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """x: Tensor[tokens, width]. The new tokens' own KV stays out: what is measured is reading the prefix."""
        tokens = len(x)
        query = (x @ self._query).view(tokens, _HEADS, _DIM).transpose(0, 1)
        x @ self._key, x @ self._value
        keys, values = (
            view[slots, number].transpose(0, 1).reshape(_KV_HEADS, -1, _DIM) for view in (self._keys, self._values)
        )
        found = torch.nn.functional.scaled_dot_product_attention(query[None], keys[None], values[None], enable_gqa=True)
        return x + found[0].transpose(0, 1).reshape(tokens, _WIDTH) @ self._out


class _Side:
    """A store over one tier that holds the prefix."""

    def __init__(self, blocks: int, seed: int, **tier: Any) -> None:
        slot_bytes = _GEOMETRY.full_slot_bytes(0)
        config = KVStoreConfig(
            device_bytes=(blocks + 8) * slot_bytes,
            codec="raw",
            spill_policy="everything",
            load_always=True,
            fetch_deadline_seconds=60.0,
            **tier,
        )
        self.store = KVStore(_GEOMETRY, Identity(model="bench", weights="none", geometry=_GEOMETRY), config)
        self._tokens = list(range(blocks * 16 + _CHUNK_TOKENS))
        self._stack = _Stack(self.store, seed)
        self._x = torch.randn(_CHUNK_TOKENS, _WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        self._fill(blocks)

    def _fill(self, blocks: int) -> None:
        store = self.store
        while store.admit("writer", self._tokens).ask_again:
            store.wait(0.01)
            store.step()
        store.grow("writer", blocks * 16)
        store.slab.keys_view(0).normal_(), store.slab.values_view(0).normal_()  # type: ignore[union-attr]
        store.commit_prompt("writer", blocks * 16)
        store.preempt("writer")
        name = store.tiers[0].name
        deadline = time.monotonic() + 60
        while store.metrics.get("spilled_blocks", tier=name) < blocks:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the prefix did not reach tier {name}")
            store.step()
            store.wait(0.05)
        store.pool.drop_all_idle()

    def round(self, *, by_layer: bool) -> _Times:
        store = self.store
        store.fetch_by_layer = by_layer
        while store.lookup(self._tokens).pending:
            store.wait(0.01)
            store.step()
        begun = time.perf_counter()
        pending = store.admit("reader", self._tokens).pending_tokens
        if pending != len(self._tokens) - _CHUNK_TOKENS:
            raise RuntimeError(f"{pending} tokens are loaded of {len(self._tokens)}")
        if not by_layer:
            self._wait_all(pending)
        elif not store.wait_layer("reader", 0, 60.0):
            raise RuntimeError("layer 0 did not come")
        first = time.perf_counter() - begun
        store.grow("reader", _CHUNK_TOKENS)
        slots = torch.from_numpy(store.tables("reader")[0][: pending // 16] >> 1)
        x = self._x
        for layer in range(_LAYERS):
            if by_layer and not store.wait_layer("reader", layer, 60.0):
                raise RuntimeError(f"layer {layer} did not come")
            x = self._stack.layer(layer, x, slots)
        self._wait_all(pending)
        store.commit_prompt("reader", _CHUNK_TOKENS)
        seconds = time.perf_counter() - begun
        store.abort("reader")
        store.pool.drop_all_idle()
        return _Times(first, seconds)

    def _wait_all(self, pending: int) -> None:
        while not (state := self.store.fetch("reader")).done:
            self.store.wait(0.05)
            self.store.step()
        if state.ready_tokens != pending:
            raise RuntimeError(f"{state.ready_tokens} of {pending} tokens came: {self.store.tiers[0].counters()}")


def rows(options: Options) -> Iterator[Row]:
    """Two rows a tier; of disk alone where there is no server to start."""
    blocks = _BLOCKS // (_QUICK if options.quick else 1)
    with ExitStack() as stack:
        places: dict[str, dict[str, Any]] = {}
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvstore-bench-"))
        places["disk"] = {"disk_path": directory, "disk_bytes": 2 * blocks * _GEOMETRY.full_slot_bytes(0) + (8 << 20)}
        places["disk"]["share"] = True
        binary = server_binary()
        if binary is None:
            options.log("tiers: no Valkey or Redis here: layers from a server are not measured")
        else:
            server = stack.enter_context(RedisServer(binary))
            places["redis_uds"] = {"redis_url": f"unix://{server.path}", "share": True}
        for name, tier in places.items():
            yield from _rows_of(options, name, _Side(blocks, options.seed, **tier))


def _rows_of(options: Options, name: str, side: _Side) -> Iterator[Row]:
    found: dict[bool, list[_Times]] = {True: [], False: []}

    def run(by_layer: bool) -> float:
        found[by_layer].append(side.round(by_layer=by_layer))
        return found[by_layer][-1].token_seconds

    with torch.inference_mode(), side.store:
        rotated({"by_layer": lambda _: run(True), "whole": lambda _: run(False)}, options.rounds)
    parts = (("first_layer", "first_seconds", _FIRST_NOTE), ("ttft", "token_seconds", _TTFT_NOTE))
    for case, field, note in parts:
        ours, theirs = ([getattr(one, field) for one in found[way][1:]] for way in (True, False))  # the first warms up
        case = f"{case}_by_layer_{name}"
        yield compared("tiers", case, "s", ours, better="smaller", baseline="whole blocks", theirs=theirs, note=note)
