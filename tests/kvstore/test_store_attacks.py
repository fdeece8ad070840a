"""Attempts to be served wrong, stale or lossy bytes: each was once possible, or is one change away from it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from allocator import CacheGroup, CapacityError, GroupKind, KVGeometry, UsageError
from tests.kvstore.conftest import full_geometry
from tests.kvstore.driving import HeldExecutor, check_bytes, compute, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16


def two_windows() -> KVGeometry:
    def group(layer: int, kind: GroupKind, window: int | None) -> CacheGroup:
        return CacheGroup(kind=kind, layers=(layer,), kv_heads=1, key_dim=8, value_dim=8, window_tokens=window)

    return KVGeometry(
        groups=(group(0, GroupKind.SLIDING, 40), group(1, GroupKind.SLIDING, 24), group(2, GroupKind.FULL, None)),
        dtype="float32",
    )


def test_a_window_without_blocks_empties_the_plan_of_every_group(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=40, geometry=two_windows())
    prompt = list(range(6 * B))
    run_prompt(store, "a", prompt)
    store.finish("a")
    hashes = store.prepare(prompt).hashes
    for block_hash in hashes:
        block_id = store.pool.index(1).find(block_hash)
        if block_id is not None:
            store.pool.evict([block_id])
    assert store.lookup(prompt).tokens == 0
    assert run_prompt(store, "b", prompt) == 0
    store.check_invariants()
    check_bytes(store, "b", prompt)


def test_a_tail_cut_by_rollback_does_not_cool(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=40, codec="int4", residual_tokens=2 * B)
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)  # its blocks are queued for cooling
    store.rollback("a", 4 * B - 5)  # into block 4, still raw
    for _ in range(4):
        store.step()
    rest = prompt[: 4 * B + 5]
    check_bytes(store, "a", rest)
    store.fork("a", "child")
    for _ in range(4):
        store.step()
    compute(store, "a", [900, 901])
    compute(store, "child", [902])
    for name, tokens in (("a", [*rest, 900, 901]), ("child", [*rest, 902])):
        check_bytes(store, name, tokens)
        assert store.tables(name)[0].tolist()[4] & 1 == 0
    store.check_invariants()
    store.finish("a")
    store.abort("child")
    store.check_invariants()


def test_a_tail_cut_by_rollback_while_it_cools_stays_raw(make_store: Callable[..., KVStore]) -> None:
    executor = HeldExecutor()
    store = make_store(blocks=40, codec="int4", residual_tokens=2 * B)
    store._parts.upkeep.mover._executor = executor
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    store.step()  # blocks 1..5 are being encoded
    store.rollback("a", 4 * B - 5)
    executor.run()
    store.step()
    compute(store, "a", [900, 901])
    check_bytes(store, "a", [*prompt[: 4 * B + 5], 900, 901])
    store.check_invariants()


def test_one_failed_encode_does_not_hide_that_others_cooled(make_store: Callable[..., KVStore]) -> None:
    geometry = KVGeometry(
        groups=tuple(
            CacheGroup(kind=GroupKind.FULL, layers=(layer,), kv_heads=1, key_dim=8, value_dim=8) for layer in (0, 1)
        ),
        dtype="float32",
    )
    store = make_store(blocks=60, geometry=geometry, codec="int4", residual_tokens=2 * B)
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    encode = store._parts.device.encode

    def failing(group: int, full_slots: list[int], cold_slots: list[int]) -> list[bool]:
        if group == 1:
            raise MemoryError("no room for scratch")
        return encode(group, full_slots, cold_slots)

    store._parts.device.encode = failing  # type: ignore[method-assign]
    for _ in range(3):
        store.step()
    assert (store.tables("a")[0] & 1).any()
    assert not (store.tables("a")[1] & 1).any()
    assert store.metrics.get("kept_raw_blocks", cause="encode_failed") == 5
    compute(store, "a", list(range(900, 900 + B)))
    assert not store.is_exact("a")
    assert store.lookup([*prompt, *range(900, 900 + B), 1], exact=True).tokens <= B
    store.check_invariants()


def test_committed_and_unwritten_places_are_not_handed_out_for_writing(make_store: Callable[..., KVStore]) -> None:
    store = make_store()
    prompt = list(range(2 * B + 3))
    run_prompt(store, "a", prompt)
    run_prompt(store, "b", prompt)
    for start, count in ((0, 1), (B, B + 3), (2 * B, 3), (2 * B + 2, 2), (2 * B + 3, 1), (-1, 1), (2 * B + 3, -1)):
        with pytest.raises(UsageError, match=r"35 committed, 35 written"):
            store.slot_mapping("a", 0, start, count)
    store.grow("a", 2)
    assert len(store.slot_mapping("a", 0, 2 * B + 3, 2)) == 2
    with pytest.raises(UsageError, match="group"):
        store.slot_mapping("a", -1, 2 * B + 3, 1)
    with pytest.raises(UsageError, match="group"):
        store.slot_mapping("a", 1, 2 * B + 3, 1)


def test_a_hit_on_int4_blocks_is_not_called_exact(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=40, codec="int4", residual_tokens=2 * B)
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    for _ in range(3):
        store.step()
    store.finish("a")
    assert store.admit("b", [*prompt, 1]).reused_tokens == 8 * B
    assert not store.is_exact("b")
    assert store.admit("c", prompt[: B + 1]).reused_tokens == B
    assert store.is_exact("c")


def test_an_exact_fork_that_finds_no_room_stays_whole(make_store: Callable[..., KVStore]) -> None:
    store = make_store(blocks=6)
    prompt = list(range(2 * B + 5))
    run_prompt(store, "a", prompt, exact=True)
    store.fork("a", "child")
    run_prompt(store, "filler", list(range(500, 500 + 3 * B)), exact=True)
    with pytest.raises(CapacityError):
        store.grow("child", 1)
    store.check_invariants()
    store.finish("filler")
    compute(store, "child", [900])
    compute(store, "a", [901])
    check_bytes(store, "child", [*prompt, 900])
    check_bytes(store, "a", [*prompt, 901])
    for name in ("a", "child"):
        store.finish(name)
    store.check_invariants()


def test_latent_blocks_cool_spill_and_come_back(make_store: Callable[..., KVStore]) -> None:
    geometry = KVGeometry.latent(layers=2, latent_dim=64, rope_dim=16, dtype="bfloat16")
    store = make_store(blocks=40, host_blocks=40, geometry=geometry, codec="int4", residual_tokens=B, load_always=True)
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    for _ in range(4):
        store.step()
    before = store.tables("a")[0].tolist()
    assert [entry & 1 for entry in before] == [0, *[1] * 6, 0]
    assert store.slab is not None
    kept = [bytes(store.slab.slot_memory(entry & 1, entry >> 1)) for entry in before]
    check_bytes(store, "a", prompt)
    store.preempt("a")
    for _ in range(3):
        store.step()
    store.pool.drop_all_idle()
    assert run_prompt(store, "b", [*prompt, 5]) == 8 * B
    after = store.tables("b")[0].tolist()[:8]
    assert [bytes(store.slab.slot_memory(entry & 1, entry >> 1)) for entry in after] == kept
    check_bytes(store, "b", [*prompt, 5])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cold_blocks_of_every_dtype_decode_to_what_was_written(make_store: Callable[..., KVStore], dtype: str) -> None:
    from kvstore.device_blocks import block_shapes
    from tests.kvstore.driving import pattern

    geometry = full_geometry(dtype)
    store = make_store(blocks=40, geometry=geometry, codec="int4", residual_tokens=B)
    prompt = list(range(8 * B))
    run_prompt(store, "a", prompt)
    for _ in range(3):
        store.step()
    assert store.slab is not None
    assert store.cold_codec is not None
    want = pattern(prompt, 0, 2, 2, 64)
    cold = 0
    for position, entry in enumerate(store.tables("a")[0].tolist()):
        if entry & 1:
            cold += 1
            payload = store.slab.slot_bytes_view(1, entry >> 1)
            keys, values = store.cold_codec.decode(payload, block_shapes(geometry)[0], getattr(torch, dtype))
            expected = want[position * B : (position + 1) * B].permute(1, 2, 0, 3)
            assert (keys.float() - expected).abs().max() < 0.2
            assert values is not None
            assert (values.float() + expected).abs().max() < 0.5
    assert cold == 6
