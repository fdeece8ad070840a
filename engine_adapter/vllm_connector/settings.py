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
from kvstore.config import KVStoreConfig

if TYPE_CHECKING:
    from allocator import KVGeometry
    from kvstore.tier import Tier

TESTED = ((0, 32), (0, 33))
"""vLLM releases that this is tested with: from, and below."""
OWN_KEYS = ("daemon", "model", "weights", "tenant", "block_tokens", "staging_bytes")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """store: tiers and deadlines. daemon: its socket, "default" for the usual place, "" for none.

    model, weights: of the identity; "" finds them in the model's folder. tenant: salt of all requests.
    """

    store: KVStoreConfig
    daemon: str = ""
    model: str = ""
    weights: str = ""
    tenant: str | None = None
    block_tokens: int = 16
    staging_bytes: int = 256 << 20


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
    rest.setdefault("codec", "raw")
    unknown = sorted(set(rest) - {one.name for one in fields(KVStoreConfig)})
    if unknown:
        raise ConfigError(
            f"kv_connector_extra_config: unknown key {unknown[0]!r}; expected one of {', '.join(OWN_KEYS)}, or a "
            "setting of the store: host_bytes, disk_path, disk_bytes, redis_url, ..."
        )
    store = KVStoreConfig.from_mapping(rest, source="kv_connector_extra_config").with_environment(environ)
    settings = ConnectorSettings(store, **own)
    if store.codec != "raw":
        raise ConfigError(f"codec: got {store.codec!r}; expected raw, which is what this connector stores")
    local = store.host_bytes or store.disk_path or store.redis_url
    if not local and not settings.daemon:
        raise ConfigError(
            "kv_connector_extra_config: no tier is named; expected host_bytes, disk_path, redis_url or daemon"
        )
    if local and settings.daemon:
        raise ConfigError(
            "kv_connector_extra_config: got daemon beside host_bytes, disk_path or redis_url; expected one or the "
            "other: the daemon has tiers of its own"
        )
    return settings


def check_version(version: str) -> None:
    """ConfigError for a vLLM that this was not tested with."""
    parts = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if not TESTED[0] <= parts < TESTED[1]:
        first, below = (".".join(map(str, one)) for one in TESTED)
        raise ConfigError(f"vLLM {version}: this connector is tested with {first} up to, not including, {below}")


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


def make_tiers(settings: ConnectorSettings, geometry: KVGeometry) -> tuple[Tier, ...]:
    """The tiers that the settings name, fast to slow."""
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

    sizes = tuple(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    layout = ExtentLayout(1 << 40, sizes, ())
    return own_tiers(geometry, config, layout, lambda cause: None)
