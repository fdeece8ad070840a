"""The tier on vLLM's device without vLLM: what is decoded out of it, what it holds, its budget, and its settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from allocator import COLD, FULL, ConfigError, KVGeometry
from engine_adapter.vllm_connector import device_tier
from engine_adapter.vllm_connector.copier import NativeCopier, copier_for
from engine_adapter.vllm_connector.device_tier import check_room, host_limit_bytes
from engine_adapter.vllm_connector.settings import ConnectorSettings, make_device_tier, read_settings
from kvstore.host_tier.arena import HostArena
from quant import BlockShape, dispatch, get_codec
from tests.engine_adapter.test_vllm_copies import BLOCK, BLOCKS, SAVED, Rank, gqa, mla, relative_error

CODEC = get_codec("int4")
SHAPE = BlockShape(2, 2, BLOCK, 32, 32)


def tiers_of(kv: KVGeometry, size_bytes: int, ranks: int = 1, **given: Any) -> list[Any]:
    settings = ConnectorSettings(read_settings({"host_bytes": 1, **given}, {}).store, device_int4_bytes=size_bytes)
    return list(make_device_tier(settings, kv, CODEC, ranks, NativeCopier()))


@contextmanager
def with_device(
    kv: KVGeometry, folder: Path, rank: tuple[int, int] = (0, 1), size_bytes: int = 1 << 20
) -> Iterator[Rank]:
    made = Rank(kv, folder, rank, "int4", before=tiers_of(kv, size_bytes, rank[1]))
    try:
        yield made
    finally:
        made.shelf.close()


@pytest.mark.parametrize("kv", [gqa(2), mla()], ids=["gqa", "mla"])
def test_a_load_is_decoded_out_of_it_and_is_what_the_tier_below_would_give(kv: KVGeometry, tmp_path: Path) -> None:
    with with_device(kv, tmp_path) as one:
        device, disk = one.shelf.below.tiers
        one.save()
        assert one.found() == (BLOCKS, 1)
        assert one.load(lossy_at=1) == []
        counts = one.shelf.below.counters()
        assert counts["loaded_blocks_device"] == BLOCKS
        assert "loaded_blocks_disk" not in counts
        here, expected = one.values(), one.values(SAVED)
        assert np.array_equal(here[..., :BLOCK, :], expected[..., :BLOCK, :]), "a prompt's first block stays as it is"
        assert 0 < relative_error(here[..., BLOCK:, :], expected[..., BLOCK:, :]) < 0.15
        device.clear()
        assert one.load(lossy_at=1) == []
        assert one.shelf.below.counters()["loaded_blocks_disk"] == BLOCKS
        assert np.array_equal(one.values(), here)
        assert disk.used_bytes


def test_without_kernels_it_is_decoded_the_same(tmp_path: Path) -> None:
    with with_device(gqa(2), tmp_path) as one:
        one.save()
        one.load(lossy_at=1)
        expected = one.values()
        with dispatch.forced("int4_decode", "cpu", "torch"):
            one.memory[:, 7:11] = 0
            assert one.load(lossy_at=1) == []
        assert np.array_equal(one.values(), expected)


def test_an_exact_reader_takes_none_of_its_encoded_blocks(tmp_path: Path) -> None:
    with with_device(gqa(2), tmp_path) as one:
        one.save()
        assert one.load(lossy_at=None) == list(range(1, BLOCKS))
        assert one.load(lossy_at=5) == [1, 2, 3, 4]


def test_newest_tokens_are_read_raw_out_of_it_too(tmp_path: Path) -> None:
    with with_device(gqa(2), tmp_path) as one:
        one.save()
        one.save(start=6, is_raw=True)
        assert one.load(lossy_at=1) == []
        assert one.shelf.below.counters()["loaded_blocks_device"] == BLOCKS
        assert np.array_equal(one.values()[..., 6 * BLOCK :, :], one.values(SAVED)[..., 6 * BLOCK :, :])
        assert not np.array_equal(one.values(), one.values(SAVED))


def test_what_comes_from_below_is_promoted_as_it_is(tmp_path: Path) -> None:
    with with_device(gqa(2), tmp_path) as one:
        device, disk = one.shelf.below.tiers
        one.save()
        device.clear()
        assert one.load(lossy_at=1) == []
        assert device.contains(_keys(one, COLD)) == [False] + [True] * (BLOCKS - 1)
        assert device.contains(_keys(one, FULL)) == [True] + [False] * (BLOCKS - 1)
        below = one.values()
        assert disk.delete([*_keys(one, COLD), *_keys(one, FULL)]) == BLOCKS
        one.memory[:, 7:11] = 0
        assert one.load(lossy_at=1) == []
        assert np.array_equal(one.values(), below)


def test_a_block_that_went_between_lookup_and_load_comes_from_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with with_device(gqa(2), tmp_path) as one:
        device = one.shelf.below.tiers[0]
        one.save()
        one.load(lossy_at=1)
        expected = one.values()
        one.memory[:, 7:11] = 0
        real = device.reading

        def late(keys: Any) -> Any:
            device.delete(_keys(one, COLD)[2:4])
            return real(keys)

        monkeypatch.setattr(device, "reading", late)
        assert one.load(lossy_at=1) == []
        counts = one.shelf.below.counters()
        assert counts["loaded_blocks_disk"] == 2
        assert np.array_equal(one.values(), expected)


def test_its_budget_is_never_exceeded_and_what_it_gave_up_comes_from_below(tmp_path: Path) -> None:
    kv = gqa(2)
    size = 2 * kv.full_slot_bytes(0)  # the first block, and what fits into another's place
    assert size < (BLOCKS - 1) * CODEC.encoded_bytes(SHAPE, torch.float32) + kv.full_slot_bytes(0)
    with with_device(kv, tmp_path, size_bytes=size) as one:
        device = one.shelf.below.tiers[0]
        one.save()
        held = [sum(device.contains(_keys(one, form))) for form in (FULL, COLD)]
        assert 0 < sum(held) < BLOCKS
        assert device.peak_bytes <= size
        assert device.memory.nbytes == size
        assert one.shelf.below.counters()["device_evicted"] > 0
        assert one.load(lossy_at=1) == []
        assert device.peak_bytes <= size
        device.check_invariants()


def test_what_is_promoted_takes_no_place_of_a_block_that_the_same_load_needs(tmp_path: Path) -> None:
    kv = gqa(2)
    with with_device(kv, tmp_path, size_bytes=2 * kv.full_slot_bytes(0)) as one:
        device, disk = one.shelf.below.tiers
        one.save()
        keys = [*_keys(one, FULL), *_keys(one, COLD)]
        held = [key for key, is_there in zip(keys, device.contains(keys), strict=True) if is_there]
        assert not device.contains(_keys(one, FULL))[0], "the first block comes from below, and is the largest"
        assert disk.delete(held) == len(held) < BLOCKS
        assert one.found() == (BLOCKS, 1)
        assert one.load(lossy_at=1) == []


def test_a_reset_empties_it(tmp_path: Path) -> None:
    with with_device(gqa(2), tmp_path) as one:
        one.save()
        assert one.shelf.below.reset() == 1
        assert one.shelf.below.tiers[0].used_bytes == 0
        assert one.shelf.find(1, one.root, one.hashes, 0).blocks == 0


def test_spoiled_bytes_of_it_reach_the_pages(tmp_path: Path) -> None:
    """Nobody else has this memory, so it carries no checksum, as the host tier's; and loads do come out of it."""
    with with_device(gqa(2), tmp_path) as one:
        one.save()
        one.load(lossy_at=1)
        before = one.values()
        one.shelf.below.tiers[0].memory.bitwise_xor_(1)
        assert one.load(lossy_at=1) == []
        assert not np.array_equal(one.values(), before)


@pytest.mark.parametrize("rank", [(0, 2), (1, 2)])
def test_each_rank_has_its_own_heads_in_it(rank: tuple[int, int], tmp_path: Path) -> None:
    kv = gqa(4)
    with with_device(kv, tmp_path / "one") as whole:
        whole.save()
        whole.load(lossy_at=1)
        expected = whole.values()
    with with_device(kv, tmp_path / "part", rank) as part:
        part.save()
        assert part.load(lossy_at=1) == []
        assert part.shelf.below.counters()["loaded_blocks_device"] == BLOCKS
        assert np.array_equal(part.values(), expected[:, slice(*part.heads)])


@pytest.mark.parametrize("rank", [(0, 2), (1, 2)])
def test_a_latent_lies_in_each_ranks_own_and_in_a_shared_tier_once(rank: tuple[int, int], tmp_path: Path) -> None:
    """A rank whose own were empty would have no hit, and with it none of the others."""
    with with_device(mla(), tmp_path, rank) as one:
        one.save()
        assert one.found() == (BLOCKS, 1)
        assert one.load(lossy_at=1) == []
        counts = one.shelf.below.counters()
        assert counts["loaded_blocks_device"] == BLOCKS
        assert counts.get("put_disk_ok", 0) == (BLOCKS if rank[0] == 0 else 0)


# settings ------------------------------------------------------------------------------------------------------------


def test_its_size_is_read_as_other_sizes_and_it_alone_is_enough() -> None:
    settings = read_settings({"device_int4_bytes": "2 GiB", "codec": "int4"}, {})
    assert settings.device_int4_bytes == 2 << 30
    assert read_settings({"host_bytes": 1}, {}).device_int4_bytes == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"device_int4_bytes": "much", "codec": "int4"}, "device_int4_bytes: got 'much'"),
        ({"device_int4_bytes": -1, "codec": "int4"}, "device_int4_bytes: got -1"),
        ({"device_int4_bytes": 1 << 20}, "expected codec 'int4' beside it"),
        ({"device_int4_bytes": 1 << 20, "codec": "int8k"}, "expected codec 'int4' beside it"),
    ],
)
def test_settings_that_cannot_work_are_refused(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        read_settings({"host_bytes": 1, **given}, {})


def test_one_that_holds_no_block_is_refused() -> None:
    with pytest.raises(ConfigError, match="one block of this model"):
        tiers_of(gqa(2), 1000)


def test_on_a_cpu_one_that_is_larger_than_its_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="bytes of memory that this process may have"):
        tiers_of(gqa(2), 1 << 45)


def test_its_limit_is_what_control_groups_leave_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host_limit_bytes(tmp_path)
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def file(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    file("proc/self/cgroup", "0::/outer/inner\n")
    file("sys/fs/cgroup/outer/memory.max", "4096000\n")
    assert host_limit_bytes(tmp_path) == 4096000
    file("sys/fs/cgroup/outer/inner/memory.max", "max\n")
    assert host_limit_bytes(tmp_path) == 4096000
    file("sys/fs/cgroup/memory.max", "1024000\n")  # as a container sees its own
    assert host_limit_bytes(tmp_path) == 1024000
    file("proc/self/cgroup", "9:cpu,cpuacct:/a\n7:memory:/a\n")
    file("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "512000\n")
    assert host_limit_bytes(tmp_path) == 512000
    monkeypatch.setattr(device_tier, "host_limit_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match="less than the 1048576 bytes"):
        tiers_of(gqa(2), 2 << 20)


def test_it_is_touched_beforehand_as_the_host_tier_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    real = device_tier.HostArena

    def arena(capacity_bytes: int, *, prefault: bool) -> HostArena:
        made.append(prefault)
        return real(capacity_bytes, prefault=False)

    monkeypatch.setattr(device_tier, "HostArena", arena)
    for wanted in (True, False):
        (tier,) = tiers_of(gqa(2), 1 << 20, host_prefault=wanted)
        tier.close()
    assert made == [True, False]


def test_a_card_without_room_for_it_says_how_much_less_vllm_may_take() -> None:
    check_room(4 << 30, 60 << 30, 64 << 30, 80 << 30)
    with pytest.raises(ConfigError, match=r"lower by 0\.04$"):  # 3 of 80 GiB
        check_room(4 << 30, 63 << 30, 64 << 30, 80 << 30)


def test_a_device_that_nobody_copies_from_is_refused() -> None:
    assert isinstance(copier_for(torch.device("cpu")), NativeCopier)
    with pytest.raises(ConfigError, match="got xpu; expected cpu or cuda"):
        copier_for(torch.device("xpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a card")
def test_a_card_that_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"cannot be copied \(no "):
        copier_for(torch.device("cuda", 0))


def _keys(one: Rank, form: int) -> list[Any]:
    key = one.shelf._residency.copy_key(one.root, 0, one.hashes[0], form, True)
    return list(key.with_hashes(one.hashes))
