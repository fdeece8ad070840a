"""How full a store is: a snapshot for callers, and the gauges of its metrics.

Reads only; under the store's lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allocator import COLD, FULL

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Items

    from allocator import BlockPool, KVGeometry
    from kvstore.metrics import StoreMetrics
    from kvstore.sequence import Sequence
    from kvstore.tier import Tier
    from kvstore.upkeep import Upkeep

_FORM_NAMES = {FULL: "full", COLD: "int4"}


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """A snapshot of the slab. All bytes are device bytes; a shared block counts once.

    bytes_by_class: bytes of live and idle blocks, "group:form" -> bytes.
    extent_bytes: extents in use by any class. waste_bytes: extent remainders and unfilled token slots of live blocks.
    resident_tokens: tokens whose KV is on the device, idle blocks included, counted in the widest group.
    """

    bytes_by_class: Mapping[str, int]
    extent_bytes: int
    used_bytes: int
    waste_bytes: int
    resident_tokens: int
    live_sequences: int

    @property
    def waste_fraction(self) -> float:
        return self.waste_bytes / self.extent_bytes if self.extent_bytes else 0.0


def measure(geometry: KVGeometry, pool: BlockPool, sequences: Items[Sequence]) -> StoreUsage:
    """What is where now."""
    counts = pool.usage()
    block_tokens = geometry.block_tokens
    blocks = [0] * len(geometry.groups)
    by_class: dict[str, int] = {}
    for row in counts.classes:
        blocks[row.group] += row.live_blocks + row.idle_blocks
        if row.slots:
            name = f"{geometry.groups[row.group].name}:{_FORM_NAMES[row.form]}"
            by_class[name] = by_class.get(name, 0) + row.used_bytes
    widest = max(range(len(blocks)), key=blocks.__getitem__)
    unfilled: dict[int, int] = {}  # bytes by block id, so that a shared tail counts once
    unfilled_tokens = 0
    for sequence in sequences:
        for table in sequence.tables:
            spare = table.capacity_tokens - table.token_count
            last = int(table.ids()[-1]) if spare else -1
            if spare and last not in unfilled:
                unfilled[last] = spare * geometry.group_token_bytes(table.group)
                unfilled_tokens += spare if table.group == widest else 0
    return StoreUsage(
        bytes_by_class=by_class,
        extent_bytes=counts.in_use_bytes,
        used_bytes=counts.used_bytes,
        waste_bytes=counts.remainder_bytes + sum(unfilled.values()),
        resident_tokens=blocks[widest] * block_tokens - unfilled_tokens,
        live_sequences=len(sequences),
    )


def state_gauges(metrics: StoreMetrics, usage: StoreUsage, upkeep: Upkeep, tiers: Items[Tier]) -> None:
    """Set every gauge of a store to what holds now, and what tiers count themselves."""
    for name, class_bytes in usage.bytes_by_class.items():
        metrics.set("class_bytes", class_bytes, **{"class": name})
    for name, blocks in {**upkeep.mover.depths(), **upkeep.writes.depths()}.items():
        metrics.set("queue_depth", blocks, queue=name)
    metrics.set("staged_bytes", upkeep.writes.staged_bytes)
    for tier in tiers:
        metrics.set("tier_used_bytes", tier.used_bytes, tier=tier.name)
        metrics.set("tier_capacity_bytes", tier.capacity_bytes, tier=tier.name)
        metrics.set("orphaned_copies", tier.orphan_count, tier=tier.name)
        metrics.raise_to("evicted_blocks", tier.counters().get("evicted", 0), tier=tier.name, cause="room")
    metrics.set("resident_tokens", usage.resident_tokens)
    metrics.set("waste_fraction", usage.waste_fraction)
    metrics.set("sequences", usage.live_sequences)
