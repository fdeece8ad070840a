"""A daemon's statistics as Prometheus series. docs/how-to/daemon.md says what each means.

Counters end in _total and never go back, whatever happens to what they are summed from; everything in one answer is of
one moment, so hits are never more than what was asked for. Labels have bounded values. Every known cause has its series
from the start, at 0: a rate does not see the first rise of a new one. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.daemon.protocol import Cause
from kvstore.daemon.settings import OWN_DOMAIN
from kvstore.daemon.tally import MISS_CAUSES, OTHERS
from kvstore.daemon.troubles import DAMAGE_CAUSES
from kvstore.frame.parsing import FrameFault
from kvstore.tier import ResultCode

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_VALUES = 200  # of a label that clients can name

_SLOWED = ("throttled", "accepts_delayed")
_REFUSED = (*(cause.name.lower() for cause in Cause), *_SLOWED)
_OUTCOMES = (
    *("spilled", "spills_dropped", "spills_failed", "spills_down", "spills_there"),
    *("fetched", "fetches_without_room", "failed_TierError"),
    *(f"fetch_{code}" for code in ResultCode if code is not ResultCode.OK),
    "spills_corrupt",
)

_Row = tuple[tuple[str, ...], float]


class _Series(NamedTuple):
    kind: str
    help: str
    labels: tuple[str, ...] = ()


SERIES = {
    "lookups": _Series("counter", "Lookups of prompts, once a request", ("domain",)),
    "lookup_blocks": _Series("counter", "Blocks that were looked up: hits and misses", ("domain",)),
    "lookup_hit_blocks": _Series("counter", "Blocks that a tier had", ("tier", "domain")),
    "lookup_missed_blocks": _Series("counter", "Blocks that no tier had, by why it ended there", ("cause", "domain")),
    "reused_tokens": _Series("counter", "Tokens of hits that clients took over", ("domain",)),
    "saved_prefill_seconds": _Series("counter", "Time that computing them would have taken, as told", ("domain",)),
    "client_bytes": _Series("counter", "Bytes that clients stored and read in shared memory", ("kind", "domain")),
    "tier_bytes": _Series("counter", "Bytes moved between shared memory and a lower tier", ("tier", "kind")),
    "tier_copies": _Series("counter", "Copies on their way down or up, by what became of them", ("tier", "outcome")),
    "tier_damaged_copies": _Series("counter", "Copies that a lower tier did not give back whole", ("tier", "cause")),
    "evicted_blocks": _Series("counter", "Copies evicted from shared memory", ("domain",)),
    "segments_recalled": _Series("counter", "Segments that one client had to give up for another", ("domain",)),
    "refused": _Series("counter", "Requests and connections refused or slowed", ("cause",)),
    "corrupt_blocks": _Series("counter", "Copies in shared memory with wrong bytes; served to nobody", ("cause",)),
    "tenant_blocks": _Series("counter", "Blocks of lookups and reads", ("tenant", "kind")),
    "tier_up": _Series("gauge", "1: usable; 0: down or dropped", ("tier",)),
    "tier_used_bytes": _Series("gauge", "Bytes in use", ("tier",)),
    "tier_capacity_bytes": _Series("gauge", "Byte budget; 0: no limit of our own", ("tier",)),
    "tier_queued_bytes": _Series("gauge", "Bytes that wait to be written down", ("tier",)),
    "tier_queue_depth": _Series("gauge", "Copies that wait or are under way", ("tier", "queue")),
    "tier_index_dropped": _Series("gauge", "1: it began anew, empty, at this start, and why", ("tier", "cause")),
    "class_used_bytes": _Series("gauge", "Shared memory in use by codec", ("codec",)),
    "reserved_bytes": _Series("gauge", "Shared memory reserved from the system"),
    "tenant_used_bytes": _Series("gauge", "Shared memory in use", ("tenant",)),
    "tenant_quota_bytes": _Series("gauge", "Quota; 0: none", ("tenant",)),
    "clients": _Series("gauge", "Connections"),
    "leases": _Series("gauge", "Leases held; pins of operators too", ("kind",)),
    "pin_copies": _Series("gauge", "Copies that an operator's pin holds", ("pin",)),
    "pin_bytes": _Series("gauge", "Bytes of these in shared memory", ("pin",)),
    "pin_seconds_left": _Series("gauge", "Time until it ends", ("pin",)),
    "quarantined_slots": _Series("gauge", "Slots whose writer neither finished nor died"),
    "handover_copies": _Series("gauge", "Copies of the daemon before, by what became of them", ("outcome",)),
    "handover_bytes": _Series("gauge", "Bytes of those that were taken over"),
    "handover_refused": _Series("gauge", "1: all of it was dropped, and why", ("cause",)),
    "ready": _Series("gauge", "1: clients can connect and store"),
    "start_time_seconds": _Series("gauge", "When this daemon started, in Unix time"),
}  # fmt: skip


class DaemonMetrics(Collector):
    """See the module. stats: gives Daemon.stats()."""

    def __init__(self, stats: Callable[[], dict[str, Any]]) -> None:
        self._stats = stats
        self._lock = threading.Lock()
        self._highest: dict[tuple[str, tuple[str, ...]], float] = {}
        self._names: dict[str, None] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        return []  # so that registering it reads nothing

    def collect(self) -> Iterator[Metric]:
        with self._lock:  # one scrape after the other: what is read later is never published before
            rows = self._rows(self._stats())
        for name, series in SERIES.items():
            kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
            family = kind(f"kvstore_{name}", series.help, labels=series.labels)
            for labels, value in rows[name]:
                family.add_metric(labels, value)
            yield family

    def _rows(self, stats: dict[str, Any]) -> dict[str, list[_Row]]:
        rows = (
            _lookups(stats["lookups"], dict.fromkeys(stats["tiers"], 0))
            | _tiers(stats["tiers"])
            | _arenas(stats["arenas"])
        )
        rows |= self._tenants(stats["tenants"]) | _state(stats)
        for name, series in SERIES.items():
            if series.kind == "counter":
                rows[name] = [(labels, self._risen(name, labels, value)) for labels, value in rows[name]]
        return rows

    def _risen(self, name: str, labels: tuple[str, ...], value: float) -> float:
        highest = self._highest[name, labels] = max(value, self._highest.get((name, labels), 0))
        return highest

    def _tenants(self, tenants: dict[str, Any]) -> dict[str, list[_Row]]:
        """The first tenants keep series of their own; those that come after the limit share one."""
        used: dict[str, float] = {}
        quotas: dict[str, float] = {}
        blocks: dict[tuple[str, str], float] = {}
        for tenant, one in tenants.items():
            if tenant not in self._names and len(self._names) < _MOST_VALUES:
                self._names[tenant] = None
            name = tenant if tenant in self._names else OTHERS
            used[name] = used.get(name, 0) + one["used_bytes"]
            quotas[name] = one["quota_bytes"] if name == tenant else 0
            for kind in ("hit_blocks", "missed_blocks", "read_blocks", "quota_refused"):
                label = kind.removesuffix("_blocks")
                blocks[name, label] = blocks.get((name, label), 0) + one["counts"].get(kind, 0)
        return {
            "tenant_used_bytes": [((name,), value) for name, value in used.items()],
            "tenant_quota_bytes": [((name,), value) for name, value in quotas.items()],
            "tenant_blocks": list(blocks.items()),
        }


def _lookups(found: dict[str, Any], no_hits: dict[str, int]) -> dict[str, list[_Row]]:
    """By trust domain: what clients of one say must not move the figures of another."""
    rows: dict[str, list[_Row]] = {}
    for domain, one in found["domains"].items():
        for name, labels, value in (
            ("lookups", (), one["lookups"]),
            ("lookup_blocks", (), one["asked_blocks"]),
            *(("lookup_hit_blocks", (tier,), blocks) for tier, blocks in (no_hits | one["hit_blocks"]).items()),
            *(("lookup_missed_blocks", (cause,), one["missed_blocks"].get(cause, 0)) for cause in MISS_CAUSES),
            ("reused_tokens", (), one["reused_tokens"]),
            ("saved_prefill_seconds", (), one["saved_prefill_seconds"]),
            *(("client_bytes", (kind,), one[f"{kind}_bytes"]) for kind in ("stored", "read")),
        ):
            rows.setdefault(name, []).append(((*labels, domain), value))
    return rows


def _tiers(tiers: dict[str, Any]) -> dict[str, list[_Row]]:
    lowers = {name: one for name, one in tiers.items() if "counts" in one}
    outcomes = {name: _outcomes(one["counts"]) for name, one in lowers.items()}
    damaged = {
        name: dict.fromkeys(DAMAGE_CAUSES.get(name, ()), 0) | one["damaged_copies"] for name, one in lowers.items()
    }
    return {
        "tier_up": [((name,), float(one["state"] == "ok")) for name, one in tiers.items()],
        "tier_used_bytes": [((name,), one["used_bytes"]) for name, one in tiers.items()],
        "tier_capacity_bytes": [((name,), one["capacity_bytes"]) for name, one in tiers.items()],
        "tier_queued_bytes": [((name,), one["queued_bytes"]) for name, one in lowers.items()],
        "tier_queue_depth": [
            ((name, queue), depth) for name, one in lowers.items() for queue, depth in one["queues"].items()
        ],
        "tier_bytes": [
            ((name, kind), one["counts"].get(f"{kind}_bytes", 0))
            for name, one in lowers.items()
            for kind in ("spilled", "fetched")
        ],
        "tier_copies": [((name, cause), count) for name, counts in outcomes.items() for cause, count in counts.items()],
        "tier_damaged_copies": [
            ((name, cause), count) for name, counts in damaged.items() for cause, count in counts.items()
        ],
        "tier_index_dropped": [((name, cause), 1.0) for name, one in lowers.items() for cause in one["index_dropped"]],
    }


def _outcomes(counts: dict[str, int]) -> dict[str, int]:
    """What was found wrong on the way down was wrong in shared memory: by cause it is in corrupt_blocks."""
    found = dict.fromkeys(_OUTCOMES, 0)
    for name, count in counts.items():
        outcome = "spills_corrupt" if name.startswith("corrupt_") else name
        if not name.endswith("_bytes"):
            found[outcome] = found.get(outcome, 0) + count
    return found


def _arenas(arenas: dict[str, Any]) -> dict[str, list[_Row]]:
    codecs: dict[str, float] = {}
    counts = {OWN_DOMAIN: {}} | {name: one["counts"] for name, one in arenas.items()}
    for one in arenas.values():
        for codec, size in one["codec_bytes"].items():
            name = codec if codec in codecs or len(codecs) < _MOST_VALUES else OTHERS
            codecs[name] = codecs.get(name, 0) + size
    return {
        "class_used_bytes": [((codec,), size) for codec, size in codecs.items()],
        "evicted_blocks": [((name,), one.get("evicted", 0)) for name, one in counts.items()],
        "segments_recalled": [((name,), one.get("segments_recalled", 0)) for name, one in counts.items()],
    }


def _state(stats: dict[str, Any]) -> dict[str, list[_Row]]:
    counts, leases = stats["counts"], stats["leases"]
    refused = {
        cause.removeprefix("refused_"): count
        for cause, count in counts.items()
        if cause.startswith("refused_") or cause in _SLOWED
    }
    corrupt = dict.fromkeys(map(str, FrameFault), 0)
    lowers = [one["counts"] for one in stats["tiers"].values() if "counts" in one]  # seen on the way down
    for some in (counts, *lowers):
        for cause, count in some.items():
            if cause.startswith("corrupt_"):
                corrupt[cause.removeprefix("corrupt_")] += count
    held = {"read": "read_copies", "write": "write_slots", "pin": "pinned_copies"}
    return {
        "refused": [((cause,), count) for cause, count in (dict.fromkeys(_REFUSED, 0) | refused).items()],
        "corrupt_blocks": [((cause,), count) for cause, count in corrupt.items()],
        **_pins(stats["pins"]),
        "reserved_bytes": [((), stats["budget"]["reserved_bytes"])],
        **_handover(stats["handover"]),
        "clients": [((), stats["connections"])],
        "leases": [((kind,), leases[name]) for kind, name in held.items()],
        "quarantined_slots": [((), leases["quarantined_slots"])],
        "ready": [((), float(stats["ready"]))],
        "start_time_seconds": [((), stats["time_seconds"] - stats["uptime_seconds"])],
    }  # fmt: skip


def _pins(pins: list[dict[str, Any]]) -> dict[str, list[_Row]]:
    return {
        f"pin_{name}": [((one["name"],), float(one[value])) for one in pins]
        for name, value in (("copies", "copies"), ("bytes", "pinned_bytes"), ("seconds_left", "seconds_left"))
    }


def _handover(report: dict[str, Any] | None) -> dict[str, list[_Row]]:
    if report is None:  # nobody keeps anything
        return {"handover_copies": [], "handover_bytes": [], "handover_refused": []}
    lost = report["dropped"] | {"unkept": report["unkept"]}
    return {
        "handover_copies": [(("taken_over",), report["copies"]), *(((cause,), n) for cause, n in lost.items())],
        "handover_bytes": [((), report["copy_bytes"])],
        "handover_refused": [((report["refused"],), 1.0)] if report["refused"] else [],
    }
