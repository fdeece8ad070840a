"""Settings: sources and their order, and errors that name key, value and expectation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from allocator import KVGeometry
from kvstore import ConfigError, Identity, KVStore, KVStoreConfig


def test_there_are_few_knobs_and_each_says_what_it_expects() -> None:
    fields = dataclasses.fields(KVStoreConfig)
    assert len(fields) <= 28
    assert all(one.metadata["expected"] for one in fields)
    assert KVStoreConfig.from_mapping(KVStoreConfig().to_mapping()) == KVStoreConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        KVStoreConfig().host_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (12345, 12345),
        ("12345", 12345),
        ("1 KiB", 1024),
        ("1.5 GiB", 3 << 29),
        ("2gb", 2 * 10**9),
        (" 3 MiB ", 3 << 20),
        ("0.5kib", 512),
    ],
)
def test_sizes_are_numbers_or_text(given: object, expected: int) -> None:
    assert KVStoreConfig(host_bytes=given).host_bytes == expected  # type: ignore[arg-type]


BAD = [
    ("device_bytes", -1),
    ("device_bytes", True),
    ("device_bytes", 1.5),
    ("device_bytes", "lots"),
    ("device_bytes", "1 XB"),
    ("device_bytes", "-1 GiB"),
    ("device_bytes", None),
    ("device_bytes", 2**63),
    ("host_prefault", 1),
    ("host_prefault", "perhaps"),
    ("codec", "fp8"),
    ("codec", 4),
    ("error_bound", 0),
    ("error_bound", 1.5),
    ("error_bound", float("nan")),
    ("error_bound", "low"),
    ("error_bound", True),
    ("residual_tokens", -1),
    ("residual_tokens", 1.0),
    ("residual_tokens", "x"),
    ("cool_blocks_per_step", 65537),
    ("spill_queue_blocks", 0),
    ("prefill_tokens_per_second", 0),
    ("prefill_tokens_per_second", float("inf")),
    ("io_threads", "four"),
    ("lease_seconds", -1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_wrong_value_is_named_with_what_was_given_and_expected(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        KVStoreConfig.from_mapping({name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}: got {value!r}")
    expectation = next(one.metadata["expected"] for one in dataclasses.fields(KVStoreConfig) if one.name == name)
    assert message.endswith(f"expected {expectation}")


def test_unknown_keys_are_refused_with_the_likely_one() -> None:
    with pytest.raises(ConfigError, match="unknown key 'hst_bytes'; did you mean 'host_bytes'"):
        KVStoreConfig.from_mapping({"hst_bytes": 1})
    with pytest.raises(ConfigError, match="unknown key 'zzz'; expected one of device_bytes"):
        KVStoreConfig.from_toml("[kvstore]\nzzz = 1")
    with pytest.raises(ConfigError, match=r"environment \(KVSTORE_\*\): unknown key 'residual'"):
        KVStoreConfig().with_environment({"KVSTORE_RESIDUAL": "1"})


def test_environment_over_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "store.toml"
    path.write_text('[kvstore]\nhost_bytes = "1 GiB"\nresidual_tokens = 64\n\n[other]\nx = 1\n', encoding="utf-8")
    environ = {"KVSTORE_RESIDUAL_TOKENS": "32", "KVSTORE_SHARE": "yes", "HOME": "/"}
    config = KVStoreConfig.load(path, environ)
    assert (config.host_bytes, config.residual_tokens, config.share) == (1 << 30, 32, True)
    assert config.codec == "int4"
    assert KVStoreConfig.load(None, {}) == KVStoreConfig()
    assert KVStoreConfig.from_toml("host_bytes = 5").host_bytes == 5
    with pytest.raises(ConfigError, match="KVSTORE_SHARE: got 'maybe'"):
        KVStoreConfig.load(path, {"KVSTORE_SHARE": "maybe"})


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        KVStoreConfig.load(tmp_path / "absent.toml", {})
    (tmp_path / "latin.toml").write_bytes(b"codec = '\xe9'")
    with pytest.raises(ConfigError, match="cannot be read"):
        KVStoreConfig.load(tmp_path / "latin.toml", {})
    with pytest.raises(ConfigError, match="not TOML"):
        KVStoreConfig.from_toml("codec = ")
    with pytest.raises(ConfigError, match="expected a table"):
        KVStoreConfig.from_toml("kvstore = 3")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: KVStoreConfig.from_mapping(None), "settings: got None (NoneType); expected keys"),  # type: ignore[arg-type]
        (lambda: KVStoreConfig.from_mapping([1]), "settings: got [1] (list); expected keys"),  # type: ignore[arg-type]
        (lambda: KVStoreConfig.from_toml(b"x"), "TOML text: got bytes; expected text"),  # type: ignore[arg-type]
    ],
)
def test_settings_of_the_wrong_kind_are_refused(call: Callable[[], KVStoreConfig], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    assert said in str(caught.value)


def test_the_model_cache_variable_is_no_setting_of_a_store() -> None:
    from engine_adapter.model_source import CACHE_VARIABLE

    assert KVStoreConfig.load(None, {CACHE_VARIABLE: "/models"}) == KVStoreConfig()


def test_private_settings_are_in_no_message_and_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("hunter2hunter2hunter2\n", encoding="utf-8")
    config = KVStoreConfig(secret=f"file:{tmp_path / 'secret'}", redis_url="redis://u:hunter2@host")
    assert config.secret == "hunter2hunter2hunter2"
    assert "hunter2" not in repr(config)
    for wrong in (
        {"secret": "hunter2"},
        {"secret": "file:/hunter2"},
        {"redis_url": "hunter2\n"},
        {"secret": "hunter2" * 99},
    ):
        with pytest.raises(ConfigError) as caught:
            KVStoreConfig(**wrong)  # type: ignore[arg-type]
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="KVSTORE_SECRET") as caught:
        KVStoreConfig().with_environment({"KVSTORE_SECRET": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_size_that_cannot_be_is_said_by_its_setting(tmp_path: Path) -> None:
    kv = KVGeometry.uniform(layers=2, kv_heads=2, head_dim=64)
    identity = Identity(model="m", weights=None, geometry=kv)
    with pytest.raises(ConfigError, match=r"device_bytes: got \d+, which this machine does not give"):
        KVStore(kv, identity, KVStoreConfig(device_bytes="9999 TiB"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="disk_bytes: got 100; expected at least 1048576"):
        KVStore(kv, identity, KVStoreConfig(codec="raw", disk_path=str(tmp_path), disk_bytes=100))
