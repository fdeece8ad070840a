"""What the C kernels of a step are handed by mistake is refused before they use it; softcaps of any size; NaN."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from allocator import CacheGroup, GroupKind, KVGeometry, UsageError
from engine_adapter.attention import AttentionSettings, get_backend
from engine_adapter.paged_cache import PagedCache
from quant import native
from tests.engine_adapter.attention_kit import HEADS, MIXED_LENGTHS, PLAIN, SINKS, Scene
from tests.engine_adapter.paged_kit import make_slab

pytestmark = pytest.mark.skipif(native.kernels is None, reason=f"no C kernels: {native.reason}")


@pytest.fixture(params=native.available_paths())
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced_path(request.param):
        yield request.param


@pytest.mark.parametrize("tokens", [0, 2, 4])
def test_a_query_of_more_or_fewer_tokens_than_the_plan_is_refused(tokens: int) -> None:
    """The kernels write a row for each token of the plan, wherever the output ends."""
    scene, backend = Scene([(100, 1), (50, 2)]), get_backend("native")
    plan = backend.plan(scene.cache, 0, scene.batch())
    query = torch.zeros(tokens, HEADS, 16)
    with pytest.raises(UsageError, match="plan group 0 of 3 tokens"):
        backend.attend(plan, 0, query, query, query, PLAIN)


def test_a_query_without_heads_is_refused() -> None:
    scene, backend = Scene([(100, 1)]), get_backend("native")
    plan = backend.plan(scene.cache, 0, scene.batch())
    query = torch.zeros(1, 0, 16)
    with pytest.raises(UsageError, match="does not fit"):
        backend.attend(plan, 0, query, query, query, PLAIN)


@pytest.mark.parametrize("value_dim", [0, -1, 17])
def test_latent_v_of_no_dims_or_too_many_is_refused(value_dim: int) -> None:
    scene = Scene([(100, 1)], value_dim=0, kv_heads=1)
    with pytest.raises(UsageError, match=f"V of {value_dim} does not fit"):
        scene.run(get_backend("native"), 0, AttentionSettings(0.25, latent_value_dim=value_dim))


@pytest.mark.parametrize("sinks", [torch.zeros(1), torch.zeros(HEADS + 1), torch.zeros(HEADS, device="meta")], ids=str)
def test_sinks_that_are_not_one_a_head_are_refused(sinks: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="do not fit 6 query heads"):
        Scene([(100, 1)]).run(get_backend("native"), 0, AttentionSettings(0.25, sinks=sinks))


@pytest.mark.parametrize("cold_share", [0.0, 0.5])
@pytest.mark.parametrize("softcap", [-30.0, 1e-3, 1e5, 1e7, 1e30])
def test_a_softcap_far_from_the_scores_costs_no_digits(path: str, softcap: float, cold_share: float) -> None:
    """Far above them it changes nothing, so that tanh must be good relative to its argument; its sign says nothing."""
    scene = Scene(MIXED_LENGTHS, cold_share=cold_share)
    settings = AttentionSettings(0.25, softcap=softcap)
    assert scene.relative_error(get_backend("native"), 1, settings) <= (1e-4 if cold_share else 2e-6)


def test_an_index_is_good_for_the_group_that_checked_it_only() -> None:
    """Places of a group of small blocks may lie behind the end of another's; so may those of another cache."""
    shapes = ((0,), 1, 8), ((1,), 8, 64)
    groups = tuple(
        CacheGroup(kind=GroupKind.FULL, layers=layers, kv_heads=heads, key_dim=dim, value_dim=dim)
        for layers, heads, dim in shapes
    )
    geometry = KVGeometry(groups=groups, dtype="float32")
    slab, _ = make_slab(geometry, 8)
    cache, other = PagedCache(slab, geometry), PagedCache(slab, geometry)
    last = slab.full_view(0).shape[0] * geometry.block_tokens - 1
    index, wide, narrow = cache.write_index(0, np.array([last])), torch.zeros(1, 8, 64), torch.zeros(1, 1, 8)
    cache.write(0, index, narrow, narrow)
    with pytest.raises(UsageError, match="made for another group"):
        cache.write(1, index, wide, wide)
    with pytest.raises(UsageError, match="another cache"):
        other.write(0, index, narrow, narrow)


def test_a_mapping_that_changes_after_the_check_changes_no_place() -> None:
    scene, mapping = Scene([(100, 1)]), np.array([1])
    index = scene.cache.write_index(0, mapping)
    mapping[0] = 1 << 40
    keys = torch.full((1, 2, 16), 7.0)
    scene.cache.write(0, index, keys, keys)
    assert bool((scene.slab.keys_view(0)[0, 0, :, 1] == 7).all())


def test_kv_on_another_device_is_refused() -> None:
    scene, nowhere = Scene([(100, 1)]), torch.zeros(1, 2, 16, device="meta")
    with pytest.raises(UsageError, match="on meta"):
        scene.cache.write(0, np.array([1]), nowhere, nowhere)


@pytest.mark.parametrize("cold_share", [0.0, 0.5])
@pytest.mark.parametrize("what", ["keys", "values", "query"])
def test_nan_of_one_sequence_is_seen_there_and_nowhere_else(path: str, what: str, cold_share: float) -> None:
    """To the bit, though all share a thread's scratch memory, and one has more blocks than the rest together."""
    lengths = [(100, 1), (64, 5), (700, 1), (0, 40)]
    settings, backend = AttentionSettings(0.2, sinks=SINKS), get_backend("native")
    clean = Scene(lengths, cold_share=cold_share, key_dim=24).run(backend, 1, settings)
    row = 0
    for number, (_, tokens) in enumerate(lengths):
        scene, rows = Scene(lengths, cold_share=cold_share, key_dim=24), slice(row, row + tokens)
        row += tokens
        if what == "query":
            scene.query[rows] = float("nan")
        for entry in scene.sequences[number].part.tables[0].tolist() if what != "query" else []:
            if entry & 1:
                scene.slab.slot_bytes_view(1, entry >> 1).fill_(0xFF)
            else:
                view = scene.slab.keys_view(0) if what == "keys" else scene.slab.values_view(0)
                view[entry >> 1] = float("nan")
        found = scene.run(backend, 1, settings)
        assert bool(found[rows].isnan().all())
        found[rows] = clean[rows]
        assert torch.equal(found, clean)


def test_keys_that_are_all_nan_at_first_are_not_left_out(path: str) -> None:
    """A chunk that is nothing but NaN has no maximum; what comes behind it has, and must not hide it."""
    scene = Scene([(9000, 1)], kv_heads=1, heads=2)
    table = scene.sequences[0].part.tables[0]
    scene.slab.keys_view(0)[torch.from_numpy(table[:64] >> 1)] = float("nan")
    assert bool(scene.run(get_backend("native"), 1, PLAIN).isnan().all())
