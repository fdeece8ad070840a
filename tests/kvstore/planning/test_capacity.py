"""Blocks, requests that fit and floors, against counting by hand and against the real pool."""

from __future__ import annotations

from itertools import pairwise

import pytest

from allocator import COLD, FULL, BlockPool, CapacityError, ConfigError, ExtentLayout
from kvstore.planning.builtin_shapes import CONFIGS, find_shape
from kvstore.planning.capacity import Capacity, Demand, Machine, attended_pairs, weights_read_bytes

GIB = 1 << 30


def machine(kv_bytes: int = 80 * GIB, weights_bytes: int = 16 * 10**9) -> Machine:
    return Machine(
        memory_bytes=kv_bytes + weights_bytes, bytes_per_second=3e12, flops_per_second=9e14,
        weights_bytes=weights_bytes, usable_fraction=1.0,
    )  # fmt: skip


def planned(model: str, codec: str = "raw", **demand: int) -> Capacity:
    return Capacity(find_shape(model), Demand(**{"context_tokens": 4096, **demand}), codec)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 127, 128, 129, 160, 511, 512, 513, 4095, 5000])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-1b", "gpt-oss-20b", "deepseek-v2-lite"])
def test_blocks_are_those_that_a_request_holds(model: str, tokens: int) -> None:
    capacity = planned(model, "int4")
    for group, count in zip(capacity.geometry.groups, capacity.blocks(tokens), strict=True):
        oldest = 0 if group.window_tokens is None else max(0, tokens - group.window_tokens + 1)
        held = {position // 16 for position in range(oldest, tokens)}
        cold = {block for block in held if block > 0 and (block + 1) * 16 + 128 <= tokens}
        assert (count.full, count.cold) == (len(held - cold), len(cold))


def test_shared_blocks_are_counted_once() -> None:
    capacity = planned("llama-3.1-8b", context_tokens=1000)
    one = capacity.request_bytes
    assert capacity.total_bytes(5, 0) == 5 * one
    assert capacity.total_bytes(5, 800) == one + 4 * 13 * capacity.geometry.full_slot_bytes(0)  # 63 - 50 blocks
    assert capacity.requests_that_fit(10 * GIB, 800) > 4 * capacity.requests_that_fit(10 * GIB)


@pytest.mark.parametrize("tenths", range(70, 90, 1))
@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma-3-270m", "deepseek-v2-lite"])
def test_as_many_requests_fit_as_the_pool_has_room_for(model: str, codec: str, tenths: int) -> None:
    """The real pool is asked for the blocks of that many requests and gives them; of one more it does not."""
    capacity = planned(model, codec, context_tokens=600)
    kv_bytes = tenths * capacity.request_bytes // 10
    count = capacity.requests_that_fit(kv_bytes)
    assert count >= 5
    pool = BlockPool(ExtentLayout(kv_bytes, capacity._full_bytes, capacity._cold_bytes))

    def place_one() -> None:
        for group, blocks in enumerate(capacity.blocks(600)):
            pool.allocate(group, blocks.full, form=FULL)
            pool.allocate(group, blocks.cold, form=COLD)

    for _ in range(count):
        place_one()
    with pytest.raises(CapacityError):
        place_one()


def test_nothing_fits_where_the_weights_leave_nothing() -> None:
    assert planned("llama-3.1-70b").requests_that_fit(0) == 0
    assert planned("llama-3.1-70b").requests_that_fit(-5) == 0
    assert planned("llama-3.1-70b", context_tokens=131072).requests_that_fit(39 * GIB) == 0


def test_a_decode_step_reads_the_weights_and_every_requests_kv() -> None:
    capacity, here = planned("llama-2-7b", concurrency=16), machine()
    step = capacity.decode_step(here, 16)
    shape = capacity.shape
    weights = here.weights_bytes * (shape.parameters - shape.embedding_parameters) // shape.parameters
    assert step.read_bytes == pytest.approx(weights + 16 * 4096 * 512 * 1024, rel=1e-6)
    assert (step.bound_by, step.seconds) == ("bandwidth", step.read_bytes / 3e12)


def test_a_long_prompt_is_bound_by_compute_and_reuse_makes_it_shorter() -> None:
    capacity, here = planned("llama-3.1-8b", context_tokens=8192), machine()
    cold = capacity.prefill(here)
    assert cold.bound_by == "compute"
    # 2 x parameters x tokens, and attention of half the square: within a few percent of the textbook's figure.
    assert cold.flops == pytest.approx(2 * 7.0e9 * 8192 + 2 * 32 * 32 * 256 * 8192**2 / 2, rel=0.01)
    warm = capacity.prefill(here, reused_tokens=8176)
    assert warm.bound_by == "bandwidth"
    assert warm.seconds < cold.seconds / 20


@pytest.mark.parametrize(
    ("computed", "before", "window"), [(5, 0, None), (5, 7, None), (9, 0, 4), (9, 2, 4), (3, 9, 4)]
)
def test_attended_pairs(computed: int, before: int, window: int | None) -> None:
    expected = sum(min(position + 1, window or 10**9) for position in range(before, before + computed))
    assert attended_pairs(computed, before, window) == expected


def test_a_step_reads_only_the_experts_that_are_drawn() -> None:
    shape, here = find_shape("deepseek-v3"), machine(weights_bytes=671_000_000_000)
    reads = [weights_read_bytes(shape, here, tokens) for tokens in (1, 8, 64, 4096)]
    assert all(few < more for few, more in pairwise(reads))
    assert reads[0] == pytest.approx((shape.active_parameters + shape.embedding_parameters) * 1e0, rel=0.01)
    assert reads[-1] == pytest.approx(671e9 - shape.embedding_parameters, rel=0.001)


@pytest.mark.parametrize("model", sorted(CONFIGS))
def test_int4_and_windows_never_need_more(model: str) -> None:
    for context in (1, 17, 2048, 40_000):
        raw, int4 = planned(model, context_tokens=context), planned(model, "int4", context_tokens=context)
        assert int4.request_bytes <= raw.request_bytes
        assert raw.request_bytes <= raw.geometry.token_bytes * (context + 16)


@pytest.mark.parametrize(
    ("codec", "block", "text"), [("int4", 8, "block_tokens: got 8"), ("int9", 16, "codec: got 'int9'")]
)
def test_settings_that_cannot_be(codec: str, block: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        planned("llama-3.1-8b", codec, block_tokens=block)
