"""What the demo promises, checked against what it measured. A promise that fails makes the demo exit with 1.

Pure functions over reports.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from engine_adapter.demo.settings import HOST_SHARE, TIGHT_SHARE

if TYPE_CHECKING:
    from engine_adapter.demo.measure import SettingReport

WASTE_LIMIT = 0.04
COLD_SHARE_LIMIT = 0.30
RESIDENT_RATIO = 2.2
AGREEMENT_FLOOR = 0.95
KL_LIMIT = 0.006
BF16_KL_MOST = 0.002  # of what bf16 alone makes, as much is left out
EQUAL = "equal outputs"
SAME_BYTES = "same bytes"
COLD_BLOCK = "cold block"
SECOND_START = "second start"

QUICK = "a quick run is too small to say"
HELPED = (
    "tight and tight-int4 also read copies from below the host's memory, of this start or of one before, so what they "
    "computed does not say what memory alone does; run without --disk and --redis for that"
)
"""Why a promise is not checked."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One claim. `held` None: this run cannot say, so it was not checked."""

    name: str
    claim: str
    found: str
    held: bool | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class ColdBlock:
    """Bytes of one block of the model, in the KV's own precision and cold."""

    full_bytes: int
    cold_bytes: int

    @property
    def share(self) -> float:
        return self.cold_bytes / self.full_bytes


def exact_promises(ample: SettingReport, tight: SettingReport) -> list[Promise]:
    """Part 1: equal to transformers' generate, under little memory too."""
    equal = [
        Promise(
            f"{report.name}: {EQUAL}",
            "In float32 every output token equals that of transformers' own generate.",
            "equal" if report.outputs_equal else f"agreement {report.agreement:.4f}",
            report.outputs_equal,
        )
        for report in (ample, tight)
    ]
    short = Promise(
        f"{tight.name}: little memory",
        "Blocks were evicted and prompts read again, and the answers are equal all the same.",
        f"{tight.evictions} evictions, {tight.preemptions} preemptions, {tight.prefill_tokens_computed:,} prompt "
        f"tokens computed against {ample.prefill_tokens_computed:,}",
        tight.evictions > 0 and tight.prefill_tokens_computed > ample.prefill_tokens_computed,
    )
    return [*equal, short]


def _under_pressure(report: SettingReport) -> Promise:
    recomputed = report.prefill_tokens_recomputed
    return Promise(
        f"{report.name}: real pressure",
        "Memory is so short that sequences are preempted, blocks are spilled to the host, and some are computed again.",
        f"{report.preemptions} preemptions, {report.spilled_blocks} spilled blocks, {recomputed} tokens recomputed",
        report.preemptions > 0 and report.spilled_blocks > 0 and recomputed > 0,
    )


def memory_promises(ample: SettingReport, tight: SettingReport, int4: SettingReport, cold: ColdBlock) -> list[Promise]:
    """Part 2: the same bytes hold more, and less is computed twice."""
    device_limit, host_limit = TIGHT_SHARE * ample.peak_device_bytes, HOST_SHARE * ample.peak_device_bytes
    within = all(
        report.device_bytes_limit <= device_limit
        and report.peak_device_bytes <= device_limit
        and report.peak_bytes["host"] <= host_limit
        for report in (tight, int4)
    )
    ratio = int4.tokens_resident_peak / tight.tokens_resident_peak
    return [
        Promise(
            SAME_BYTES,
            f"tight and tight-int4 stay within {TIGHT_SHARE:.0%} of ample's peak device bytes, and their host tier "
            f"within {HOST_SHARE:.0%}.",
            f"{tight.peak_device_bytes / ample.peak_device_bytes:.1%} and "
            f"{int4.peak_device_bytes / ample.peak_device_bytes:.1%} of the device bytes; host "
            f"{tight.peak_bytes['host'] / ample.peak_device_bytes:.1%} and "
            f"{int4.peak_bytes['host'] / ample.peak_device_bytes:.1%}",
            within,
        ),
        _under_pressure(tight),
        Promise(
            "resident tokens",
            f"tight-int4 holds at least {RESIDENT_RATIO} times tight's tokens at the peak.",
            f"{int4.tokens_resident_peak:,} / {tight.tokens_resident_peak:,} = {ratio:.2f}",
            ratio >= RESIDENT_RATIO,
        ),
        Promise(
            "less prefill",
            "tight-int4 computes strictly fewer prompt tokens than tight.",
            f"{int4.prefill_tokens_computed:,} against {tight.prefill_tokens_computed:,}",
            int4.prefill_tokens_computed < tight.prefill_tokens_computed,
        ),
        Promise(
            "fewer preemptions",
            "tight-int4 preempts less than tight.",
            f"{int4.preemptions} against {tight.preemptions}",
            int4.preemptions < tight.preemptions,
        ),
        Promise(
            COLD_BLOCK,
            f"A cold block takes at most {COLD_SHARE_LIMIT:.2f} of its bf16 bytes.",
            f"{cold.cold_bytes:,} / {cold.full_bytes:,} = {cold.share:.3f}",
            cold.share <= COLD_SHARE_LIMIT,
        ),
    ]


def second_start_promise(tight: Iterable[SettingReport]) -> Promise:
    """With tiers that outlive the process: what an earlier start left is reused. The first one says nothing."""
    reports = list(tight)
    kept = [report for report in reports if report.stored_tokens_before]
    reused = {report.name: _reused_below(report) for report in reports}
    return Promise(
        SECOND_START,
        "What an earlier start of the demo stored on disk or on a server is reused by this one.",
        ", ".join(f"{name} {count:,} tokens from below" for name, count in reused.items())
        + ("" if kept else "; nothing was stored before"),
        all(reused[report.name] for report in kept) if kept else None,
    )


def _reused_below(report: SettingReport) -> int:
    return sum(count for tier, count in report.prefill_tokens_reused.items() if tier not in ("device", "host"))


def waste_promise(reports: Iterable[SettingReport]) -> Promise:
    wastes = {report.name: report.waste_fraction for report in reports}
    return Promise(
        "waste",
        f"Averaged over the steps, at most {WASTE_LIMIT:.0%} of the device memory in use is wasted, in every setting "
        "and on conversations of several turns alone.",
        ", ".join(f"{name} {waste:.2%}" for name, waste in wastes.items()),
        max(wastes.values()) <= WASTE_LIMIT,
    )


def fidelity_promise(int4: SettingReport, tight: SettingReport) -> Promise:
    """Predictions behind INT4 blocks stay close to ample's: twice the codec's own bar, since hits come on top. What
    bf16 alone makes is not the codec's: it differs between processors, and `tight` shows it.
    """
    noise_kl = min(tight.mean_kl or 0.0, BF16_KL_MOST)
    agreement, mean_kl = int4.agreement or 0.0, int4.mean_kl if int4.mean_kl is not None else float("inf")
    return Promise(
        "fidelity after hits",
        f"With INT4 blocks, mean KL to ample at the tokens after a hit is at most {KL_LIMIT} above that of tight, and "
        f"the first choice agrees at {AGREEMENT_FLOOR:.0%} of them or more.",
        f"mean KL {mean_kl:.4f}, agreement {agreement:.1%} (tight, all in bf16: {tight.mean_kl:.4f}, "
        f"{tight.agreement or 0.0:.1%})",
        mean_kl - noise_kl <= KL_LIMIT and agreement >= AGREEMENT_FLOOR,
    )


def unchecked(promises: Iterable[Promise], because: str) -> list[Promise]:
    """The promises of a run that says nothing about most of them: those are shown, but not checked.

    because: QUICK, where equality and reuse alone are checked; or HELPED, where limits and sizes are too.
    """
    kept = (EQUAL, SECOND_START) if because == QUICK else (EQUAL, SECOND_START, SAME_BYTES, COLD_BLOCK)
    return [
        promise if promise.name.endswith(kept) else Promise(promise.name, promise.claim, promise.found, None)
        for promise in promises
    ]
