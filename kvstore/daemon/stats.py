"""What the daemon says of itself: one snapshot of plain values, for pages, metrics and tests. Any thread."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvstore.daemon.settings import OWN_DOMAIN
from kvstore.daemon.tally import shown_tenant
from kvstore.daemon.troubles import damaged_copies, index_dropped, refused

if TYPE_CHECKING:
    from kvstore.daemon.arena import ArenaIndex
    from kvstore.daemon.core import Core
    from kvstore.daemon.holder import Holder
    from kvstore.daemon.session import Session


_NO_LIMIT_BYTES = 1 << 62


def snapshot(core: Core, sessions: Sequence[Session]) -> dict[str, Any]:
    """epoch (the own domain's), tiers, arenas, tenants, lookups, prefixes, clients, leases, handover, counts,
    refused.

    Byte counts end in _bytes.
    """
    with core.lock:
        arenas = {name or OWN_DOMAIN: _arena(arena) for name, arena in core.arenas.items()}
        tenants = _tenants(core)
        holders = list(core.holders.values())
        leases = {
            "read_copies": sum(one.read_count for one in holders),
            "write_slots": sum(len(one.writes) for one in holders),
            "quarantined_slots": sum(lease.is_quarantined for one in holders for lease in one.writes.values()),
            "quarantined_clients": sum(one.is_quarantined for one in holders),
            "pinned_copies": sum(one.pin_count for one in holders),
            **core.book.counts,
        }
        clients = [_client(one, sessions) for one in holders]
        counts = {**core.counts, **core.pool.counts}
        budget = {
            "limit_bytes": core.pool.limit * core.settings.segment_bytes,
            "reserved_bytes": core.pool.made * core.settings.segment_bytes,
            "segment_bytes": core.settings.segment_bytes,
        }
    return {
        "boot": core.boot.hex(),
        "pid": os.getpid(),
        "time_seconds": time.time(),
        "epoch": core.epochs.of("").value,
        "connections": len(sessions),
        "budget": budget,
        "arenas": arenas,
        "tiers": {"host": _host(arenas, budget), **{one.tier.name: _lower(one) for one in core.lowers}},
        "tenants": tenants,
        "lookups": core.tally.snapshot(),
        "prefixes": core.tally.top_prefixes(),
        "clients": clients,
        "leases": leases,
        "handover": None if core.handover is None else core.handover.report(),
        "counts": counts,
        "refused": refused(counts),
    }


def _arena(arena: ArenaIndex) -> dict[str, Any]:
    return {
        "used_bytes": arena.used_bytes,
        "peak_bytes": arena.peak_bytes,
        "held_bytes": arena.held_bytes,
        "copies": arena.copy_count,
        "orphans": arena.orphan_count,
        "segments": len(arena.segments),
        "segments_recalled": sum(one.is_recalled for one in arena.segments.values()),
        "codec_bytes": {name: size for name, size in arena.codec_bytes.items() if size},
        "counts": dict(arena.counts),
    }


def _host(arenas: dict[str, Any], budget: dict[str, int]) -> dict[str, Any]:
    return {
        "state": "ok",
        "used_bytes": sum(one["used_bytes"] for one in arenas.values()),
        "capacity_bytes": budget["limit_bytes"],
        "copies": sum(one["copies"] for one in arenas.values()),
    }


def _lower(lower: Any) -> dict[str, Any]:
    own = lower.tier.counters()
    return {
        "state": lower.state,
        "used_bytes": lower.tier.used_bytes,
        "capacity_bytes": lower.tier.capacity_bytes if lower.tier.capacity_bytes < _NO_LIMIT_BYTES else 0,
        "queues": lower.depths,
        "queued_bytes": lower.queued_bytes,
        "counts": dict(lower.counts),
        "tier_counts": own,
        "damaged_copies": damaged_copies(lower.tier.name, own),
        "index_dropped": index_dropped(own),
    }


def _tenants(core: Core) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {"used_bytes": 0, "quota_bytes": quota, "counts": {}} for name, quota in core.quotas.items()
    }
    for arena in core.arenas.values():
        for name, tenant in arena.tenants.items():
            name = shown_tenant(name, arena.domain)
            one = found.setdefault(name, {"used_bytes": 0, "quota_bytes": tenant.quota_bytes, "counts": {}})
            one["used_bytes"] += tenant.used_bytes
            for cause, amount in tenant.counts.items():
                one["counts"][cause] = one["counts"].get(cause, 0) + amount
    for name, counts in core.tally.tenants().items():
        found.setdefault(name, {"used_bytes": 0, "quota_bytes": 0, "counts": {}})
        found[name]["counts"] |= counts
    return found


def _client(holder: Holder, sessions: Sequence[Session]) -> dict[str, Any]:
    session = next((one for one in sessions if one.holder is holder), None)
    return {
        "name": holder.name,
        "uid": holder.uid,
        "pid": holder.pid,
        "requests": 0 if session is None else session.request_count,
        "refused": 0 if session is None else session.refused_count,
        "read_copies": holder.read_count,
        "write_slots": len(holder.writes),
        "pinned_copies": holder.pin_count,
        "segments": len(holder.segments),
        "quarantined": holder.is_quarantined,
        "prefill_tokens_per_second": holder.prefill_tokens_per_second,
    }
