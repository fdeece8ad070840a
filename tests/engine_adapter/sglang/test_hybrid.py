"""Models with more than one pool: SGLang's v2 methods, with its real state pool beside its real KV pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from tests.engine_adapter.sglang import kit
from tests.engine_adapter.sglang.kit import chain, fill, indices, mha_pool, mla_pool, pages_of, storage
from tests.servers import shared_server


def state_pool(seed: int) -> MambaPoolHost:
    """State of a linear-attention layer: one slot a checkpoint, of float32 and bfloat16 tensors."""
    info = MambaStateBufferInfo(temporal=torch.zeros(2, 8, 3, 5), conv=(torch.zeros(2, 8, 7, dtype=torch.bfloat16),))
    with host_memory_budget_scope(1 << 30):
        pool = MambaPoolHost(info, 2.0, 0, device_capacity=8, pin_memory=False, layout="page_first")
    generator = torch.Generator().manual_seed(seed)
    for tensor in (pool.temporal_buffer, *pool.conv_buffer):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return pool


def trailing(keys: list[str], slots: list[int]) -> PoolTransfer:
    return PoolTransfer(
        PoolName.MAMBA,
        host_indices=torch.tensor(slots),
        keys=keys,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


@pytest.fixture
def shared(tmp_path: Path) -> dict[str, Any]:
    return {"redis_url": f"{shared_server().url}?namespace={tmp_path.name}"}


def test_a_state_restores_only_where_one_was_kept(shared: dict[str, Any]) -> None:
    keys, kv, state = chain(6), fill(mha_pool("page_first")), state_pool(1)
    with storage(kv, shared, pools={PoolName.KV: kv, PoolName.MAMBA: state}) as writer:
        assert all(writer.batch_set_v1(keys, indices(range(6))))
        assert writer.batch_set_v2([trailing([keys[1], keys[3]], [2, 5])]) == {PoolName.MAMBA: [True, True]}
    other, states = mha_pool("page_first"), state_pool(2)
    with storage(other, shared, pools={PoolName.KV: other, PoolName.MAMBA: states}) as reader:
        found = reader.batch_exists_v2(keys, [trailing([keys[-1]], [0])])
        assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [2, 4])
        assert found.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.MAMBA: 4}
        assert reader.batch_get_v2([trailing([keys[3]], [7])]) == {PoolName.MAMBA: [True]}
        assert torch.equal(states.get_data_page(7), state.get_data_page(5))
        assert reader.batch_get_v2([trailing([keys[4]], [6])]) == {PoolName.MAMBA: [False]}
        kept = PoolTransfer(PoolName.KV, host_indices=indices([9, 8]), keys=keys[:2])
        assert reader.batch_get_v2([kept]) == {PoolName.KV: [True, True]}
        assert torch.equal(pages_of(other, [9])[0], pages_of(kv, [0])[0])


def test_the_same_as_sglangs_own_file_storage_says(tmp_path: Path, shared: dict[str, Any]) -> None:
    """batch_exists_v2 over pools with holes, both policies: what HiCacheFile answers."""
    keys, kv, state = chain(7), fill(mha_pool("page_first")), state_pool(1)
    file = HiCacheFile(kit.config({}), str(tmp_path / "file"))
    pools = {PoolName.KV: kv, PoolName.MAMBA: state}
    for name, pool in pools.items():
        file.register_mem_host_pool_v2(pool, name)
    with storage(kv, shared, pools=pools) as ours:
        for places in ((0, 1, 2, 3, 5), (4,)):
            kept = [PoolTransfer(PoolName.KV, host_indices=indices(places), keys=[keys[one] for one in places])]
            state_keys = [keys[one] for one in places if one in (1, 2, 4, 5)]
            kept.append(trailing(state_keys, [keys.index(one) for one in state_keys]))
            for made in (file, ours):
                assert all(all(flags) for flags in made.batch_set_v2(kept).values())
            for policy in (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES):
                for window in (1, 2):
                    asked = trailing(keys[-window:], [0] * window)
                    asked.hit_policy = policy
                    answers = [made.batch_exists_v2(keys, [asked]) for made in (file, ours)]
                    assert answers[0].kv_hit_pages == answers[1].kv_hit_pages
                    assert answers[0].restorable_prefix_pages == answers[1].restorable_prefix_pages
                    expected = {str(name): count for name, count in answers[0].extra_pool_hit_pages.items()}
                    assert expected == {str(name): count for name, count in answers[1].extra_pool_hit_pages.items()}


def test_state_that_ranks_share_out_is_each_ranks_own_beside_shared_latents(shared: dict[str, Any]) -> None:
    """An MLA model with linear-attention layers: latents once, state per rank."""
    key, mla = chain(1), {"is_mla_model": True, "tp_size": 2}
    states = [state_pool(1), state_pool(2)]
    for rank in (0, 1):
        pools = {PoolName.MAMBA: states[rank]}
        with storage(fill(mla_pool("page_first")), shared, tp_rank=rank, pools=pools, **mla) as made:
            assert made.batch_set_v2([trailing(key, [3])]) == {PoolName.MAMBA: [True]}
    for rank in (0, 1):
        target = state_pool(9)
        pools = {PoolName.MAMBA: target}
        with storage(mla_pool("page_first"), shared, tp_rank=rank, pools=pools, **mla) as made:
            assert made.batch_get_v2([trailing(key, [1])]) == {PoolName.MAMBA: [True]}
            assert torch.equal(target.get_data_page(1), states[rank].get_data_page(3))


def test_a_draft_models_pool_is_not_the_models(shared: dict[str, Any]) -> None:
    kv, draft = fill(mha_pool(), 1), fill(mha_pool(), 2)
    with storage(kv, shared, pools={PoolName.DRAFT: draft}) as made:
        assert all(made.batch_set_v1(chain(2), indices([0, 1])))
        kept = PoolTransfer(PoolName.DRAFT, host_indices=indices([0, 1]), keys=chain(2))
        assert made.batch_get_v2([kept]) == {PoolName.DRAFT: [False, False]}
        assert made.batch_exists_v2(chain(2), [kept]).kv_hit_pages == 0
        assert made.batch_set_v2([kept]) == {PoolName.DRAFT: [True, True]}
        assert made.batch_exists_v2(chain(2), [kept]).kv_hit_pages == 2
        kept.host_indices = indices([2, 3])
        assert made.batch_get_v2([kept]) == {PoolName.DRAFT: [True, True]}
        assert torch.equal(pages_of(draft, [3])[0], pages_of(draft, [1])[0])


def test_a_pool_whose_indices_do_not_fit_moves_nothing(shared: dict[str, Any]) -> None:
    kv = fill(mha_pool())
    with storage(kv, shared, pools={PoolName.KV: kv}) as made:
        for given in (None, indices([0]), indices([0, 1, 2])):
            kept = PoolTransfer(PoolName.KV, host_indices=given, keys=chain(2))
            assert made.batch_set_v2([kept]) == {PoolName.KV: [False, False]}
            assert made.batch_get_v2([kept]) == {PoolName.KV: [False, False]}
        assert made.batch_exists(chain(2)) == 0
