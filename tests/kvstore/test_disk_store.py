"""A store over a disk directory: what one process computed, the next one reuses; nothing crosses identities."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from allocator import ConfigError, TierError
from kvstore import Identity, KVStoreConfig
from kvstore.frame.specs import geometry_specs, plain_specs
from kvstore.testing.transfer_contract import key_of
from tests.kvstore.conftest import full_geometry, hybrid_geometry
from tests.kvstore.driving import check_bytes, run_prompt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore import KVStore

B = 16
PROMPT = list(range(8 * B + 1))


def stored_once(make_store: Callable[..., KVStore], directory: Path, **settings: object) -> None:
    settings = {
        "disk_path": str(directory),
        "disk_bytes": "8 MiB",
        "share": True,
        "spill_policy": "everything",
    } | settings
    store = make_store(blocks=24, **settings)
    run_prompt(store, "first", PROMPT)
    store.finish("first")
    for _ in range(20):
        store.step()
    assert store.tiers[-1].used_bytes > 0
    store.close()


@pytest.mark.parametrize("geometry", [full_geometry(), full_geometry("bfloat16")])
def test_a_second_start_reuses_what_the_first_stored(
    make_store: Callable[..., KVStore], tmp_path: Path, geometry: object
) -> None:
    settings = {"geometry": geometry, "load_always": True}
    stored_once(make_store, tmp_path, **settings)
    store = make_store(blocks=24, disk_path=str(tmp_path), disk_bytes="8 MiB", share=True, **settings)
    assert run_prompt(store, "second", PROMPT) == 8 * B
    check_bytes(store, "second", PROMPT)


def test_packed_copies_are_reused_and_take_less_room(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    used = {}
    for level in (0, 1):
        settings = {"geometry": full_geometry("bfloat16"), "load_always": True, "zstd_level": level}
        directory = tmp_path / str(level)
        stored_once(make_store, directory, **settings)
        store = make_store(blocks=24, disk_path=str(directory), disk_bytes="8 MiB", share=True, **settings)
        used[level] = store.tiers[-1].used_bytes
        assert run_prompt(store, "second", PROMPT) == 8 * B
        check_bytes(store, "second", PROMPT)
    assert used[1] < 0.8 * used[0]


def test_other_weights_find_nothing(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    stored_once(make_store, tmp_path, load_always=True)
    other = Identity(model="toy", weights="w1", geometry=full_geometry())
    settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True, "load_always": True}
    store = make_store(blocks=24, identity=other, **settings)
    assert store.lookup(PROMPT).tokens == 0


def test_the_stores_secret_signs_what_lies_on_disk(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    """With the same secret all is found again; without one nothing is used, whatever the index says."""
    secret = "a secret of tests, 32 bytes long"
    stored_once(make_store, tmp_path, load_always=True, secret=secret)
    found = []
    for given in (secret, ""):
        settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True, "load_always": True}
        store = make_store(blocks=24, secret=given, **settings)
        found.append(run_prompt(store, "second", PROMPT))
        check_bytes(store, "second", PROMPT)
        store.close()
    assert found == [8 * B, 0]


def test_case_008_a_reset_empties_the_directory(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    stored_once(make_store, tmp_path, load_always=True)
    settings = {"disk_path": str(tmp_path), "disk_bytes": "8 MiB", "share": True, "load_always": True}
    store = make_store(blocks=24, **settings)
    assert store.lookup(PROMPT).tokens == 8 * B
    store.reset()
    assert store.tiers[-1].used_bytes == 0
    store.close()
    again = make_store(blocks=24, **settings)
    assert again.lookup(PROMPT).tokens == 0


def test_two_stores_on_one_directory_are_refused(make_store: Callable[..., KVStore], tmp_path: Path) -> None:
    make_store(blocks=8, disk_path=str(tmp_path), host_blocks=8)
    with pytest.raises(TierError, match="this process"):
        make_store(blocks=8, disk_path=str(tmp_path), host_blocks=8)


def test_settings(tmp_path: Path) -> None:
    config = KVStoreConfig.from_mapping({"disk_path": tmp_path, "disk_bytes": "2 MiB", "disk_sync": "batch"})
    assert (config.disk_path, config.disk_bytes, config.disk_sync) == (str(tmp_path), 2 << 20, "batch")
    for wrong in ({"disk_path": 3}, {"disk_path": "a\0b"}, {"disk_sync": "often"}, {"disk_bytes": -1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            KVStoreConfig.from_mapping(wrong)


def test_specs_follow_the_geometry() -> None:
    spec = geometry_specs(hybrid_geometry())(key_of(1, group=1), 4096)
    assert (spec.block_tokens, spec.key_dim, spec.value_dim, spec.dtype, spec.payload_bytes) == (
        16,
        64,
        64,
        "float32",
        4096,
    )
    assert geometry_specs(full_geometry())(key_of(1, group=7), 10) == plain_specs(key_of(1, group=7), 10)
