"""How the parts of a store are put together from geometry, settings and device. Runs once, at construction."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator import LRU, BlockPool, ConfigError, ExtentLayout
from allocator.eviction_learned import learned_together
from kvstore.admission import Admitter
from kvstore.announce import Announcer
from kvstore.arrival import Arrivals
from kvstore.costs import CostModel
from kvstore.device import AbsentDevice
from kvstore.events import EventStream
from kvstore.executor import make_executor
from kvstore.fetching import Fetcher
from kvstore.growth import Growth
from kvstore.leases import Leases
from kvstore.loss_prices import LossPrices
from kvstore.metrics import StoreMetrics
from kvstore.mover import Mover
from kvstore.quotas import Quotas
from kvstore.residency import Residency
from kvstore.retention import Retainer
from kvstore.reuse_notes import ReuseNotes
from kvstore.tier_admission import make_admission
from kvstore.upkeep import Upkeep
from kvstore.write_behind import WriteBehind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Sequence as Items

    from allocator import EvictionPolicy, KVGeometry
    from kvstore.config import KVStoreConfig
    from kvstore.device import BlockBytes
    from kvstore.executor import Executor
    from kvstore.sequence import Sequence
    from kvstore.tier import Tier
    from quant import BlockCodec

_LOG = logging.getLogger(__name__)

COOL_QUEUE_BLOCKS = 1 << 16  # blocks remembered for cooling; beyond it the oldest stays raw and is counted


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store is made of. Only the store calls them, under its lock (executor and tiers have their own)."""

    cold_codec: BlockCodec | None
    pool: BlockPool
    device: BlockBytes
    tiers: tuple[Tier, ...]
    executor: Executor
    costs: CostModel
    metrics: StoreMetrics
    residency: Residency
    admitter: Admitter
    growth: Growth
    upkeep: Upkeep
    leases: Leases
    quotas: Quotas
    retainer: Retainer
    arrivals: Arrivals
    announcer: Announcer

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """For the choice between loading and computing, and for tiers that want to know."""
        self.costs.observe_prefill(tokens, seconds)
        for tier in self.tiers if self.costs.is_telling(tokens, seconds) else ():
            tier.note_prefill_speed(self.costs.prefill_tokens_per_second)


def assemble(
    geometry: KVGeometry,
    config: KVStoreConfig,
    device_name: str,
    tiers: Items[Tier] | None,
    sequences: Mapping[str, Sequence],
    epoch: int,
    waker: Callable[[], None],
    policy: Callable[[int], EvictionPolicy] | None = None,
) -> Parts:
    """Build every part. ConfigError when a group's shape does not fit the codec or the slab is too small.

    policy: instead of the one that the settings name, to compare others.
    """
    _check_parts(geometry, device_name, tiers)
    codec, layout, device = _device(geometry, config, device_name)
    metrics = StoreMetrics()
    announcer = Announcer(EventStream(epoch=epoch), codec.name if codec else None, geometry.block_tokens)
    learns = config.eviction_policy == "learned"
    if policy is None:
        policy = learned_together(layout.group_count, geometry.block_tokens) if learns else LRU
    pool = BlockPool(layout, policy)

    def on_failed(cause: str) -> None:
        metrics.add("failed_tasks", cause=cause)

    if tiers is None:
        tiers = () if device_name == "absent" else own_tiers(geometry, config, layout, on_failed)
        _say_what_is_private(config)
    for tier in tiers:
        tier.set_waker(waker)
    executor = make_executor(config.io_threads, on_failed=on_failed)
    costs = CostModel(prefill_tokens_per_second=config.prefill_tokens_per_second, always_load=config.load_always)
    residency = Residency(geometry, pool, tiers, (codec.name, codec.parameters()) if codec else None)
    admission = make_admission(config.spill_policy, costs)
    writes = WriteBehind(
        pool, device, executor, metrics, tiers, admission, queued_blocks=config.spill_queue_blocks, waker=waker
    )
    fetcher = Fetcher(geometry, pool, device, metrics, costs)
    mover = Mover(
        pool, device, executor, metrics, fetcher, writes=writes, cool_queue_limit=COOL_QUEUE_BLOCKS, waker=waker
    )
    cools = codec is not None
    quotas = Quotas(pool, sequences)
    prices = LossPrices(geometry, pool, residency, costs, tiers, cools=cools)
    reuse = ReuseNotes(pool, geometry.block_tokens, prices, is_learning=learns)
    upkeep = Upkeep(
        geometry, pool, device, residency, mover, writes, tuple(tiers), config, sequences, reuse, cools=cools
    )
    _tell_of_evictions(pool, upkeep, metrics, announcer)
    admitter = Admitter(geometry, pool, residency, mover, costs, metrics, quotas)
    retainer = Retainer(pool, geometry.block_tokens, quotas, upkeep)
    growth = Growth(geometry, pool, device, upkeep, metrics, announcer, retainer, poison=config.debug_poison)
    return Parts(
        cold_codec=codec,
        pool=pool,
        device=device,
        tiers=tuple(tiers),
        executor=executor,
        costs=costs,
        metrics=metrics,
        residency=residency,
        admitter=admitter,
        growth=growth,
        upkeep=upkeep,
        announcer=announcer,
        leases=Leases(pool, config.lease_seconds),
        quotas=quotas,
        retainer=retainer,
        arrivals=Arrivals(geometry, pool, admitter, growth, upkeep, metrics, announcer, sequences),
    )


def _device(
    geometry: KVGeometry, config: KVStoreConfig, device_name: str
) -> tuple[BlockCodec | None, ExtentLayout, BlockBytes]:
    """Codec of cold blocks, places and bytes. Without bytes and codec nothing here needs torch."""
    full_bytes = tuple(geometry.full_slot_bytes(group) for group in range(len(geometry.groups)))
    codec: BlockCodec | None = None
    cold_bytes: tuple[int, ...] = ()
    if config.codec != "raw":
        from kvstore.device_blocks import cold_slot_bytes, make_codec

        codec = make_codec(config.codec, config.error_bound)
        cold_bytes = cold_slot_bytes(geometry, codec) if codec else ()
    layout = ExtentLayout(config.device_bytes, full_bytes, cold_bytes)
    if device_name == "absent":
        return codec, layout, AbsentDevice(layout)
    from kvstore.device_blocks import DeviceBlocks

    try:
        return codec, layout, DeviceBlocks(geometry, layout, codec, device_name)
    except (OSError, MemoryError) as error:
        raise ConfigError(
            f"device_bytes: got {config.device_bytes}, which this machine does not give ({error}); expected less"
        ) from error


def _tell_of_evictions(pool: BlockPool, upkeep: Upkeep, metrics: StoreMetrics, announcer: Announcer) -> None:
    """Whoever keeps something about a device block hears that it goes."""
    count_evicted = metrics.counter("evicted_blocks", tier="device", cause="room")

    def on_evict(group: int, ids: list[int], hashes: list[bytes], computed_exact: list[bool], form: int) -> None:
        upkeep.forget(ids)
        count_evicted(len(ids))
        if announcer.heard:
            announcer.evicted(group, hashes, computed_exact, form)

    pool.on_evict = on_evict


def _check_parts(geometry: KVGeometry, device_name: str, tiers: Items[Tier] | None) -> None:
    for group in geometry.groups:
        if group.lookahead_tokens:
            raise ConfigError(
                f"group {group.name!r}: got lookahead_tokens {group.lookahead_tokens}; expected 0, since blocks are "
                "named before the tokens that such a group depends on are known"
            )
    names = [tier.name for tier in tiers or ()]
    if len(set(names)) < len(names) or "device" in names:
        raise ConfigError(f"tiers: got the names {names}; expected distinct ones, none of them 'device'")
    kept = [tier.name for tier in tiers or () if tier.holds_bytes]
    if kept and device_name == "absent":
        raise ConfigError(f"tiers: got {kept} for device 'absent', which has no bytes; expected none that keep bytes")


def _say_what_is_private(config: KVStoreConfig) -> None:
    lasting = [name for name in ("daemon_socket", "disk_path", "redis_url") if getattr(config, name)]
    if lasting and not config.share:
        meaning = "no later start and nobody else finds what this store leaves there"
        _LOG.warning("%s without share=True: %s", ", ".join(lasting), meaning)


def own_tiers(
    geometry: KVGeometry, config: KVStoreConfig, layout: ExtentLayout, on_failed: Callable[[str], None]
) -> tuple[Tier, ...]:
    """The tiers that the settings name, fast to slow. What was opened is closed again when a later one cannot be."""
    tiers: list[Tier] = []
    try:
        if config.host_bytes:
            from kvstore.host_tier.tier import HostTier

            executor = make_executor(config.io_threads, "kvstore-host", on_failed=on_failed)
            slot_bytes = [size for size in layout.raw_slot_bytes if size]
            tiers.append(HostTier(config.host_bytes, executor, slot_bytes=slot_bytes, prefault=config.host_prefault))
        if config.daemon_socket:
            tiers.append(_daemon_tier(geometry, config, on_failed))
        if config.disk_path:
            from kvstore.disk_tier.index import LEAST_BYTES
            from kvstore.disk_tier.tier import DiskTier
            from kvstore.frame.specs import geometry_specs

            if config.disk_bytes < LEAST_BYTES:
                raise ConfigError(f"disk_bytes: got {config.disk_bytes}; expected at least {LEAST_BYTES}")
            executor = make_executor(config.io_threads, "kvstore-disk", on_failed=on_failed)
            specs, secret = geometry_specs(geometry), config.secret.encode() or None
            place = (config.disk_path, config.disk_bytes, executor)
            disk = DiskTier(*place, sync=config.disk_sync, specs=specs, secret=secret)
            tiers.append(disk)
            if config.zstd_level:
                disk.pack(config.zstd_level)
        if config.redis_url:
            tiers.append(_remote_tier(geometry, config, on_failed))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tuple(tiers)


def _daemon_tier(geometry: KVGeometry, config: KVStoreConfig, on_failed: Callable[[str], None]) -> Tier:
    from kvstore.daemon.client import DaemonTier
    from kvstore.frame.specs import geometry_specs

    deadline = config.fetch_deadline_seconds
    return DaemonTier(
        config.daemon_socket,
        make_executor(config.io_threads, "kvstore-daemon", on_failed=on_failed),
        specs=geometry_specs(geometry),
        timeout_seconds=min(0.25, deadline / 2),
        fetch_seconds=deadline,
    )


def _remote_tier(geometry: KVGeometry, config: KVStoreConfig, on_failed: Callable[[str], None]) -> Tier:
    from kvstore.frame.specs import geometry_specs
    from kvstore.redis_tier.links import LinkOptions
    from kvstore.redis_tier.tier import RedisOptions, RedisTier

    deadline = config.fetch_deadline_seconds
    lookups = make_executor("thread", "kvstore-lookup", on_failed) if config.io_threads == "thread" else None
    links = LinkOptions(timeout_seconds=min(0.5, deadline / 2), connect_timeout_seconds=min(0.25, deadline / 4))
    return RedisTier(
        config.redis_url,
        make_executor(config.io_threads, on_failed=on_failed),
        capacity_bytes=config.redis_bytes,
        ttl_seconds=config.redis_ttl_seconds,
        secret=config.secret.encode() or None,
        spec_of=geometry_specs(geometry),
        options=RedisOptions(
            links=links, lookup_deadline_seconds=deadline, lookup_executor=lookups, zstd_level=config.zstd_level
        ),
    )
