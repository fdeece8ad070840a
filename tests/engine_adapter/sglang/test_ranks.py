"""Whose pages they are: ranks, stages, latents, dtypes, weights. Another's page is a miss, or exactly one's slice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allocator import ConfigError
from engine_adapter.sglang_storage import backend
from tests.engine_adapter.sglang import kit
from tests.engine_adapter.sglang.kit import chain, fill, indices, mha_pool, mla_pool, pages_of, storage
from tests.servers import shared_server

FROM, TO, KEYS = [3, 1, 7], [2, 8, 0], 3


@pytest.fixture
def shared(tmp_path: Path) -> dict[str, Any]:
    return {"redis_url": f"{shared_server().url}?namespace={tmp_path.name}"}


def write(pool: Any, extra: dict[str, Any], **given: Any) -> None:
    with storage(pool, extra, **given) as made:
        assert made.batch_set_v1(chain(KEYS), indices(FROM, pool.page_size)) == [True] * KEYS


def read(pool: Any, extra: dict[str, Any], **given: Any) -> int:
    """How many leading pages came; after that they are in TO."""
    with storage(pool, extra, **given) as made:
        found = made.batch_exists(chain(KEYS))
        assert made.batch_get_v1(chain(KEYS)[:found], indices(TO[:found], pool.page_size)) == [True] * found
        return int(found)


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(*pair) for pair in zip(pages_of(one, FROM), pages_of(other, TO), strict=True))


def test_case_038_each_tensor_parallel_rank_gets_its_own_heads_or_nothing(shared: dict[str, Any]) -> None:
    pools = [fill(mha_pool(heads=4), seed) for seed in (1, 2)]
    for rank, pool in enumerate(pools):
        write(pool, shared, tp_rank=rank, tp_size=2)
    for rank, pool in enumerate(pools):
        target = fill(mha_pool(heads=4), 9)
        assert read(target, shared, tp_rank=rank, tp_size=2) == KEYS
        assert same(pool, target)
    for heads, size in ((2, 4), (8, 1)):
        for rank in range(size):
            assert read(mha_pool(heads=heads), shared, tp_rank=rank, tp_size=size) == 0


def test_case_038_ranks_of_another_size_find_their_slice_where_pages_are_stored_by_heads(
    shared: dict[str, Any],
) -> None:
    """SGLang's own way: --hicache-mem-layout page_head and tp_lcm_size. Written by 2 ranks, read by 4 and by 1."""
    split = {"tp_lcm_size": 4, "should_split_heads": True}
    whole = torch.randint(0, 99, (2, kit.PAGES + 1, 8, kit.PAGE, kit.LAYERS, 8)).to(torch.bfloat16)

    def part(rank: int, size: int) -> Any:
        pool = mha_pool("page_head", heads=8 // size)
        pool.kv_buffer.copy_(whole[:, :, rank * 8 // size : (rank + 1) * 8 // size])
        return pool

    for rank in range(2):
        write(part(rank, 2), shared, tp_rank=rank, tp_size=2, **split)
    for size in (1, 2, 4):
        for rank in range(size):
            target = fill(mha_pool("page_head", heads=8 // size), 9)
            given = split if size < 4 else {"tp_lcm_size": 4}
            assert read(target, shared, tp_rank=rank, tp_size=size, **given) == KEYS
            assert same(part(rank, size), target), (rank, size)


def test_heads_that_ranks_hold_twice_are_not_taken_for_the_next_one(shared: dict[str, Any]) -> None:
    """2 KV heads over 4 ranks: each rank has one, rank 1 the first again. Over 2 ranks, rank 1 has the second."""
    for rank, seed in enumerate((1, 1, 2, 2)):
        write(fill(mha_pool(heads=1), seed), shared, tp_rank=rank, tp_size=4)
    assert [read(mha_pool(heads=1), shared, tp_rank=rank, tp_size=2) for rank in (0, 1)] == [0, 0]


def test_pipeline_stages_have_their_own_pages(shared: dict[str, Any]) -> None:
    """case: stages shared one key and overwrote each other (sglang PR#15175)."""
    stages = [fill(mha_pool(first_layer=2 * stage), stage + 1) for stage in (0, 1)]
    for stage, pool in enumerate(stages):
        write(pool, shared, pp_rank=stage, pp_size=2)
    for stage, pool in enumerate(stages):
        target = mha_pool(first_layer=2 * stage)
        assert read(target, shared, pp_rank=stage, pp_size=2) == KEYS
        assert same(pool, target)


def test_latents_are_written_by_rank_0_and_read_by_all(shared: dict[str, Any]) -> None:
    mla = {"is_mla_model": True, "tp_size": 4}
    source = fill(mla_pool(), 1)
    for rank in (1, 2, 3):
        write(fill(mla_pool(), 5 + rank), shared, tp_rank=rank, **mla)  # says True, and stores nothing
    assert read(mla_pool(), shared, tp_rank=0, **mla) == 0
    write(source, shared, tp_rank=0, **mla)
    for rank in range(4):
        target = mla_pool()
        assert read(target, shared, tp_rank=rank, **mla) == KEYS
        assert same(source, target)
    target = mla_pool()
    assert read(target, shared, tp_rank=0, tp_size=1, is_mla_model=True) == KEYS
    assert same(source, target)


def test_latents_of_several_ranks_need_a_tier_that_they_share(tmp_path: Path) -> None:
    extra = {"disk_path": str(tmp_path)}
    with (
        pytest.raises(ConfigError, match="MLA model over 2 ranks; expected daemon or redis_url"),
        storage(mla_pool(), extra, is_mla_model=True, tp_size=2),
    ):
        pass


def test_ranks_of_one_host_have_a_directory_each(tmp_path: Path) -> None:
    extra = {"disk_path": str(tmp_path), "disk_bytes": "16 MiB"}
    pools = [fill(mha_pool(), seed) for seed in (1, 2)]
    with storage(pools[0], extra, tp_size=2) as one, storage(pools[1], extra, tp_rank=1, tp_size=2) as other:
        for made in (one, other):
            assert all(made.batch_set_v1(chain(KEYS), indices(FROM)))
            assert all(made.batch_get_v1(chain(KEYS), indices(TO)))
    assert all(same(pool, pool) for pool in pools)
    assert not same(*pools)


Change = tuple[Callable[[], Any], dict[str, Any], dict[str, Any]]
CHANGES: dict[str, Change] = {
    "weights": (mha_pool, {"weights": "sha256:2"}, {}),
    "model": (mha_pool, {}, {"model_name": "other"}),
    "tenant": (mha_pool, {"tenant": "b"}, {}),
    "empty tenant": (mha_pool, {"tenant": ""}, {}),
    "case_012 dtype": (lambda: mha_pool(dtype=torch.float16), {}, {}),
    "heads and dims": (lambda: mha_pool(heads=4, dim=4), {}, {}),
    "page size": (lambda: mha_pool(page=8), {}, {}),
    "layers": (lambda: mha_pool(layers=4, dim=4), {}, {}),
    "first layer": (lambda: mha_pool(first_layer=1), {}, {}),
    "context parallel": (mha_pool, {}, {"attn_cp_size": 2}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_shapes_the_bytes_is_part_of_a_pages_name(shared: dict[str, Any], name: str) -> None:
    """case: keys without dtype, weights or layout (sglang#33268, #24758): silent reuse of other bytes."""
    make, extra, given = CHANGES[name]
    write(fill(mha_pool()), shared)
    assert read(make(), {**shared, **extra}, **given) == 0
    assert read(mha_pool(), shared) == KEYS


def test_two_fp8_forms_in_uint8_are_told_apart_or_refused(shared: dict[str, Any]) -> None:
    def pool() -> Any:
        return mha_pool(dtype=torch.uint8)

    with pytest.raises(ConfigError, match="the cache holds uint8 and SGLang says 'nothing'; expected --kv-cache-dtype"):
        read(pool(), shared)
    write(fill(pool()), {**shared, "kv_cache_dtype": "fp8_e4m3"})
    assert read(pool(), {**shared, "kv_cache_dtype": "fp8_e5m2"}) == 0
    assert read(pool(), {**shared, "kv_cache_dtype": "fp8_e4m3"}) == KEYS


def test_weights_set_in_place_leave_the_old_pages_behind(
    shared: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """case: pages of before an online weight update were loaded after it (sglang#26792)."""
    with storage(fill(mha_pool()), shared) as made:
        assert all(made.batch_set_v1(chain(KEYS), indices(FROM)))
        assert made.batch_exists(chain(KEYS)) == KEYS
        monkeypatch.setattr(backend, "_weight_version", lambda: "step-1")
        assert made.batch_exists(chain(KEYS)) == 0
        assert made.batch_get_v1(chain(KEYS), indices(TO)) == [False] * KEYS
