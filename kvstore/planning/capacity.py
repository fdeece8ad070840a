"""KV bytes, requests that fit, and the least time that a decode step and a prompt can take. Pure arithmetic.

What is counted as the allocator counts it: whole blocks, slots aligned, extents and their spare one, INT4 records with
scales and padding, the first block and the newest tokens of a request in full precision, window blocks only where a
group has a window. Floors assume that nothing else costs time: a machine cannot be faster, and is usually slower.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from allocator import ConfigError, ExtentLayout, KVGeometry
from kvstore.planning.model_config import ModelShape
from kvstore.planning.record_sizes import cold_block_bytes

_SEARCH_LIMIT = 1 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is asked for. context_tokens: of one request, its answer included. concurrency: requests that decode
    together. shared_tokens: leading tokens that all of them have in common."""

    context_tokens: int
    concurrency: int = 1
    shared_tokens: int = 0
    block_tokens: int = 16
    dtype: str = "bfloat16"
    residual_tokens: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """All cards together. usable_fraction: of the memory, what weights and KV may take."""

    memory_bytes: int
    bytes_per_second: float
    flops_per_second: float
    weights_bytes: int
    usable_fraction: float = 0.9

    @property
    def kv_bytes(self) -> int:
        """Left for KV; negative when the weights alone do not fit."""
        return int(self.memory_bytes * self.usable_fraction) - self.weights_bytes


@dataclass(frozen=True, slots=True)
class Floor:
    """The least time of something, and what sets it: "bandwidth" or "compute"."""

    seconds: float
    bound_by: str
    read_bytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class BlockCount:
    """Blocks of one group in full precision and cold."""

    full: int
    cold: int


class Capacity:
    """One model under one demand with one codec of cold blocks. Raises ConfigError for what cannot be."""

    def __init__(self, shape: ModelShape, demand: Demand, codec: str) -> None:
        self.shape = shape
        self.demand = demand
        self.codec = codec
        self.geometry: KVGeometry = shape.geometry(demand.block_tokens, demand.dtype)
        groups = range(len(self.geometry.groups))
        self._full_bytes = tuple(self.geometry.full_slot_bytes(group) for group in groups)
        self._cold_bytes = cold_block_bytes(self.geometry, codec)

    @cached_property
    def token_bytes(self) -> float:
        """Bytes that a token takes in all groups once its block is cold (raw: in full precision); windows ignored."""
        blocks = self._cold_bytes or self._full_bytes
        return sum(blocks) / self.demand.block_tokens

    def blocks(self, tokens: int, *, after: int = 0) -> tuple[BlockCount, ...]:
        """Blocks that a request of `tokens` tokens holds, a count a group; of these, those behind `after` tokens."""
        size = self.demand.block_tokens
        cold_end = (tokens - self.demand.residual_tokens) // size if self._cold_bytes else 0
        counts = []
        for group in self.geometry.groups:
            window = group.window_tokens
            first = 0 if window is None else max(0, tokens - window + 1) // size
            first = max(first, after // size)
            held = max(0, -(-tokens // size) - first)
            cold = max(0, cold_end - max(first, 1))
            counts.append(BlockCount(held - cold, cold))
        return tuple(counts)

    def bytes_of(self, counts: tuple[BlockCount, ...]) -> int:
        cold_bytes = self._cold_bytes or (0,) * len(counts)
        return sum(
            count.full * full + count.cold * cold
            for count, full, cold in zip(counts, self._full_bytes, cold_bytes, strict=True)
        )

    @cached_property
    def request_bytes(self) -> int:
        """KV of one request that shares with nobody."""
        return self.bytes_of(self.blocks(self.demand.context_tokens))

    def total_bytes(self, requests: int, shared_tokens: int) -> int:
        """KV of `requests` requests that share their first `shared_tokens` tokens."""
        whole = self.bytes_of(self.blocks(self.demand.context_tokens))
        own = self.bytes_of(self.blocks(self.demand.context_tokens, after=shared_tokens))
        return whole + (requests - 1) * own

    def requests_that_fit(self, kv_bytes: int, shared_tokens: int = 0) -> int:
        """How many requests of the full context are resident at once, in extents as the allocator cuts them."""
        if kv_bytes <= 0:
            return 0
        try:
            layout = ExtentLayout(kv_bytes, self._full_bytes, self._cold_bytes)
        except ConfigError:  # not even one extent and the spare one
            return 0
        whole = self.blocks(self.demand.context_tokens)
        own = self.blocks(self.demand.context_tokens, after=shared_tokens)

        def extents(requests: int) -> int:
            needed = 0
            for group, (all_of_one, more) in enumerate(zip(whole, own, strict=True)):
                for form, first, each in ((0, all_of_one.full, more.full), (1, all_of_one.cold, more.cold)):
                    count = first + (requests - 1) * each
                    needed += -(-count // layout.per_extent[2 * group + form]) if count else 0
            return needed

        room = layout.extent_count - layout.spare_count
        if extents(1) > room:
            return 0
        low, high = 1, 2
        while high < _SEARCH_LIMIT and extents(high) <= room:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if extents(middle) <= room else (low, middle)
        return low

    # Floors

    def decode_step(self, machine: Machine, requests: int) -> Floor:
        """A step that puts out one token for each of `requests` requests at full context."""
        shape = self.shape
        read = weights_read_bytes(shape, machine, requests) + requests * self.request_bytes
        width = 2 * shape.query_heads * (shape.score_dim + shape.value_dim)
        visible = sum(
            len(group.layers) * min(self.demand.context_tokens, group.window_tokens or self.demand.context_tokens)
            for group in shape.groups
        )
        flops = requests * (2.0 * (shape.active_parameters + shape.embedding_parameters) + width * visible)
        return _floor(machine, read, flops)

    def prefill(self, machine: Machine, reused_tokens: int = 0) -> Floor:
        """The first token of a prompt of context_tokens, of which the first `reused_tokens` are not computed."""
        shape = self.shape
        computed = max(1, self.demand.context_tokens - reused_tokens)
        width = 2 * shape.query_heads * (shape.score_dim + shape.value_dim)
        pairs = sum(
            len(group.layers) * attended_pairs(computed, self.demand.context_tokens - computed, group.window_tokens)
            for group in shape.groups
        )
        flops = 2.0 * shape.active_parameters * computed + 2.0 * shape.embedding_parameters + width * pairs
        read = weights_read_bytes(shape, machine, computed)
        if reused_tokens:
            read += self.bytes_of(self.blocks(reused_tokens))
        return _floor(machine, read, flops)


def attended_pairs(computed: int, before: int, window: int | None) -> int:
    """(query, key) pairs of `computed` tokens that follow `before` others, causal, under a window."""
    if window is None:
        return computed * before + computed * (computed + 1) // 2
    growing = max(0, min(computed, window - before))  # tokens that still see everything before them
    return growing * before + growing * (growing + 1) // 2 + (computed - growing) * window


def weights_read_bytes(shape: ModelShape, machine: Machine, tokens: int) -> int:
    """Weights that a step over `tokens` tokens reads: of routed experts those that are drawn, if all are alike."""
    parameters = float(shape.base_parameters + shape.embedding_parameters)
    if shape.experts is not None:
        missed = (1 - shape.experts.per_token / shape.experts.count) ** tokens
        parameters += shape.experts.parameters * shape.experts.count * (1 - missed)
    return int(machine.weights_bytes * parameters / shape.parameters)


def _floor(machine: Machine, read_bytes: int, flops: float) -> Floor:
    reading, computing = read_bytes / machine.bytes_per_second, flops / machine.flops_per_second
    bound_by = "bandwidth" if reading >= computing else "compute"
    return Floor(max(reading, computing), bound_by, read_bytes, flops)
