"""SGLang's own cache controller drives the storage: its hit query, prefetch and backup, over real host pools.

And what each planted bug does to that: K and V swapped, pages shifted, ranks mixed up, a page saved in part. Each one
must be seen by `same_prompt_again`, the check that the rest relies on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation, StorageOperation

from allocator import ConfigError
from engine_adapter.sglang_storage import backend
from kvstore.disk_tier.tier import DiskTier
from kvstore.tier import Job, ResultCode
from tests.engine_adapter.sglang import kit
from tests.engine_adapter.sglang.kit import chain, fill, indices, mha_pool, pages_of, storage

PAGES = 6
TOKENS = list(range(PAGES * kit.PAGE))


def controller(made: Any, pool: Any, interface_v1: bool = True) -> HiCacheController:
    """SGLang's controller with the parts that storage work needs: no device, no process groups."""
    one = HiCacheController.__new__(HiCacheController)
    one.storage_backend, one.mem_pool_host, one.storage_host_pool, one.page_size = made, pool, pool, kit.PAGE
    one.prefetch_sync_queue = Queue()
    one.page_get_func = one._page_get_zero_copy if interface_v1 else one._generic_page_get
    one.page_set_func = one._page_set_zero_copy if interface_v1 else one._generic_page_set
    return one


def prefetch(one: HiCacheController, pool: Any) -> tuple[int, torch.Tensor]:
    """As SGLang's threads do: ask, allocate for the hit, read. Pages that count, and where they are."""
    operation = PrefetchOperation("request", TOKENS)
    operation.hash_value, hit_tokens = one._storage_hit_query(operation)
    operation.host_indices = pool.alloc(hit_tokens)
    return one._page_transfer(operation), operation.host_indices


def backup(one: HiCacheController, host_indices: torch.Tensor, keys: list[str]) -> int:
    operation = StorageOperation(host_indices, TOKENS, hash_value=keys, prefix_keys=[])
    one._page_backup(operation)
    return operation.completed_tokens // kit.PAGE


def same_prompt_again(
    tmp_path: Path, make: Callable[[], Any] = mha_pool, rank: int = 0, interface_v1: bool = True
) -> None:
    """Two ranks compute a prompt and store it; a new process of one of them finds its own bytes in whole pages."""
    extra = {"disk_path": str(tmp_path / "disk"), "disk_bytes": "64 MiB", "interface_v1": int(interface_v1)}
    for one in (1, 0):
        source = fill(make(), seed=one + 1)
        with storage(source, extra, tp_rank=one, tp_size=2) as made:
            stored = backup(controller(made, source, interface_v1), source.alloc(len(TOKENS)), chain(PAGES))
            assert stored == PAGES
    source, target = fill(make(), seed=rank + 1), fill(make(), seed=9)
    target.alloc(kit.PAGE)
    with storage(target, extra, tp_rank=rank, tp_size=2) as made:
        loaded, places = prefetch(controller(made, target, interface_v1), target)
    assert loaded == PAGES
    found = pages_of(target, [int(one) // kit.PAGE for one in places[:: kit.PAGE]])
    assert all(torch.equal(*pair) for pair in zip(found, pages_of(source, range(PAGES)), strict=True))
    assert not target.kv_buffer.isnan().all()


@pytest.mark.parametrize("interface_v1", [True, False])
@pytest.mark.parametrize("layout", kit.MHA_LAYOUTS)
def test_sglangs_controller_stores_and_finds_a_prompt(tmp_path: Path, layout: str, interface_v1: bool) -> None:
    """case: pages were written and never read back (sglang#12092)."""
    same_prompt_again(tmp_path, lambda: mha_pool(layout), rank=1, interface_v1=interface_v1)


def both_ranks(tmp_path: Path) -> None:
    for rank in (0, 1):
        same_prompt_again(tmp_path, rank=rank)


def swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V change places on the way back."""
    plain = backend.KVStoreHiCache._move_in

    def move_in(self: Any, keys: Any, name: str, rows: Any) -> list[bool]:
        turned = [
            [[row for two in zip(part[1::2], part[::2], strict=True) for row in two] for part in page] for page in rows
        ]
        return plain(self, keys, name, turned)

    monkeypatch.setattr(backend.KVStoreHiCache, "_move_in", move_in)


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page is read into the place of the next."""
    plain = backend.KVStoreHiCache.batch_get_v1
    monkeypatch.setattr(
        backend.KVStoreHiCache,
        "batch_get_v1",
        lambda self, keys, host_indices, extra=None: plain(self, keys, host_indices + kit.PAGE, extra),
    )


def mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank forgets which it is: all write and read the first one's heads, each in a directory of its own no more."""
    plain = backend.Rank.of
    monkeypatch.setattr(
        backend.Rank, "of", lambda config: plain(kit.config(config.extra_config, tp_rank=0, tp_size=config.tp_size))
    )


def in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last piece of each page is left out from the first probe on."""
    plain = backend.page_rows
    monkeypatch.setattr(backend, "page_rows", lambda *given: [part[:-1] for part in plain(*given)])


def saved_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written lacks the second half of the last page, and a whole page is read."""
    plain = backend.KVStoreHiCache._move_out

    def move_out(self: Any, keys: Any, name: str, make_rows: Any, before: Any) -> list[bool]:
        def halved() -> Any:
            rows = make_rows()
            rows[-1] = [part[: len(part) // 2] for part in rows[-1]]
            return rows

        return plain(self, keys, name, halved, before)

    monkeypatch.setattr(backend.KVStoreHiCache, "_move_out", move_out)


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk hands out what it has read, whatever the checksum says, and a bit of it has turned."""
    plain = DiskTier._get_one

    def get_one(self: DiskTier, job: Job, claim: Any) -> ResultCode:
        code = plain(self, job, claim)
        job.rows[0][0] ^= np.uint8(1)
        return code

    monkeypatch.setattr(DiskTier, "_get_one", get_one)


@pytest.mark.parametrize("plant", [swapped, shifted, mixed_up, in_part, saved_in_part, unchecked])
def test_planted_bugs_are_seen(tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        with pytest.raises((AssertionError, ConfigError)):
            both_ranks(tmp_path)
    both_ranks(tmp_path / "without")


def test_nothing_after_a_page_that_failed_counts_or_is_stored_again(tmp_path: Path) -> None:
    """A page goes bad between the hit query and the read: SGLang counts the pages before it, and what it computes then
    is what gets stored; the bytes of the failed load do not.
    """
    extra = {"disk_path": str(tmp_path), "disk_bytes": "64 MiB"}
    source, keys = fill(mha_pool(), 1), chain(PAGES)
    with storage(source, extra) as made:
        assert backup(controller(made, source), source.alloc(len(TOKENS)), keys) == PAGES
    target = fill(mha_pool(), 2)
    with storage(target, extra) as made:
        one = controller(made, target)
        operation = PrefetchOperation("request", TOKENS)
        operation.hash_value, hit_tokens = one._storage_hit_query(operation)
        assert hit_tokens == len(TOKENS)
        tier = made._shelf.below.tiers[0]
        form = made._keys("kv", made._shelf.until())[0]
        assert tier.delete([form.with_hash(bytes.fromhex(keys[2]))]) == 1
        operation.host_indices = target.alloc(hit_tokens)
        assert one._page_transfer(operation) == 2
        acks = [one.prefetch_sync_queue.get_nowait() for _ in range(one.prefetch_sync_queue.qsize())]
        assert acks[-1].completed_tokens == 2 * kit.PAGE
        computed = indices([9])
        assert made.batch_set_v1([keys[2]], computed) == [True]
        assert made.batch_get_v1([keys[2]], indices([10])) == [True]
        assert torch.equal(*pages_of(target, [9, 10]))


def test_a_disk_that_hangs_costs_a_deadline_and_touches_no_page_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """case: a hung storage made timeouts void (sglang#35012). Its read arrives after the page was given away."""
    go, plain = threading.Event(), DiskTier._get_one

    def hang(self: DiskTier, job: Job, claim: Any) -> ResultCode:
        go.wait(60)
        return plain(self, job, claim)

    extra = {"disk_path": str(tmp_path), "disk_bytes": "64 MiB", "fetch_deadline_seconds": 0.2}
    pool = fill(mha_pool(), 1)
    with storage(pool, extra, enable_storage_metrics=True) as made:
        assert all(made.batch_set_v1(chain(3), indices([0, 1, 2])))
        monkeypatch.setattr(DiskTier, "_get_one", hang)
        before = pages_of(pool, range(kit.PAGES))
        try:
            assert made.batch_get_v1(chain(3), indices([3, 4, 5])) == [False] * 3
            assert made.batch_exists(chain(3)) == 0  # nothing new is begun behind it
            assert made.batch_set_v1(chain(4)[3:], indices([0])) == [False]
            assert made.get_stats() is not None
        finally:
            go.set()
        made._shelf.below.tiers[0]._executor.close()  # the read ends, long after SGLang has used the pages for others
        assert all(torch.equal(*pair) for pair in zip(pages_of(pool, range(kit.PAGES)), before, strict=True))
