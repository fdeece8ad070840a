"""Tokens a second that the loop serves in a tight budget, INT4 beside full precision: the demo's second workload.

The requests, the budgets and the forced outputs are the demo's own (`engine_adapter.demo.parts`). Both settings serve
them in the demo's order of admission, first come first served, and once more with `DecodeLoop.least_first`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Options, Row, compared, rotated

if TYPE_CHECKING:
    from engine_adapter.demo.measure import SettingRun
    from engine_adapter.demo.settings import Setting

ROUNDS_MAX = 3
"""A side serves the whole workload in a round, which takes most of a minute."""
CASE = "tight_int4_vs_tight_tokens_per_second"
CASE_LEAST_FIRST = "tight_int4_vs_tight_least_first_tokens_per_second"


@dataclass(frozen=True, slots=True)
class _Serving:
    """The demo's second part in full precision and INT4, in the same bytes."""

    loaded: Any
    runner: Any
    workload: Any
    step_tokens: int

    def run(self, setting: Setting, forced: Any = None) -> SettingRun:
        from engine_adapter.demo.measure import run_setting

        return run_setting(
            setting, self.loaded, self.runner, self.workload, step_tokens=self.step_tokens, forced=forced
        )

    def row(self, case: str, settings: tuple[Setting, Setting], outputs: Any, rounds: int) -> Row:
        """Output tokens over wall time of the whole workload, both settings in turn; the INT4 one first."""
        reports: dict[str, Any] = {}

        def served(setting: Setting, _: int) -> float:
            report = reports[setting.name] = self.run(setting, outputs).report
            return report.output_tokens_per_second

        found = rotated({one.name: partial(served, one) for one in settings}, rounds, warm_up=False)
        int4, full = (found[one.name] for one in settings)
        return compared(
            "loop",
            case,
            "tokens/s",
            int4,
            better="larger",
            baseline="full precision in the same bytes",
            theirs=full,
            note=_note(case, reports, self.runner.backend.name, len(outputs)),
        )


def rows(options: Options) -> Iterator[Row]:
    """One row an order of admission."""
    import torch

    from engine_adapter.demo.parts import ample_bytes, least_bytes, memory_workload
    from engine_adapter.demo.settings import (
        AMPLE,
        BLOCK_TOKENS,
        HOST_SHARE,
        QUICK,
        TIGHT,
        TIGHT_INT4,
        TIGHT_SHARE,
        Setting,
        Sizes,
    )
    from engine_adapter.model_source import SMOLLM2, load_model
    from engine_adapter.runner import HFRunner

    loaded = load_model(SMOLLM2, torch.bfloat16)
    sizes = QUICK if options.quick else Sizes()
    runner = HFRunner(loaded.model, block_tokens=BLOCK_TOKENS)
    try:
        workload, geometry = memory_workload(loaded, sizes), runner.geometry
        serving = _Serving(loaded, runner, workload, sizes.step_tokens)
        ample = serving.run(Setting(AMPLE, geometry.dtype, ample_bytes(geometry, workload), 0, "raw"))
        peak = ample.report.peak_device_bytes
        device = max(int(TIGHT_SHARE * peak), least_bytes(geometry, workload))
        int4 = Setting(TIGHT_INT4, geometry.dtype, device, int(HOST_SHARE * peak), "int4")
        full = replace(int4, name=TIGHT, codec="raw")
        rounds = 1 if options.quick else min(ROUNDS_MAX, options.rounds)
        yield serving.row(CASE, (int4, full), ample.outputs, rounds)
        least_first = replace(int4, least_first=True), replace(full, least_first=True)
        yield serving.row(CASE_LEAST_FIRST, least_first, ample.outputs, rounds)
    finally:
        runner.release()


def _note(case: str, reports: dict[str, Any], backend: str, requests: int) -> str:
    order = "whoever has least to compute is admitted first" if case == CASE_LEAST_FIRST else "first come, first served"

    def told(name: str) -> str:
        report = reports[name]
        return (
            f"{name}: {report.prefill_tokens_computed:,} prompt tokens computed in {report.steps} steps, "
            f"{report.preemptions} preemptions"
        )

    return (
        f"{case}: the demo's second workload, {requests} requests in a quarter of the memory that they would like, "
        f"{order}; output tokens over wall time, prefill included; attention backend {backend}. "
        + "; ".join(told(name) for name in reports)
        + "."
    )
