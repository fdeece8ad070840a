"""The vLLM connector's copies without vLLM: encoded ones, latents, and head ranges of tensor-parallel ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from allocator import COLD, FULL, CacheGroup, ConfigError, GroupKind, KVGeometry
from engine_adapter.vllm_connector import loading
from engine_adapter.vllm_connector.forms import Forms
from engine_adapter.vllm_connector.layout import GroupPages, LayerPages
from engine_adapter.vllm_connector.orders import LoadOrder, SaveOrder
from engine_adapter.vllm_connector.shards import Shard, coverings, shard_of
from engine_adapter.vllm_connector.shelf import Shelf
from kvstore import HashChain, Identity
from kvstore.disk_tier.tier import DiskTier
from kvstore.executor import ThreadExecutor
from kvstore.frame.specs import geometry_specs
from kvstore.host_tier.tier import HostTier
from kvstore.tier import Tier
from quant import get_codec

BLOCK, PAGE, PAGES, LAYERS, BLOCKS = 16, 32, 12, 2, 8
RATIO = PAGE // BLOCK
SAVED, LOADED = [1, 2, 3, 4], [7, 8, 9, 10]
Floats = npt.NDArray[np.float32]


def gqa(heads: int) -> KVGeometry:
    group = CacheGroup(kind=GroupKind.FULL, layers=(0, 1), kv_heads=heads, key_dim=32, value_dim=32)
    return KVGeometry(groups=(group,), block_tokens=BLOCK, dtype="float32")


def mla() -> KVGeometry:
    return KVGeometry.latent(layers=LAYERS, latent_dim=32, rope_dim=16, block_tokens=BLOCK, dtype="float32")


def prompt_values(kv: KVGeometry) -> Floats:
    """float32[layers, heads, (K, V), tokens, dim] of a prompt of BLOCKS blocks."""
    (group,) = kv.groups
    parts = 1 if group.kind is GroupKind.LATENT else 2
    shape = (LAYERS, group.kv_heads, parts, BLOCKS * BLOCK, group.key_dim)
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


class Rank:
    """One tensor-parallel rank's pages, and a shelf over a directory and what is before it. The prompt's are SAVED."""

    def __init__(
        self, kv: KVGeometry, folder: Path, rank: tuple[int, int], codec: str = "raw", before: Sequence[Tier] = ()
    ) -> None:
        (group,) = kv.groups
        self.heads = shard_of(group.kv_heads, *rank).heads
        start, stop = self.heads
        self.is_latent = group.kind is GroupKind.LATENT
        self.dim = group.key_dim
        parts = 1 if self.is_latent else 2
        self.memory = np.zeros((LAYERS, PAGES, stop - start, parts, PAGE * self.dim), np.float32)
        layers = tuple(LayerPages(one.reshape(-1).view(np.uint8), 0) for one in self.memory)
        self.pages = GroupPages(layers, stop - start, self.dim, BLOCK, RATIO, 4, self.is_latent)
        tier = DiskTier(folder, 64 << 20, specs=geometry_specs(kv))
        chosen = None if codec == "raw" else get_codec(codec)
        self.shelf = Shelf(kv, [*before, tier], codec=chosen, rank=rank, deadline_seconds=30.0)
        self.shelf.attach([self.pages])
        self.root = Identity(model="m", weights="w", geometry=kv).root()
        self.hashes = HashChain(self.root, BLOCK).extend(list(range(BLOCKS * BLOCK)))
        self.fill(prompt_values(kv)[:, start:stop])

    def fill(self, values: Floats) -> None:
        """values: float32[layers, heads, (K, V), tokens, dim], into the pages SAVED."""
        for at, page in enumerate(SAVED):
            tokens = values[..., at * PAGE : (at + 1) * PAGE, :]
            keys = tokens[:, :, 0] if self.is_latent else tokens[:, :, 0].swapaxes(2, 3)
            self.memory[:, page, :, 0] = keys.reshape(LAYERS, -1, PAGE * self.dim)
            if not self.is_latent:
                self.memory[:, page, :, 1] = tokens[:, :, 1].reshape(LAYERS, -1, PAGE * self.dim)

    def values(self, pages: Sequence[int] = LOADED) -> Floats:
        """float32[layers, heads, (K, V), tokens, dim] in these pages."""
        found = []
        for page in pages:
            keys = self.memory[:, page, :, 0].reshape(LAYERS, -1, *self._inside(PAGE, self.dim))
            keys = keys if self.is_latent else keys.swapaxes(2, 3)
            parts = [keys]
            if not self.is_latent:
                parts.append(self.memory[:, page, :, 1].reshape(LAYERS, -1, PAGE, self.dim))
            found.append(np.stack(parts, axis=2))
        return np.concatenate(found, axis=3)

    def _inside(self, tokens: int, dim: int) -> tuple[int, int]:
        return (tokens, dim) if self.is_latent else (dim, tokens)

    def save(self, start: int = 0, **given: Any) -> None:
        parent = self.hashes[start - 1] if start else None
        self.shelf.save([SaveOrder(self.root, self.hashes[start:], start, parent, [SAVED], **given)])
        until = time.monotonic() + 30
        while not self.shelf.is_idle and time.monotonic() < until:
            self.shelf.below.drain()
            time.sleep(0.001)
        assert self.shelf.is_idle

    def load(self, lossy_at: int | None = None, start: int = 0) -> list[int]:
        """Positions that failed."""
        self.shelf.load(LoadOrder("r", self.root, self.hashes, start, [LOADED], lossy_at))
        until = time.monotonic() + 30
        while time.monotonic() < until:
            for result in self.shelf.take_finished():
                return result.failed
            time.sleep(0.001)
        raise AssertionError("the load did not end")

    def found(self) -> tuple[int, int | None]:
        answer = self.shelf.find(0, self.root, self.hashes, 0)
        return answer.blocks, answer.lossy_at

    def stored(self, form: int, exact: bool = True) -> list[bool]:
        key = self.shelf._residency.copy_key(self.root, 0, self.hashes[0], form, exact)
        return self.shelf.below.tiers[0].contains(key.with_hashes(self.hashes))


@contextmanager
def ranked(kv: KVGeometry, folder: Path, rank: tuple[int, int] = (0, 1), codec: str = "raw") -> Iterator[Rank]:
    made = Rank(kv, folder, rank, codec)
    try:
        yield made
    finally:
        made.shelf.close()


def relative_error(found: Floats, expected: Floats) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / (expected**2).mean()))


# encoded copies ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv", [gqa(2), mla()], ids=["gqa", "mla"])
@pytest.mark.parametrize("codec", ["int4", "int8k"])
def test_encoded_copies_come_back_near_and_the_first_block_as_it_was(
    kv: KVGeometry, codec: str, tmp_path: Path
) -> None:
    with ranked(kv, tmp_path, codec=codec) as one:
        one.save()
        assert one.found() == (BLOCKS, 1)
        assert one.load(lossy_at=1) == []
        found, expected = one.values(), one.values(SAVED)
        assert np.array_equal(found[..., :BLOCK, :], expected[..., :BLOCK, :])
        assert 0 < relative_error(found[..., BLOCK:, :], expected[..., BLOCK:, :]) < 0.15
        assert one.stored(FULL) == [True] + [False] * (BLOCKS - 1)


def test_a_load_that_was_promised_exact_takes_no_encoded_copy(tmp_path: Path) -> None:
    """The raw copy went after the lookup: what is computed behind it would be stored as exact."""
    with ranked(gqa(2), tmp_path, codec="int4") as one:
        one.save()
        assert one.load(lossy_at=None) == list(range(1, BLOCKS))
        assert one.load(lossy_at=5) == [1, 2, 3, 4]


def test_raw_copies_of_the_tail_are_preferred(tmp_path: Path) -> None:
    with ranked(gqa(2), tmp_path, codec="int4") as one:
        one.save()
        one.save(start=6, is_raw=True)
        assert one.load(lossy_at=1) == []
        assert np.array_equal(one.values()[..., 6 * BLOCK :, :], one.values(SAVED)[..., 6 * BLOCK :, :])
        assert not np.array_equal(one.values(), one.values(SAVED))


def test_a_block_that_the_codec_cannot_carry_stays_raw(tmp_path: Path) -> None:
    with ranked(gqa(2), tmp_path, codec="int4") as one:
        one.memory[0, SAVED[1], 0, 1, 3] = np.inf
        one.save()
        assert one.stored(COLD) == [False, True, False, *[True] * 5]
        assert one.stored(FULL) == [True, False, True, *[False] * 5]
        assert one.shelf.below.counters()["blocks_too_lossy"] == 1
        assert one.load(lossy_at=1) == []
        assert np.array_equal(one.values()[..., 32:48, :], one.values(SAVED)[..., 32:48, :])


def test_an_encoder_that_fails_is_counted_and_holds_no_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranked(gqa(2), tmp_path, codec="int4") as one:
        monkeypatch.setattr(Forms, "encode", lambda *_: 1 // 0)
        one.save()
        assert one.stored(COLD) == [False] * BLOCKS
        assert one.shelf.below.counters()["saves_failed"] == BLOCKS - 1, "the first block is stored as it is"
        monkeypatch.undo()
        one.save()
        assert one.stored(COLD) == [False] + [True] * (BLOCKS - 1)


def test_a_copy_whose_end_is_an_error_is_counted_and_holds_no_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card that fails says so when its copy is waited for; encoded blocks are waited for on a CPU too."""

    class Broken:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with ranked(gqa(2), tmp_path, codec="int4") as one:
        saver = one.shelf._saver
        monkeypatch.setattr(saver._copier, "gather", lambda *_: Broken())
        one.save()
        assert one.stored(COLD) == [False] * BLOCKS
        assert one.shelf.below.counters()["saves_failed"] == BLOCKS - 1, "the first block is put without a wait"
        assert saver.staging.used_bytes == 0
        monkeypatch.undo()
        one.save()
        assert one.stored(COLD) == [False] + [True] * (BLOCKS - 1)


@pytest.mark.parametrize("codec", ["raw", "int4"])
def test_pages_that_cannot_be_copied_are_counted_and_hold_no_buffer(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranked(gqa(2), tmp_path, codec=codec) as one:
        monkeypatch.setattr(GroupPages, "gather", lambda *_: 1 // 0)
        one.save()
        assert one.found() == (0, None)
        assert one.shelf.below.counters()["saves_failed"] == BLOCKS
        assert one.shelf._saver.staging.used_bytes == 0
        monkeypatch.undo()
        one.save()
        assert one.found()[0] == BLOCKS


def test_what_was_computed_after_lossy_blocks_has_another_name(tmp_path: Path) -> None:
    with ranked(gqa(2), tmp_path, codec="int4") as one:
        one.save(start=0, is_exact=False)
        assert one.stored(COLD, exact=True) == [False] * BLOCKS
        assert one.stored(COLD, exact=False) == [False] + [True] * (BLOCKS - 1)
        assert one.found() == (BLOCKS, 0)
    with ranked(gqa(2), tmp_path, codec="raw") as one:
        assert one.found() == (0, None)  # an engine with raw copies reads exact ones only


def test_a_raw_engine_and_an_encoding_one_meet_in_raw_copies(tmp_path: Path) -> None:
    with ranked(gqa(2), tmp_path, codec="raw") as one:
        one.save()
    with ranked(gqa(2), tmp_path, codec="int4") as other:
        assert other.found() == (BLOCKS, None)
        assert other.load() == []
        assert np.array_equal(other.values(), other.values(SAVED))


# latents -------------------------------------------------------------------------------------------------------------


def test_latents_come_back_to_other_pages(tmp_path: Path) -> None:
    with ranked(mla(), tmp_path) as one:
        one.save()
        assert one.load() == []
        assert np.array_equal(one.values(), prompt_values(mla()))


def test_a_latent_is_stored_once_whatever_the_ranks(tmp_path: Path) -> None:
    for rank in (3, 1, 2):
        with ranked(mla(), tmp_path, (rank, 4)) as one:
            one.save()
            assert one.found() == (0, None)
    with ranked(mla(), tmp_path, (0, 4)) as one:
        one.save()
    for rank in [(0, 4), (3, 4), (1, 2), (0, 1)]:
        with ranked(mla(), tmp_path, rank) as one:
            assert one.load() == []
            assert np.array_equal(one.values(), prompt_values(mla()))


# ranks ---------------------------------------------------------------------------------------------------------------


def test_ranks_have_heads_as_vllm_deals_them_out() -> None:
    assert [shard_of(8, rank, 4).heads for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [shard_of(2, rank, 4) for rank in range(4)] == [
        Shard((0, 1), True),
        Shard((0, 1), False),
        Shard((1, 2), True),
        Shard((1, 2), False),
    ]
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        shard_of(6, 0, 4)


def test_other_ranges_with_the_same_heads() -> None:
    assert coverings((0, 8), 8) == [
        ((0, 4), (4, 8)),
        ((0, 2), (2, 4), (4, 6), (6, 8)),
        tuple((i, i + 1) for i in range(8)),
    ]
    assert coverings((2, 4), 8) == [((0, 8),), ((0, 4),), ((2, 3), (3, 4))]
    assert coverings((0, 1), 1) == []
    assert coverings((4, 8), 12) == [((0, 12),)]  # the second of three ranks: halves and quarters lie across its range


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_engines_of_other_sizes_read_each_others_heads(codec: str, writers: int, readers: int, tmp_path: Path) -> None:
    kv = gqa(4)
    with ranked(kv, tmp_path / "one", codec=codec) as one:  # what a single rank gets from its own copies
        one.save()
        assert one.load(lossy_at=1 if codec != "raw" else None) == []
        expected = one.values()
    for rank in range(writers):
        with ranked(kv, tmp_path / "shared", (rank, writers), codec) as writer:
            writer.save()
    for rank in range(readers):
        with ranked(kv, tmp_path / "shared", (rank, readers), codec) as reader:
            assert reader.found() == (BLOCKS, 1 if codec != "raw" else None)
            assert reader.load(lossy_at=1 if codec != "raw" else None) == []
            start, stop = reader.heads
            assert np.array_equal(reader.values(), expected[:, start:stop])


def test_a_range_with_a_part_missing_is_no_hit(tmp_path: Path) -> None:
    kv = gqa(4)
    with ranked(kv, tmp_path, (0, 2)) as first:
        first.save()
    with ranked(kv, tmp_path, (1, 2)) as second:
        second.save()
        key = second.shelf._residency.copy_key(second.root, 0, second.hashes[5], FULL, True)
        assert second.shelf.below.tiers[0].delete([key]) == 1
    with ranked(kv, tmp_path) as whole:
        assert whole.found() == (5, None)


# errors --------------------------------------------------------------------------------------------------------------


def test_after_an_error_no_late_read_reaches_the_buffers_of_the_next_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load fails at its first chunk while its tier reads the second: the bytes come when the next load reads too."""
    kv = gqa(2)
    monkeypatch.setattr(loading, "_CHUNK_BLOCKS", 2)
    late = HostTier(1 << 20, ThreadExecutor("late"), name="late")
    one = Rank(kv, tmp_path, (0, 1), before=[late])
    go, is_read, places = threading.Event(), threading.Event(), []
    real_copy, real_scatter = late._copy_out, one.shelf._copier.scatter

    def copy_out(entry: Any, job: Any) -> None:
        if job.key.hash in one.hashes[2:4]:
            assert go.wait(30)
        real_copy(entry, job)
        if job.key.hash == one.hashes[2]:
            is_read.set()

    def scatter(*given: Any) -> Any:
        places.append(given[2][0][1])
        if len(places) == 1:
            raise RuntimeError("planted")
        if places[-1] == 4:
            go.set()
            assert is_read.wait(30)
        return real_scatter(*given)

    monkeypatch.setattr(late, "_copy_out", copy_out)
    monkeypatch.setattr(one.shelf._copier, "scatter", scatter)
    try:
        one.save()
        assert one.load() == [0]
        late.delete(
            [copy.key for copy in one.shelf._residency.plan(one.root, one.hashes, True).groups[0].copies.values()]
        )
        assert one.load(start=2) == []
        assert places == [0, 2, 4, 6]
        assert np.array_equal(one.values()[..., 2 * BLOCK :, :], one.values(SAVED)[..., 2 * BLOCK :, :])
        counts = one.shelf.below.counters()
        assert (counts["loads"], counts["loads_failed"], counts["loaded_tokens"]) == (1, 1, 6 * BLOCK)
    finally:
        go.set()
        one.shelf.close()


@pytest.mark.parametrize("refusal", [MemoryError("no memory"), RuntimeError("CUDA error: out of memory")])
def test_a_save_that_gets_no_buffer_is_counted_and_the_next_one_is_stored(
    refusal: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned memory can be refused; the engine goes on."""

    def refuse(size_bytes: int) -> None:
        raise refusal

    with ranked(gqa(2), tmp_path, codec="int4") as one:
        staging = one.shelf._saver.staging
        with monkeypatch.context() as refusing:
            refusing.setattr(staging, "_make_row", refuse)
            one.save()
        assert one.shelf.below.counters()["saves_failed"] == BLOCKS
        assert staging.used_bytes == 0
        one.save()
        assert one.load(lossy_at=1) == []
