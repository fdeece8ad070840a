"""The SGLang storage's own logic without SGLang: settings, names, hits, pieces of pages, tiers that hang or lie."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from allocator import ConfigError, TierError
from engine_adapter.sglang_storage import shelf as shelf_module
from engine_adapter.sglang_storage.forms import Names, PoolForm, Rank, check_pool, frame_geometry, page_hash
from engine_adapter.sglang_storage.hits import PoolPages, leading_run, restorable
from engine_adapter.sglang_storage.pages import Page, cut, gather, page_rows, rows_at, scatter
from engine_adapter.sglang_storage.settings import make_tiers, model_weights, read_settings
from engine_adapter.sglang_storage.shelf import Shelf
from kvstore import HostTier
from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import ThreadExecutor
from kvstore.testing.faulty_tier import Faults, FaultyTier
from kvstore.testing.transfer_contract import key_of
from kvstore.tier import CopyKey, Job, ResultCode, Tier

SIZE = 4096


def pool(**given: Any) -> Any:
    """What the storage asks of a host pool of K and V."""
    known = {"layout": "layer_first", "page_size": 4, "dtype": "torch.bfloat16", "start_layer": 0, "end_layer": 2}
    return SimpleNamespace(**{**known, "layer_num": 2, "head_num": 2, "head_dim": 8, "v_head_dim": 8, **given})


# settings ------------------------------------------------------------------------------------------------------------


def test_settings_and_what_the_environment_says() -> None:
    given = {"module_path": "m", "class_name": "c", "backend_name": "b", "interface_v1": 1, "tp_lcm_size": 4}
    read = read_settings(
        {**given, "disk_path": "/d", "disk_bytes": "1 GiB", "tenant": "t"}, {"KVSTORE_DISK_PATH": "/e"}
    )
    assert (read.store.disk_path, read.store.disk_bytes, read.tenant, read.flat) == ("/e", 1 << 30, "t", False)
    assert read_settings({"redis_url": "redis://h"}, {}).flat
    assert read_settings({"daemon": "/run/d.sock"}, {}).store.daemon_socket == "/run/d.sock"
    assert read_settings({"daemon": "default"}, {}).store.daemon_socket.endswith(".sock")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "no tier is named; expected daemon, disk_path or redis_url"),
        (None, "no tier is named"),
        ({"disk_path": "/d", "disc_bytes": 1}, "unknown key 'disc_bytes'; expected one of daemon, model"),
        ({"disk_path": "/d", "host_bytes": 1}, "host memory is SGLang's own"),
        ({"disk_path": "/d", "codec": "int4"}, "codec: expected raw: pages are stored byte for byte"),
        ({"disk_path": "/d", "weights": 7}, "weights is 7; expected text"),
        ({"disk_path": "/d", "staging_bytes": 0}, "staging_bytes is 0; expected an int >= 1"),
        ({"disk_path": "/d", "staging_bytes": True}, "staging_bytes is True"),
        ({"disk_path": "/d", "disk_bytes": "many"}, "disk_bytes"),
        ({"disk_path": "/d", "daemon": "default"}, "got daemon beside disk_path or redis_url"),
        ({"daemon": "redis://h"}, "daemon_socket: got 'redis://h'"),
    ],
)
def test_wrong_settings_say_what_to_change(given: dict[str, Any] | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings(given, {})


def test_weights_are_known_or_nothing_starts(tmp_path: Path) -> None:
    told = read_settings({"disk_path": "/d", "weights": "w"}, {})
    silent = read_settings({"disk_path": "/d"}, {})
    assert model_weights(told, "anything", None) == "w"
    assert model_weights(silent, "org/name", "abc") == "org/name@abc"
    with pytest.raises(ConfigError, match="a served name stays when they change"):
        model_weights(silent, "org/name", None)
    with pytest.raises(ConfigError, match="set weights to a digest"):
        model_weights(silent, str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"w")
    first = model_weights(silent, str(tmp_path), None)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert model_weights(silent, str(tmp_path), None) != first


def test_a_disk_directory_for_each_rank_and_none_for_shared_latents(tmp_path: Path) -> None:
    read = read_settings({"disk_path": str(tmp_path), "disk_bytes": "4 MiB"}, {})
    ranks = [Rank(tp_rank=one, tp_size=2) for one in (0, 1)]
    made = [make_tiers(read, frame_geometry(pool(), rank, ""), rank)[0] for rank in ranks]
    assert [one.directory for one in made if isinstance(one, DiskTier)] == [
        tmp_path / "dp0-pp0-cp0-tp0",
        tmp_path / "dp0-pp0-cp0-tp1",
    ]
    for one in made:
        one.close()
    latents = Rank(tp_size=2, is_replicated=True)
    with pytest.raises(ConfigError, match="a directory has one owner"):
        make_tiers(read, frame_geometry(pool(head_num=None, kv_cache_dim=24), latents, ""), latents)


# names ---------------------------------------------------------------------------------------------------------------


def form(rank: Rank | None = None, pieces: Sequence[int] = (128,), kv_dtype: str = "", **given: Any) -> PoolForm:
    return PoolForm.of(pool(**given), given.get("name", "kv"), rank or Rank(), pieces, kv_dtype)


def test_head_ranges_are_the_models() -> None:
    assert form(Rank(tp_rank=1, tp_size=2)).heads == ((2, 4),)
    assert form(Rank(tp_rank=1, tp_size=2, split=2)).heads == ((2, 3), (3, 4))
    assert form(Rank(tp_rank=3, tp_size=4), head_num=1).heads == ((3, 4),)
    assert form(Rank(tp_rank=3, tp_size=4, is_replicated=True), head_num=None).heads == ((0, 1),)
    assert form(Rank(tp_rank=3, tp_size=4, is_replicated=True), head_num=None, name="mamba").heads == ((3, 4),)
    assert not form(Rank(tp_rank=1, tp_size=2, is_replicated=True), name="draft").is_shared
    with pytest.raises(ConfigError, match="got 3 parts for 2 heads a rank"):
        form(Rank(split=3))


def test_every_difference_of_bytes_gives_another_root_and_ranks_share_one() -> None:
    forms = [
        form(),
        form(layout="page_first"),
        form(page_size=8),
        form(dtype="torch.float16"),
        form(dtype="torch.uint8", kv_dtype="fp8_e4m3"),
        form(dtype="torch.uint8", kv_dtype="fp8_e5m2"),
        form(layer_num=3),
        form(start_layer=1),
        form(end_layer=3),
        form(head_num=4),
        form(head_dim=16),
        form(pieces=(64, 64)),
        form(name="draft"),
        form(Rank(cp_rank=1, cp_size=2)),
    ]
    names = Names("m", "w", None)
    roots = [names.of(one, 0, "")[0].root for one in forms]
    others = [Names("n", "w", None), Names("m", "v", None), Names("m", "w", ""), Names("m", "w", None, (("a", "b"),))]
    roots += [one.of(forms[0], 0, "")[0].root for one in others]
    roots += [names.of(forms[0], 1, "")[0].root, names.of(forms[0], 0, "step-1")[0].root]
    assert len(set(roots)) == len(roots)
    shared = [names.of(form(Rank(tp_rank=one, tp_size=2)), 0, "")[0] for one in (0, 1)]
    assert shared[0].root == shared[1].root
    assert shared[0].heads != shared[1].heads
    resharded = [names.of(form(Rank(tp_size=size), head_num=4 // size), 0, "")[0] for size in (1, 2)]
    assert resharded[0].root == resharded[1].root
    assert resharded[0].heads == (0, 4) != resharded[1].heads


def test_page_names() -> None:
    name = "ab" * 32
    assert page_hash(name) == bytes.fromhex(name)
    strange = {page_hash(one) for one in ("", "ab", "zz" * 32, name + "0", name.upper() + ".mamba")}
    assert len(strange) == 5
    assert {len(one) for one in strange} == {32}


def test_pools_that_have_no_bytes_or_an_unknown_order_are_refused() -> None:
    check_pool(pool(), "kv")
    for given, message in (
        ({"kv_buffer": None}, "no KV of its own"),
        ({"layout": "page_unified"}, "expected one of layer_first, page_first"),
        ({"dcp_size": 2}, "decode context parallel size 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_pool(pool(**given), "kv")
    config = SimpleNamespace(dcp_size=2, tp_lcm_size=None, should_split_heads=False)
    with pytest.raises(ConfigError, match="decode context parallel"):
        Rank.of(config)


# hits ----------------------------------------------------------------------------------------------------------------


def test_what_can_be_restored() -> None:
    yes, no = True, False
    assert [leading_run(one) for one in ([], [no, yes], [yes, no, yes], [yes])] == [0, 0, 1, 1]
    kv = [yes, yes, yes, yes, no]
    assert restorable(kv, []) == ({"kv": 4}, [1, 2, 3, 4])
    state = PoolPages("mamba", [no, yes, no, yes, yes], 1)
    assert restorable(kv, [state]) == ({"kv": 4, "mamba": 4}, [2, 4])
    window = PoolPages("swa", [no, yes, yes, no, yes], 2)
    assert restorable(kv, [window]) == ({"kv": 4, "swa": 3}, [3])
    assert restorable(kv, [window, state]) == ({"kv": 4, "swa": 3, "mamba": 4}, [])
    assert restorable(kv, [PoolPages("indexer", [yes, yes, no, yes, yes])]) == ({"kv": 4, "indexer": 2}, [1, 2])
    assert restorable([no], [state]) == ({}, [])


# pieces --------------------------------------------------------------------------------------------------------------


def test_pieces_are_the_memory_itself() -> None:
    memory = np.arange(64, dtype=np.uint8)
    base = memory.ctypes.data
    rows = rows_at([base + 40, base, base + 16], [8, 4, 16])
    assert [row.tolist() for row in rows] == [list(range(40, 48)), list(range(4)), list(range(16, 32))]
    rows[1][:] = 99
    assert memory[:5].tolist() == [99, 99, 99, 99, 4]
    assert rows_at([], []) == []


def test_pages_gathered_and_scattered_are_the_same() -> None:
    memory = np.arange(96, dtype=np.uint8)
    meta = SimpleNamespace(
        get_page_buffer_meta=lambda indices: (
            [memory.ctypes.data + at for at in (0, 48, 16, 64)],
            [16, 8, 16, 8],
        )
    )
    pages = [Page(key_of(place), part) for place, part in enumerate(page_rows(meta, None, 2))]
    assert [page.size_bytes for page in pages] == [24, 24]
    row = np.zeros(60, np.uint8)
    parts = gather(pages, row)
    assert parts[1].tolist() == [*range(16, 32), *range(64, 72)]
    assert [len(one) for one in cut(pages, row)] == [24, 24]
    scatter(parts[0], pages[1])
    assert memory[16:32].tolist() == list(range(16))
    with pytest.raises(ValueError, match="4 pieces for 3 pages"):
        page_rows(meta, None, 3)


# tiers ---------------------------------------------------------------------------------------------------------------


def pages(count: int, first: int = 0) -> list[Page]:
    """Each in two pieces, of bytes of its own."""
    rng = np.random.default_rng(first)
    made = []
    for place in range(first, first + count):
        row = rng.integers(0, 256, SIZE, dtype=np.uint8)
        made.append(Page(key_of(place, group=0), [row[:1000], row[1000:]]))
    return made


def empty_like(given: Sequence[Page]) -> list[Page]:
    return [page._replace(rows=[np.zeros_like(row) for row in page.rows]) for page in given]


def same(one: Page, other: Page) -> bool:
    return all(np.array_equal(*rows) for rows in zip(one.rows, other.rows, strict=True))


def shelf_over(*tiers: Tier, staging_bytes: int = 256 << 20) -> Shelf:
    """With a deadline that no busy machine passes."""
    return Shelf(tiers, staging_bytes=staging_bytes, deadline_seconds=60.0)


def is_there(found: Sequence[Tier | None]) -> list[bool]:
    return [one is not None for one in found]


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_a_bad_copy_in_one_tier_is_had_from_the_next(tmp_path: Path) -> None:
    liar = FaultyTier(HostTier(1 << 20, ThreadExecutor("host"), slot_bytes=[SIZE]), seed=1, faults=Faults(flipped=1.0))
    shelf = shelf_over(liar, DiskTier(tmp_path, 8 << 20))
    given = pages(6)
    assert shelf.save(given) == [True] * 6
    target = empty_like(given)
    assert shelf.load(target, shelf.until()) == [True] * 6
    assert all(same(*pair) for pair in zip(given, target, strict=True))
    assert shelf.below.counters()["loaded_pages_disk"] == 6
    shelf.close()


def test_many_pages_go_through_buffers_that_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_module, "_CHUNK_BYTES", 3 * SIZE)
    shelf = shelf_over(DiskTier(tmp_path, 8 << 20, ThreadExecutor("disk")), staging_bytes=6 * SIZE)
    given = pages(20)
    assert shelf.save(given) == [True] * 20
    assert shelf.save(given) == [True] * 20
    target = empty_like([*given, *pages(2, 50)])
    deadline = time.monotonic() + 60
    assert shelf.load(target, deadline) == [True] * 20 + [False] * 2
    assert all(same(*pair) for pair in zip(given, target, strict=False))
    assert shelf._staging.used_bytes == 0
    assert is_there(shelf.find([page.key for page in target], deadline)) == [True] * 20 + [False] * 2
    shelf.close()


def test_a_tier_that_hangs_is_left_alone_and_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, started, plain = threading.Event(), threading.Event(), DiskTier._get_one

    def hang(self: DiskTier, job: Job, claim: Any) -> ResultCode:
        started.set()
        assert go.wait(60)
        return plain(self, job, claim)

    shelf = shelf_over(DiskTier(tmp_path, 8 << 20, ThreadExecutor("disk")))
    given = pages(4)
    assert shelf.save(given) == [True] * 4
    shelf.deadline_seconds = 0.1
    monkeypatch.setattr(DiskTier, "_get_one", hang)
    target = empty_like(given)
    assert shelf.load(target, shelf.until()) == [False] * 4
    assert started.is_set()
    assert is_there(shelf.find([page.key for page in given], shelf.until())) == [False] * 4
    assert shelf.save(pages(2, 9)) == [False] * 2
    assert shelf._staging.used_bytes > 0
    go.set()
    until(lambda: shelf._staging.used_bytes == 0)
    assert not any(row.any() for page in target for row in page.rows)
    until(lambda: shelf.load(target, time.monotonic() + 30) == [True] * 4)
    assert all(same(*pair) for pair in zip(given, target, strict=True))
    shelf.close()


def test_a_reset_that_hangs_or_fails_is_told_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = shelf_over(DiskTier(tmp_path, 8 << 20))
    assert shelf.save(pages(2)) == [True] * 2
    shelf.reset()
    assert shelf.below.epoch == 1
    assert is_there(shelf.find([page.key for page in pages(2)], shelf.until())) == [False] * 2

    def fail(self: DiskTier) -> None:
        raise TierError("no")

    plain = DiskTier.clear
    monkeypatch.setattr(DiskTier, "clear", fail)
    with pytest.raises(TierError, match="did not reach every tier: disk: no"):
        shelf.reset()
    go = threading.Event()
    monkeypatch.setattr(DiskTier, "clear", lambda self: go.wait(60) and plain(self))
    monkeypatch.setattr(shelf_module, "WHOLE_SECONDS", 0.1)
    with pytest.raises(TierError, match="reset: a tier has not answered in 0"):
        shelf.reset()
    assert is_there(shelf.find([page.key for page in pages(1)], shelf.until())) == [False]  # lookups do not wait for it
    go.set()
    monkeypatch.setattr(shelf_module, "WHOLE_SECONDS", 30.0)
    until(lambda: not shelf.below._resetting.locked())
    shelf.close()


def test_an_epoch_raised_elsewhere_is_followed_and_one_that_is_unknown_is_waited_for(tmp_path: Path) -> None:
    shelf = shelf_over(DiskTier(tmp_path, 8 << 20))
    tier = shelf.below.tiers[0]
    assert shelf.below.fresh_epoch(shelf.until()) == 0
    tier.raise_epoch(5)
    assert shelf.below.fresh_epoch(shelf.until()) == 5
    tier.seen_epoch = lambda: None  # type: ignore[method-assign]
    assert shelf.below.fresh_epoch(time.monotonic() + 0.05) is None
    shelf.close()


def test_one_rank_tells_what_all_have_read(tmp_path: Path) -> None:
    """Ranks of a model with latents all read the same pages."""
    told: list[int] = []

    class Told(HostTier):
        def note_reuse(self, key: CopyKey, blocks: int) -> None:
            told.append(blocks)

    given = pages(6)
    for rank in (0, 1):
        shelf = Shelf([Told(1 << 20, slot_bytes=[SIZE])], deadline_seconds=60.0, tells=rank == 0)
        assert shelf.save(given) == [True] * 6
        assert shelf.load(empty_like(given), shelf.until()) == [True] * 6
        shelf.close()
    assert told == [6]
