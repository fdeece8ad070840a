"""Runs one setting and turns what happened into figures.

`run_setting` builds a store of the setting's memory, serves the workload through it and closes it again; nothing is
carried over from one setting to the next. `SettingReport` holds the figures of `demo-report.json`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.demo.serve import LogitsKeeper, Progress, Sample, Served, Server
from engine_adapter.latency import summarize
from engine_adapter.runner import HFRunner
from kvstore import Identity, KVStore, KVStoreConfig

if TYPE_CHECKING:
    from engine_adapter.demo.settings import Setting
    from engine_adapter.demo.workload import Workload
    from engine_adapter.model_source import LoadedModel

_TIMELINE_POINTS = 160
_DRAIN_SECONDS = 30.0  # for tiers below to take what is left when a setting ends
_REMOTE_LOOKS = 4  # a lookup asks for a stretch at a time
_LOOK_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Timeline:
    """Evenly thinned samples: most tokens and sequences of each stretch of steps, and bytes of its fullest step."""

    seconds: tuple[float, ...]
    resident_tokens: tuple[int, ...]
    full_bytes: tuple[int, ...]
    int4_bytes: tuple[int, ...]
    host_bytes: tuple[int, ...]
    running: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SettingReport:
    """Figures of one setting. Bytes are device bytes of live and idle blocks unless the class says otherwise.

    prefill_tokens_computed: prompt tokens fed to the model, those of resumed sequences included.
    prefill_tokens_recomputed: those among them whose KV a preempted sequence had had before.
    prefill_tokens_reused: by tier, at first admissions and at resumptions.
    stored_tokens_before: prompt tokens that lay in tiers below when the setting began: left by an earlier start.
    waste_fraction: extent remainders and unfilled token slots over bytes of extents in use, averaged over the steps.
    agreement, mean_kl: against the reference run, None where there is none.
    """

    name: str
    dtype: str
    codec: str
    device_bytes_limit: int
    host_bytes_limit: int
    requests: int
    output_tokens: int
    outputs_equal: bool
    prefill_tokens_computed: int
    prefill_tokens_recomputed: int
    prefill_tokens_reused: Mapping[str, int]
    stored_tokens_before: int
    ttft_seconds: Mapping[str, float | None]
    itl_seconds: Mapping[str, float | None]
    queue_seconds: Mapping[str, float | None]
    preemptions: int
    evictions: int
    cooled_blocks: int
    spilled_blocks: int
    fetched_blocks: int
    peak_bytes: Mapping[str, int]
    peak_device_bytes: int
    tokens_resident_peak: int
    waste_fraction: float
    agreement: float | None
    mean_kl: float | None
    max_kl: float | None
    steps: int
    wall_seconds: float
    cpu_seconds: float
    timeline: Timeline = field(repr=False)

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput over the whole workload, prefill included."""
        return self.output_tokens / self.wall_seconds if self.wall_seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "output_tokens_per_second": self.output_tokens_per_second}


@dataclass(frozen=True, slots=True)
class SettingRun:
    """A setting's figures, and the outputs that others are compared with."""

    report: SettingReport
    outputs: Mapping[str, tuple[int, ...]]
    argmaxes: Mapping[str, tuple[int, ...]]


def run_setting(
    setting: Setting,
    loaded: LoadedModel,
    runner: HFRunner,
    workload: Workload,
    *,
    step_tokens: int,
    forced: Mapping[str, Sequence[int]] | None = None,
    keep_logits: LogitsKeeper | None = None,
    on_step: Callable[[Progress], None] | None = None,
) -> SettingRun:
    """Serve `workload` with the memory of `setting`. Raises ServeError when a request fails."""
    below = setting.below
    extra = (f"demo {setting.name}",) if below.given else ()  # so that no setting reuses what another stored
    identity = Identity(model=loaded.name, weights=loaded.weights, geometry=runner.geometry, extra=extra)
    step_blocks = step_tokens // runner.geometry.block_tokens  # movement keeps pace with what a step computes
    config = KVStoreConfig(
        device_bytes=setting.device_bytes,
        host_bytes=setting.host_bytes,
        codec=setting.codec,
        cool_blocks_per_step=step_blocks,
        spill_blocks_per_step=step_blocks,
        disk_path=below.disk_path,
        redis_url=below.redis_url,
        spill_policy="everything" if below.given else "reuse",
        share=below.given,
    )
    with KVStore(runner.geometry, identity, config) as store:
        if store.slab is None:
            raise RuntimeError("the store has no slab; the demo computes on one")
        stored_before = _stored_tokens(store, workload) if below.given else 0
        runner.attach(store.slab, store.cold_codec)
        loop = DecodeLoop(runner, store, max_batch_sequences=workload.users, step_tokens=step_tokens)
        loop.least_first = setting.least_first
        server = Server(loop, store, forced=forced, keep_logits=keep_logits, on_step=on_step, exact=setting.exact)
        served = server.run(workload)
        store.check_invariants()
        report = _report(setting, store, loop, served, stored_before)
        store.close(_DRAIN_SECONDS)
    argmaxes = {name: result.argmax_token_ids for name, result in served.results.items()}
    return SettingRun(report, served.outputs, argmaxes)


def _stored_tokens(store: KVStore, workload: Workload) -> int:
    """Tokens of the first prompts that an earlier start left below. A remote tier is asked, and answers soon after."""
    prompts = [store.prepare(session.first_prompt) for session in workload.sessions]
    found = [store.lookup(prompt).tokens for prompt in prompts]
    if any(tier.name == "remote" for tier in store.tiers):
        for _ in range(_REMOTE_LOOKS):
            time.sleep(_LOOK_SECONDS)
            found = [store.lookup(prompt).tokens for prompt in prompts]
    return sum(found)


def _report(
    setting: Setting, store: KVStore, loop: DecodeLoop, served: Served, stored_tokens_before: int
) -> SettingReport:
    results = list(served.results.values())
    samples = served.samples
    latency = loop.latency.snapshot()
    reused: dict[str, int] = {"device": 0, "host": 0} | {tier.name: 0 for tier in store.tiers}
    for result in results:
        for found in (result.reused_tokens, result.resumed_tokens):
            for tier, tokens in found.items():
                reused[tier] = reused.get(tier, 0) + tokens
    metrics = store.metrics
    return SettingReport(
        name=setting.name,
        dtype=setting.dtype,
        codec=setting.codec,
        device_bytes_limit=setting.device_bytes,
        host_bytes_limit=setting.host_bytes,
        requests=len(results),
        output_tokens=sum(len(result.token_ids) for result in results),
        outputs_equal=False,
        prefill_tokens_computed=sum(result.computed_prefill_tokens for result in results),
        prefill_tokens_recomputed=sum(result.recomputed_tokens for result in results),
        prefill_tokens_reused=reused,
        stored_tokens_before=stored_tokens_before,
        ttft_seconds=_percentiles(latency["ttft_seconds"]),
        itl_seconds=_percentiles(latency["itl_seconds"]),
        queue_seconds=_percentiles(summarize(r.queue_seconds for r in results if r.queue_seconds is not None)),
        preemptions=sum(result.preemptions for result in results),
        evictions=store.pool.evicted_count,
        cooled_blocks=int(metrics.get("cooled_blocks")),
        spilled_blocks=int(metrics.get("spilled_blocks")),
        fetched_blocks=int(metrics.get("fetched_blocks")),
        peak_bytes={
            "full": max(sample.bytes_by_form["full"] for sample in samples),
            "int4": max(sample.bytes_by_form["int4"] for sample in samples),
            "host": max(sample.host_bytes for sample in samples),
        },
        peak_device_bytes=max(sample.device_bytes for sample in samples),
        tokens_resident_peak=max(sample.resident_tokens for sample in samples),
        waste_fraction=mean_waste(samples),
        agreement=None,
        mean_kl=None,
        max_kl=None,
        steps=len(samples),
        wall_seconds=served.wall_seconds,
        cpu_seconds=served.cpu_seconds,
        timeline=thinned(samples),
    )


def compared(
    run: SettingRun,
    *,
    outputs_equal: bool,
    agreement: float | None,
    mean_kl: float | None = None,
    max_kl: float | None = None,
) -> SettingReport:
    """The report of a run with what a comparison found."""
    return replace(run.report, outputs_equal=outputs_equal, agreement=agreement, mean_kl=mean_kl, max_kl=max_kl)


def mean_waste(samples: Sequence[Sample]) -> float:
    """Waste averaged over the steps at which the device held anything."""
    fractions = [sample.waste_bytes / sample.extent_bytes for sample in samples if sample.extent_bytes]
    return sum(fractions) / len(fractions) if fractions else 0.0


def thinned(samples: Sequence[Sample], points: int = _TIMELINE_POINTS) -> Timeline:
    """At most `points` points, made so that no peak is lost and that bytes of one point were there together."""
    width = max(1, -(-len(samples) // points))
    stretches = [samples[start : start + width] for start in range(0, len(samples), width)]

    fullest = [max(stretch, key=lambda sample: sample.device_bytes) for stretch in stretches]

    def largest(value: Callable[[Sample], int]) -> tuple[int, ...]:
        return tuple(max(value(sample) for sample in stretch) for stretch in stretches)

    return Timeline(
        seconds=tuple(round(stretch[-1].seconds, 3) for stretch in stretches),
        resident_tokens=largest(lambda sample: sample.resident_tokens),
        full_bytes=tuple(sample.bytes_by_form["full"] for sample in fullest),
        int4_bytes=tuple(sample.bytes_by_form["int4"] for sample in fullest),
        host_bytes=tuple(sample.host_bytes for sample in fullest),
        running=largest(lambda sample: sample.running),
    )


def _percentiles(summary: Mapping[str, float | int | None]) -> dict[str, float | None]:
    return {name: summary[name] for name in ("p50", "p95")}
