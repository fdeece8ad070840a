"""Pages of SGLang's real host pools through our tiers: every layout, every tier, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo

from allocator import ConfigError
from kvstore.daemon import Daemon
from tests.engine_adapter.sglang import kit
from tests.engine_adapter.sglang.kit import chain, fill, indices, mha_pool, mla_pool, pages_of, storage
from tests.kvstore.daemon import kit as daemon_kit
from tests.servers import shared_server

FROM, TO = [3, 1, 7, 5], [2, 8, 0, 6]


@pytest.fixture(params=["disk", "redis", "daemon"])
def tiers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "disk":
        yield {"disk_path": str(tmp_path / "disk"), "disk_bytes": "64 MiB"}
    elif request.param == "redis":
        yield {"redis_url": f"{shared_server().url}?namespace={tmp_path.name}"}
    else:
        daemon = Daemon(daemon_kit.settings(tmp_path))
        daemon.start()
        yield {"daemon": str(tmp_path / "d.sock")}
        daemon.stop()


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"disk_path": str(tmp_path / "disk"), "disk_bytes": "64 MiB"}


def test_pages_come_back_in_another_engine_at_other_places(tiers: dict[str, Any]) -> None:
    """Written by one process's pool, read into another's: the bytes are those, and no others are touched."""
    keys, source, target = chain(4), fill(mha_pool(), 1), fill(mha_pool(), 2)
    before = pages_of(target, range(kit.PAGES))
    with storage(source, tiers) as writer:
        assert writer.batch_exists(keys) == 0
        assert writer.batch_set_v1(keys, indices(FROM)) == [True] * 4
        assert writer.batch_exists(keys) == 4
    with storage(target, tiers) as reader:
        assert reader.batch_exists([*keys, *chain(2, 999)]) == 4
        assert reader.batch_get_v1(keys, indices(TO)) == [True] * 4
    for place, page in zip(TO, pages_of(source, FROM), strict=True):
        before[place] = page
    for found, wanted in zip(pages_of(target, range(kit.PAGES)), before, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("make", "layout"), [(mha_pool, one) for one in kit.MHA_LAYOUTS] + [(mla_pool, one) for one in kit.MLA_LAYOUTS]
)
@pytest.mark.parametrize("interface_v1", [1, 0])
def test_case_128_every_layout_in_place_and_as_copies(
    disk: dict[str, Any], make: Any, layout: str, interface_v1: int
) -> None:
    extra = {**disk, "interface_v1": interface_v1}
    keys, source, target = chain(4), fill(make(layout), 1), fill(make(layout), 2)
    is_mla = make is mla_pool
    with storage(source, extra, is_mla_model=is_mla) as writer:
        if interface_v1:
            assert all(writer.batch_set_v1(keys, indices(FROM)))
        else:
            assert writer.batch_set(keys, [source.get_data_page(page * kit.PAGE) for page in FROM])
    with storage(target, extra, is_mla_model=is_mla) as reader:
        assert reader.batch_exists(keys) == 4
        if interface_v1:
            assert all(reader.batch_get_v1(keys, indices(TO)))
        else:
            found = reader.batch_get(keys, [target.get_dummy_flat_data_page() for _ in keys])
            for page, one in zip(TO, found, strict=True):
                target.set_from_flat_data_page(page * kit.PAGE, one)
    for found, wanted in zip(pages_of(target, TO), pages_of(source, FROM), strict=True):
        assert torch.equal(found, wanted)


def test_layouts_and_ways_do_not_take_each_others_bytes(disk: dict[str, Any]) -> None:
    """Pages of equal size whose bytes are ordered otherwise: each is a miss to the other."""
    keys = chain(2)
    ways = [(layout, one) for layout in kit.MHA_LAYOUTS for one in (1, 0)]
    for layout, interface_v1 in ways:
        with storage(fill(mha_pool(layout)), {**disk, "interface_v1": interface_v1}) as made:
            assert made.batch_exists(keys) == 0, (layout, interface_v1)
            if interface_v1:
                made.batch_set_v1(keys, indices([0, 1]))
            else:
                made.batch_set(keys, [made.mem_pool_host.get_data_page(page * kit.PAGE) for page in (0, 1)])
            assert made.batch_exists(keys) == 2


def test_bytes_that_changed_on_disk_are_a_miss_page_by_page(tmp_path: Path, disk: dict[str, Any]) -> None:
    """case: corrupted copies reached attention (sglang#27504). Here they are no hit, and then gone."""
    keys = chain(4)
    source = fill(mha_pool(dim=512, heads=8), 1)
    with storage(source, disk) as writer:
        assert all(writer.batch_set_v1(keys, indices(FROM)))
    target = fill(mha_pool(dim=512, heads=8), 2)
    before = pages_of(target, range(kit.PAGES))
    with storage(target, disk) as reader:
        kit.flip_bytes(tmp_path / "disk")
        assert reader.batch_exists(keys) == 4
        assert reader.batch_get_v1(keys, indices(TO)) == [False] * 4
        assert reader.batch_exists(keys) == 0
        assert all(torch.equal(*pair) for pair in zip(pages_of(target, range(kit.PAGES)), before, strict=True))
        assert reader.batch_set_v1(keys, indices(TO)) == [True] * 4
        assert reader.batch_exists(keys) == 4


def test_one_page_that_is_gone_leaves_the_others(disk: dict[str, Any]) -> None:
    keys, source = chain(5), fill(mha_pool(), 1)
    with storage(source, disk) as made:
        kept = [key for place, key in enumerate(keys) if place != 2]
        assert made.batch_set_v1(kept, indices([0, 1, 3, 4])) == [True] * 4
        assert made.batch_exists(keys) == 2
        target = indices([5, 6, 7, 8, 9])
        assert made.batch_get_v1(keys, target) == [True, True, False, True, True]
        assert torch.equal(pages_of(source, [9])[0], pages_of(source, [4])[0])


def test_indices_that_do_not_fit_the_keys_move_nothing(disk: dict[str, Any]) -> None:
    """A page that is not whole is never stored."""
    with storage(fill(mha_pool()), disk) as made:
        assert made.batch_set_v1(chain(2), indices([0, 1])[:-1]) == [False, False]
        assert made.batch_set_v1(chain(2), indices([0])) == [False, False]
        assert made.batch_exists(chain(2)) == 0
        assert made.batch_get_v1(chain(2), indices([0])) == [False, False]


def test_a_full_tier_says_which_pages_it_did_not_take(tmp_path: Path) -> None:
    pool = fill(mha_pool(dim=512, heads=8, layers=4), 1)
    extra = {"redis_url": f"{shared_server().url}?namespace={tmp_path.name}", "redis_bytes": 300 << 10}
    with storage(pool, extra) as made:
        flags = made.batch_set_v1(chain(4), indices(FROM))
        assert made.batch_exists(chain(4)) < 4 or not all(flags)
        got = made.batch_get_v1(chain(4), indices(TO))
        for place, page, flag in zip(TO, FROM, got, strict=True):
            assert not flag or torch.equal(pages_of(pool, [place])[0], pages_of(pool, [page])[0])


def test_clear_empties_what_all_share(tmp_path: Path) -> None:
    extra = {"redis_url": f"{shared_server().url}?namespace={tmp_path.name}"}
    with storage(fill(mha_pool()), extra) as one, storage(fill(mha_pool()), extra) as other:
        one.batch_set_v1(chain(3), indices([0, 1, 2]))
        assert other.batch_exists(chain(3)) == 3
        one.clear()
        assert one.batch_exists(chain(3)) == 0
        assert other.batch_exists(chain(3)) == 0
        assert all(other.batch_set_v1(chain(3), indices([0, 1, 2])))
        daemon_kit.until(lambda: one.batch_exists(chain(3)) == 3, 60)  # it has just been told that they are gone


def test_a_pages_parent_is_known_across_calls_where_sglang_says_it(disk: dict[str, Any]) -> None:
    """So that eviction takes the ends of prompts first."""
    keys = chain(4)
    with storage(fill(mha_pool()), disk) as made:
        (tier,) = made._shelf.below.tiers
        assert all(made.batch_set_v1(keys[2:], indices([2, 3]), HiCacheStorageExtraInfo(prefix_keys=keys[:2])))
        assert tier.orphan_count == 1
        assert all(made.batch_set_v1(keys[:2], indices([0, 1]), HiCacheStorageExtraInfo(prefix_keys=[])))
        assert tier.orphan_count == 0


def test_metrics_are_sglangs_own_and_each_is_told_once(disk: dict[str, Any]) -> None:
    with storage(fill(mha_pool()), disk, enable_storage_metrics=True) as made:
        made.batch_set_v1(chain(3), indices([0, 1, 2]))
        made.batch_get_v1(chain(4), indices([3, 4, 5, 6]))
        found = made.get_stats()
        assert (found.backup_pgs, found.prefetch_pgs) == ([3], [3])
        assert found.backup_bandwidth[0] > 0
        assert made.get_stats().prefetch_pgs == []
        counts = made.counters()
        assert (counts["saved_pages_disk"], counts["loaded_pages_disk"], counts["pages_not_loaded"]) == (3, 3, 1)
    with storage(fill(mha_pool()), disk) as silent:
        assert silent.get_stats() is None


def test_a_pool_that_cannot_be_copied_in_place_is_refused_at_start(disk: dict[str, Any]) -> None:
    pool = mha_pool()
    pool.layout = "page_unified"
    with (
        pytest.raises(ConfigError, match=r"hicache-mem-layout page_unified; expected one of layer_first"),
        storage(pool, disk),
    ):
        pass
    short = mha_pool()
    short.size_per_token -= 2
    with pytest.raises(ConfigError, match="a page's pieces are 512 bytes; expected 504"), storage(short, disk):
        pass


def test_the_daemon_says_what_engines_have_found(tmp_path: Path) -> None:
    """A lookup counts; what is asked to load and to store does not. Pages before those asked for are SGLang's own."""
    daemon = Daemon(daemon_kit.settings(tmp_path))
    daemon.start()
    extra = {"daemon": str(tmp_path / "d.sock"), "prefill_tokens_per_second": 1000.0}
    keys = chain(6)
    with storage(fill(mha_pool(), 1), extra) as made:
        assert made.batch_exists(keys[:4]) == 0
        assert made.batch_set_v1(keys[:4], indices(FROM)) == [True] * 4
        assert made.batch_exists(keys[2:], HiCacheStorageExtraInfo(prefix_keys=keys[:2])) == 2
        assert made.batch_get_v1(keys[:4], indices(TO)) == [True] * 4
        daemon_kit.until(lambda: daemon.stats()["lookups"]["reused_tokens"] == 4 * kit.PAGE)  # what was read
        found = daemon.stats()["lookups"]
        assert found["lookups"] == 2
        assert (found["hit_blocks"], found["missed_blocks"]) == ({"host": 2}, {"never_stored": 6})
        assert found["saved_prefill_seconds"] == pytest.approx(4 * kit.PAGE / 1000)
        (top,) = daemon.stats()["prefixes"]
        assert (top["hit_blocks"], top["longest_tokens"]) == (2, 4 * kit.PAGE), "by the prompt's own first page"
        assert top["block"] == keys[0][:12]
    with storage(fill(mha_pool(), 1), extra, tp_rank=1, tp_size=2) as other:
        assert other.batch_exists(keys) == 0
    assert daemon.stats()["lookups"]["lookups"] == 2, "the first rank tells for all"
    daemon.stop()
