"""What `--hicache-storage-backend-extra-config` may say, checked at start, and the tiers that it names.

Settings of KVStoreConfig that concern tiers, and the few here (docs/how-to/sglang.md). The environment (KVSTORE_*)
counts over them, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allocator import ConfigError, ExtentLayout
from engine_adapter.model_source import weights_digest
from kvstore.assembly import own_tiers
from kvstore.config import KVStoreConfig

if TYPE_CHECKING:
    from allocator import KVGeometry
    from engine_adapter.sglang_storage.forms import Rank
    from kvstore.tier import Tier

FACTORY_KEYS = ("backend_name", "module_path", "class_name", "interface_v1", "tp_lcm_size")
OWN_KEYS = ("daemon", "model", "weights", "tenant", "kv_cache_dtype", "staging_bytes")
STORE_KEYS = (
    "disk_path",
    "disk_bytes",
    "disk_sync",
    "redis_url",
    "redis_bytes",
    "redis_ttl_seconds",
    "secret",
    "zstd_level",
    "fetch_deadline_seconds",
    "prefill_tokens_per_second",
)
_WHERE = "hicache-storage-backend-extra-config"


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """store: tiers and deadlines. model, weights: of the identity; "" has them found. tenant: salt of all requests.

    kv_cache_dtype: what the bytes of a uint8 cache are; "" takes SGLang's own word. staging_bytes: most that is on its
    way to or from disk and server. flat: pages come as copies (SGLang without interface_v1), not in place.
    prefill_tokens_per_second: what the operator knows of the engine, which is not asked; 0: nothing.
    """

    store: KVStoreConfig
    model: str = ""
    weights: str = ""
    tenant: str | None = None
    kv_cache_dtype: str = ""
    staging_bytes: int = 256 << 20
    flat: bool = False
    prefill_tokens_per_second: float = 0.0


def read_settings(given: Mapping[str, Any] | None, environ: Mapping[str, str]) -> StorageSettings:
    """ConfigError says which key, what was given and what is expected."""
    given = dict(given or {})
    if given.get("host_bytes"):
        raise ConfigError(f"{_WHERE}: got host_bytes; expected none: host memory is SGLang's own (--hicache-size)")
    if given.pop("codec", "raw") != "raw":
        raise ConfigError(f"{_WHERE}: codec: expected raw: pages are stored byte for byte, in the engine's own layout")
    unknown = sorted(set(given) - {*FACTORY_KEYS, *OWN_KEYS, *STORE_KEYS, "host_bytes"})
    if unknown:
        raise ConfigError(
            f"{_WHERE}: unknown key {unknown[0]!r}; expected one of {', '.join((*OWN_KEYS, *STORE_KEYS))}"
        )
    own = {name: given[name] for name in OWN_KEYS if name in given}
    for name in ("daemon", "model", "weights", "tenant", "kv_cache_dtype"):
        if not isinstance(own.get(name, ""), str):
            raise ConfigError(f"{_WHERE}: {name} is {own[name]!r}; expected text")
    staging = own.get("staging_bytes", 1)
    if isinstance(staging, bool) or not isinstance(staging, int) or staging < 1:
        raise ConfigError(f"{_WHERE}: staging_bytes is {staging!r}; expected an int >= 1")
    named = {name: given[name] for name in STORE_KEYS if name in given}
    store = KVStoreConfig.from_mapping({**named, "codec": "raw"}, source=_WHERE).with_environment(environ)
    store = replace(store, host_bytes=0, daemon_socket=_socket(own.pop("daemon", ""), store.daemon_socket))
    if not (store.disk_path or store.redis_url or store.daemon_socket):
        raise ConfigError(f"{_WHERE}: no tier is named; expected daemon, disk_path or redis_url")
    if store.daemon_socket and (store.disk_path or store.redis_url):
        raise ConfigError(
            f"{_WHERE}: got daemon beside disk_path or redis_url; expected one or the other: the daemon has tiers of "
            "its own"
        )
    is_named = "prefill_tokens_per_second" in named or "KVSTORE_PREFILL_TOKENS_PER_SECOND" in environ
    speed = store.prefill_tokens_per_second if is_named else 0.0
    return StorageSettings(store, flat=not given.get("interface_v1"), prefill_tokens_per_second=speed, **own)


def _socket(given: str, known: str) -> str:
    if given != "default":
        return given or known
    from kvstore.daemon.settings import default_socket_path

    return str(default_socket_path())


def model_weights(settings: StorageSettings, model_path: str, revision: str | None) -> str:
    """Digest or revision of the weights. ConfigError where nobody can name them."""
    if settings.weights:
        return settings.weights
    if model_path and Path(model_path).is_dir():
        try:
            return weights_digest(Path(model_path))
        except FileNotFoundError as error:
            raise ConfigError(f"weights: {error}; or set weights to a digest or revision of them") from error
    if revision is None:
        raise ConfigError(
            f"weights: {model_path!r} is no folder here and has no revision; set weights in {_WHERE} to a digest or "
            "revision of the weights (a served name stays when they change), or give --revision"
        )
    return f"{model_path}@{revision}"


def make_tiers(settings: StorageSettings, geometry: KVGeometry, rank: Rank) -> tuple[Tier, ...]:
    """The tiers that the settings name, fast to slow. A disk directory has one owner: each rank has its own in it."""
    store = settings.store
    if store.disk_path:
        if rank.is_replicated and rank.tp_size > 1:
            raise ConfigError(
                f"disk_path: got {store.disk_path!r} for an MLA model over {rank.tp_size} ranks; expected daemon or "
                "redis_url: rank 0 alone writes what all ranks read, and a directory has one owner"
            )
        store = replace(store, disk_path=str(Path(store.disk_path) / rank.directory))
    sizes = tuple(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    return own_tiers(geometry, store, ExtentLayout(1 << 40, sizes, ()), lambda cause: None)
