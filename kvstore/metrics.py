"""Counters and gauges of one store, as plain numbers and for Prometheus.

Each store has a CollectorRegistry of its own, so that several stores in a process do not mix. Counting costs a lock and
an addition; names and labels are checked against the table below, so that a misspelt cause is an error and not a new
series. Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from allocator.errors import UsageError

PREFIX = "kvstore_"


class _Series(NamedTuple):
    kind: str
    help: str
    labels: tuple[str, ...] = ()


_SERIES = {
    # per request
    "requests": _Series("counter", "Requests whose prompt was counted, once each"),
    "prompt_tokens": _Series("counter", "Prompt tokens of these requests"),
    "hit_tokens": _Series("counter", "Prompt tokens not computed because a tier had them, once a request", ("tier",)),
    "recomputed_tokens": _Series("counter", "Tokens computed although they had been computed before", ("cause",)),
    "reused_tokens": _Series("counter", "Tokens whose KV a sequence took over instead of computing it", ("tier",)),
    "computed_tokens": _Series("counter", "Tokens committed after computing them"),
    "preempted_sequences": _Series("counter", "Sequences preempted"),
    "aborted_sequences": _Series("counter", "Sequences aborted"),
    # per block
    "missed_blocks": _Series("counter", "Copies asked for and not had", ("tier", "cause")),
    "cooled_blocks": _Series("counter", "Blocks re-coded to a cold copy on the device", ("cause",)),
    "kept_raw_blocks": _Series("counter", "Blocks not cooled: error bound, NaN or Inf, failure", ("cause",)),
    "spilled_blocks": _Series("counter", "Copies written to a lower tier", ("tier",)),
    "fetched_blocks": _Series("counter", "Copies read up for a waiting sequence", ("tier",)),
    "promoted_blocks": _Series("counter", "Copies read up and kept without a waiting sequence", ("tier",)),
    "demoted_blocks": _Series("counter", "Copies spilled and dropped above", ("tier",)),
    "evicted_blocks": _Series("counter", "Copies dropped to make room", ("tier", "cause")),
    "offered_blocks": _Series("counter", "Copies offered to a tier, by what became of it", ("tier", "outcome")),
    "dropped_blocks": _Series("counter", "Copies not written: queue full, tier full or failing", ("tier", "cause")),
    "copied_blocks": _Series("counter", "Blocks copied on write"),
    # transfers
    "transfers": _Series("counter", "Transfers ended", ("tier", "kind", "result")),
    "transfer_bytes": _Series("counter", "Bytes moved", ("tier", "kind")),
    "transfer_seconds": _Series("counter", "Time from request to end of copies up, seen by step", ("tier", "kind")),
    "failed_tasks": _Series("counter", "Tasks that raised where tiers copy and blocks cool", ("cause",)),
    # state
    "tier_used_bytes": _Series("gauge", "Bytes in use", ("tier",)),
    "tier_capacity_bytes": _Series("gauge", "Byte budget", ("tier",)),
    "class_bytes": _Series("gauge", "Device bytes of live blocks by class", ("class",)),
    "queue_depth": _Series("gauge", "Blocks waiting or under way", ("queue",)),
    "staged_bytes": _Series("gauge", "Bytes in buffers on their way to slower tiers"),
    "resident_tokens": _Series("gauge", "Tokens whose KV is on the device"),
    "waste_fraction": _Series("gauge", "Extent remainders and unfilled token slots over bytes of extents in use"),
    "sequences": _Series("gauge", "Live sequences"),
    "kernel_path": _Series("gauge", "1: what runs an operation on a device", ("operation", "device", "path")),
    "orphaned_copies": _Series("gauge", "Copies whose parent block has none in that tier", ("tier",)),
}


class StoreMetrics(Collector):
    """See the module. `add` counts, `set` states, `count_request` counts a request's prompt exactly once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._requests: set[str] = set()
        self.before_reading: Callable[[], None] | None = None  # states the gauges; takes its own locks
        self.registry.register(self)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter. UsageError for an unknown name or label, or a negative amount."""
        key = self._key("counter", name, labels)
        if amount < 0:
            raise UsageError(f"metric {name}: got amount {amount}; a counter only rises")
        if amount:
            with self._lock:
                self._values[key] = self._values.get(key, 0) + amount

    def raise_to(self, name: str, total: float, **labels: str) -> None:
        """A counter that somebody else keeps: what it says now, never less than before."""
        key = self._key("counter", name, labels)
        with self._lock:
            self._values[key] = max(total, self._values.get(key, 0))

    def counter(self, name: str, **labels: str) -> Callable[[int], None]:
        """`add` of one series whose name and labels are checked now, once, for a caller in a hurry."""
        key = self._key("counter", name, labels)

        def rise(amount: int) -> None:
            with self._lock:
                self._values[key] = self._values.get(key, 0) + amount

        return rise

    def set(self, name: str, value: float, **labels: str) -> None:
        """State a gauge."""
        key = self._key("gauge", name, labels)
        with self._lock:
            self._values[key] = value

    def restate(self, name: str, rows: Sequence[tuple[Mapping[str, str], float]]) -> None:
        """State all of a gauge: series that are not among `rows` are gone."""
        stated = {self._key("gauge", name, labels): float(value) for labels, value in rows}
        with self._lock:
            for key in [key for key in self._values if key[0] == name and key not in stated]:
                del self._values[key]
            self._values.update(stated)

    def get(self, name: str, **labels: str) -> float:
        """A value, 0 where nothing was counted. Without labels: the sum over them."""
        series = self._series(name)
        with self._lock:
            if series.labels and not labels:
                return sum(value for (one, _), value in self._values.items() if one == name)
            return self._values.get(self._key(series.kind, name, labels), 0)

    def count_request(self, request_id: str, prompt_tokens: int, hit_tokens: Mapping[str, int]) -> bool:
        """Count a request's prompt and its hits by tier, once until forget_request; later calls return False.

        Call it when the hits are final (the fetch is over), however often the prompt was looked up before. UsageError
        when hits exceed the prompt: the hit ratio can then never exceed 1.
        """
        hits = sum(hit_tokens.values())
        if hits > prompt_tokens or min(hit_tokens.values(), default=0) < 0:
            raise UsageError(f"request {request_id!r}: {dict(hit_tokens)} hit tokens of {prompt_tokens} prompt tokens")
        with self._lock:
            if request_id in self._requests:
                return False
            self._requests.add(request_id)
        self.add("requests")
        self.add("prompt_tokens", prompt_tokens)
        for tier, tokens in hit_tokens.items():
            self.add("hit_tokens", tokens, tier=tier)
        return True

    def forget_request(self, request_id: str) -> None:
        """The request has ended; its id may come again. A preempted request has not ended."""
        with self._lock:
            self._requests.discard(request_id)

    # one method per thing that happens to blocks and sequences ------------------------------------------------------

    def missed(self, cause: str, blocks: int = 1, *, tier: str = "any") -> None:
        self.add("missed_blocks", blocks, tier=tier, cause=cause)

    def cooled(self, blocks: int, *, cause: str = "age") -> None:
        self.add("cooled_blocks", blocks, cause=cause)

    def kept_raw(self, cause: str, blocks: int = 1) -> None:
        self.add("kept_raw_blocks", blocks, cause=cause)

    def copied(self, blocks: int = 1) -> None:
        self.add("copied_blocks", blocks)

    def spilled(self, tier: str, blocks: int) -> None:
        self.add("spilled_blocks", blocks, tier=tier)

    def fetched(self, tier: str, blocks: int) -> None:
        self.add("fetched_blocks", blocks, tier=tier)

    def promoted(self, tier: str, blocks: int) -> None:
        self.add("promoted_blocks", blocks, tier=tier)

    def demoted(self, tier: str, blocks: int) -> None:
        self.add("demoted_blocks", blocks, tier=tier)

    def evicted(self, blocks: int, *, tier: str = "device", cause: str = "room") -> None:
        self.add("evicted_blocks", blocks, tier=tier, cause=cause)

    def dropped(self, cause: str, blocks: int = 1, *, tier: str = "any") -> None:
        self.add("dropped_blocks", blocks, tier=tier, cause=cause)

    def offered(self, outcome: str, blocks: int = 1, *, tier: str) -> None:
        """outcome: admitted, refused (by the tier's policy), coalesced (stored or queued already)."""
        self.add("offered_blocks", blocks, tier=tier, outcome=outcome)

    def computed(self, tokens: int) -> None:
        self.add("computed_tokens", tokens)

    def recomputed(self, tokens: int, *, cause: str) -> None:
        self.add("recomputed_tokens", tokens, cause=cause)

    def reused(self, tokens: int, by_tier: Mapping[str, int] | None = None) -> None:
        """Tokens that a sequence need not compute; by_tier splits them and must add up to them."""
        split = {"any": tokens} if by_tier is None else by_tier
        if sum(split.values()) != tokens:
            raise UsageError(f"reused: {dict(split)} does not add up to {tokens} tokens")
        for tier, count in split.items():
            self.add("reused_tokens", count, tier=tier)

    def transferred(
        self, tier: str, kind: str, results: Sequence[str], byte_count: int, seconds: float | None = None
    ) -> None:
        """One transfer has ended; `result` is "ok" when all of its keys are, else "part" or "none"."""
        good = sum(result == "ok" for result in results)
        result = "none" if not good else "ok" if good == len(results) else "part"
        self.add("transfers", tier=tier, kind=kind, result=result)
        self.add("transfer_bytes", byte_count * good // max(1, len(results)), tier=tier, kind=kind)
        if seconds is not None:
            self.add("transfer_seconds", max(0.0, seconds), tier=tier, kind=kind)

    def preempted(self, sequences: int = 1) -> None:
        self.add("preempted_sequences", sequences)

    def aborted(self, sequences: int = 1) -> None:
        self.add("aborted_sequences", sequences)

    @property
    def hit_ratio(self) -> float:
        """Hit tokens over prompt tokens, in [0, 1]; 0 before the first request."""
        prompt = self.get("prompt_tokens")
        return self.get("hit_tokens") / prompt if prompt else 0.0

    def snapshot(self) -> dict[str, float]:
        """Every value counted so far, by its name in Prometheus without the prefix."""
        if self.before_reading is not None:
            self.before_reading()
        with self._lock:
            values = dict(self._values)
        return {_text(name, labels): value for (name, labels), value in sorted(values.items())}

    def prometheus_text(self) -> str:
        """The exposition format, for a scrape."""
        return generate_latest(self.registry).decode("utf-8")

    def collect(self) -> Iterator[Metric]:
        if self.before_reading is not None:
            self.before_reading()
        with self._lock:
            values = dict(self._values)
        for name, series in _SERIES.items():
            family: CounterMetricFamily | GaugeMetricFamily
            if series.kind == "counter":
                family = CounterMetricFamily(PREFIX + name, series.help, labels=series.labels)
            else:
                family = GaugeMetricFamily(PREFIX + name, series.help, labels=series.labels)
            if not series.labels:
                family.add_metric([], values.get((name, ()), 0))
            for (one, labels), value in values.items():
                if one == name and series.labels:
                    family.add_metric(labels, value)
            yield family

    def _series(self, name: str) -> _Series:
        series = _SERIES.get(name)
        if series is None:
            raise UsageError(f"metric: got {name!r}; expected one of {', '.join(_SERIES)}")
        return series

    def _key(self, kind: str, name: str, labels: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
        series = self._series(name)
        if series.kind != kind:
            raise UsageError(f"metric {name}: is a {series.kind}, used as a {kind}")
        if len(labels) != len(series.labels):
            raise UsageError(f"metric {name}: got labels {sorted(labels)}; expected {list(series.labels)}")
        try:
            return name, tuple([labels[label] for label in series.labels])
        except KeyError:
            raise UsageError(f"metric {name}: got labels {sorted(labels)}; expected {list(series.labels)}") from None


def _text(name: str, labels: tuple[str, ...]) -> str:
    series = _SERIES[name]
    total = "_total" if series.kind == "counter" else ""
    inside = ",".join(f'{label}="{value}"' for label, value in zip(series.labels, labels, strict=True))
    return f"{name}{total}{{{inside}}}" if inside else name + total
