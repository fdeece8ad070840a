"""What `kv_connector_extra_config` may say, checked at start, and the tiers that it names.

Keys of KVStoreConfig (`host_bytes`, `disk_path`, `redis_url`, ...; docs/how-to/vllm.md) and the few here. The
environment (KVSTORE_*) counts over them, as everywhere. Both sides read the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allocator import ConfigError
from engine_adapter.model_source import weights_digest
from kvstore.config import KVStoreConfig, size_bytes

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.vllm_connector.copier import Copier
    from kvstore.tier import Tier
    from quant import BlockCodec

OWN_KEYS = ("daemon", "model", "weights", "tenant", "block_tokens", "staging_bytes", "device_int4_bytes")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """store: tiers and deadlines. daemon: its socket, "default" for the usual place, "" for none.

    model, weights: of the identity; "" finds them in the model's folder. tenant: salt of all requests.
    device_int4_bytes: memory beside vLLM's own on its device, for encoded copies; 0: none.
    """

    store: KVStoreConfig
    daemon: str = ""
    model: str = ""
    weights: str = ""
    tenant: str | None = None
    block_tokens: int = 16
    staging_bytes: int = 256 << 20
    device_int4_bytes: int = 0


def read_settings(given: Mapping[str, Any], environ: Mapping[str, str]) -> ConnectorSettings:
    """ConfigError says which key, what was given and what is expected."""
    own = {name: value for name, value in given.items() if name in OWN_KEYS}
    rest = {name: value for name, value in given.items() if name not in OWN_KEYS}
    for name in ("daemon", "model", "weights", "tenant"):
        if not isinstance(own.get(name, ""), str):
            raise ConfigError(f"kv_connector_extra_config: {name} is {own[name]!r}; expected text")
    for name in ("block_tokens", "staging_bytes"):
        value = own.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"kv_connector_extra_config: {name} is {value!r}; expected an int >= 1")
    if "device_int4_bytes" in own:
        own["device_int4_bytes"] = size_bytes("device_int4_bytes", own["device_int4_bytes"])
    rest.setdefault("codec", "raw")  # answers stay what they are, unless somebody asks for smaller copies
    unknown = sorted(set(rest) - {one.name for one in fields(KVStoreConfig)})
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown key {unknown[0]!r}; expected one of {', '.join(OWN_KEYS)}, or a "
            "setting of the store: host_bytes, disk_path, disk_bytes, redis_url, ..."
        )
    store = KVStoreConfig.from_mapping(rest, source="kv_connector_extra_config").with_environment(environ)
    settings = ConnectorSettings(store, **own)
    if settings.device_int4_bytes and store.codec != "int4":
        raise ConfigError(
            f"device_int4_bytes: got {settings.device_int4_bytes} with codec {store.codec!r}; expected codec 'int4' "
            "beside it: what is computed after a block of this tier is not what full precision gives"
        )
    local = store.host_bytes or store.daemon_socket or store.disk_path or store.redis_url
    if "://" in settings.daemon:
        raise ConfigError(
            f"kv_connector_extra_config: daemon is {settings.daemon!r}; expected the path of its socket, or 'default'; "
            "a server's URL goes to redis_url"
        )
    if not local and not settings.daemon and not settings.device_int4_bytes:
        raise ConfigError(
            "kv_connector_extra_config: no tier is named; expected host_bytes, disk_path, redis_url, daemon or "
            "device_int4_bytes"
        )
    if local and settings.daemon:
        raise ConfigError(
            "kv_connector_extra_config: got daemon beside host_bytes, disk_path or redis_url; expected one or the "
            "other: the daemon has tiers of its own"
        )
    return settings


def model_and_weights(settings: ConnectorSettings, model: str, revision: str | None) -> tuple[str, str]:
    """Name and weights of the identity. ConfigError where the weights cannot be known."""
    folder = Path(model)
    name = settings.model or folder.name
    if settings.weights:
        return name, settings.weights
    if folder.is_dir():
        try:
            return name, weights_digest(folder)
        except FileNotFoundError as error:
            raise ConfigError(f"weights: {error}; or set weights to a digest or revision of them") from error
    if revision is None:
        raise ConfigError(
            f"weights: {model!r} is no folder here and has no revision; set weights in kv_connector_extra_config to a "
            "digest or revision of the weights, since blocks of other weights would be taken for ours"
        )
    return model if not settings.model else name, revision


def make_codec(settings: ConnectorSettings, geometry: KVGeometry, ranks: int = 1) -> BlockCodec | None:
    """The codec of cold copies, None for raw ones. ConfigError where this model's blocks do not fit it."""
    from engine_adapter.vllm_connector.shards import shard_of
    from kvstore.device_blocks import cold_slot_bytes
    from kvstore.device_blocks import make_codec as cold_codec

    if geometry.dtype.startswith("float8") and settings.store.codec != "raw":
        raise ConfigError(f"codec: got {settings.store.codec!r} for a {geometry.dtype} cache; expected raw")
    codec = cold_codec(settings.store.codec, settings.store.error_bound)
    if codec is not None:
        cold_slot_bytes(geometry, codec)
    for group in geometry.groups:
        shard_of(group.kv_heads, 0, ranks)
    return codec


def make_tiers(
    settings: ConnectorSettings, geometry: KVGeometry, codec: BlockCodec | None = None, ranks: int = 1
) -> tuple[Tier, ...]:
    """The tiers below the device that the settings name, fast to slow."""
    from kvstore.frame.specs import geometry_specs

    config = settings.store
    if settings.daemon:
        from kvstore.daemon.client import DaemonTier
        from kvstore.executor import ThreadExecutor

        path = "" if settings.daemon == "default" else settings.daemon
        executor = ThreadExecutor("kvstore-daemon")
        specs, deadline = geometry_specs(geometry), config.fetch_deadline_seconds
        return (DaemonTier(path, executor, specs=specs, fetch_seconds=deadline),)
    from allocator import ExtentLayout
    from kvstore.assembly import own_tiers

    if config.disk_path and ranks > 1:
        raise ConfigError(
            f"disk_path: got {config.disk_path!r} for {ranks} ranks; expected daemon, since a directory has one owner"
        )
    layout = ExtentLayout(1 << 40, *_copy_bytes(geometry, codec, ranks))
    return own_tiers(geometry, config, layout, lambda cause: None)


def make_device_tier(
    settings: ConnectorSettings, geometry: KVGeometry, codec: BlockCodec | None, ranks: int, copier: Copier
) -> tuple[Tier, ...]:
    """The tier beside vLLM's own memory, where the settings ask for one: before all others."""
    if not settings.device_int4_bytes:
        return ()
    from engine_adapter.vllm_connector.device_tier import DeviceTier, host_limit_bytes
    from kvstore.executor import ThreadExecutor

    full, cold = _copy_bytes(geometry, codec, ranks)
    if settings.device_int4_bytes < (largest := max(full)):
        raise ConfigError(
            f"device_int4_bytes: got {settings.device_int4_bytes}; expected at least the {largest} bytes of one block "
            "of this model, and room for many"
        )
    if copier.is_immediate and settings.device_int4_bytes > (there_bytes := host_limit_bytes()):
        raise ConfigError(
            f"device_int4_bytes: got {settings.device_int4_bytes}; expected less than the {there_bytes} bytes of "
            "memory that this process may have: on a CPU the tier lies there, and all of it is touched"
        )
    executor, prefault = ThreadExecutor("kvstore-vllm-device"), settings.store.host_prefault
    slots = [*full, *cold]
    return (DeviceTier(settings.device_int4_bytes, executor, copier, slot_bytes=slots, prefault=prefault),)


def _copy_bytes(geometry: KVGeometry, codec: BlockCodec | None, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes of a rank's raw and encoded copies, one a cache group; without a codec no encoded ones."""
    from kvstore.device_blocks import cold_slot_bytes

    parts = [min(ranks, group.kv_heads) for group in geometry.groups]
    full = tuple(geometry.full_slot_bytes(group) // part for group, part in enumerate(parts))
    cold = cold_slot_bytes(geometry, codec) if codec is not None else ()
    return full, tuple(size // part for size, part in zip(cold, parts, strict=False))
