"""Tokens a second that the loop serves in a tight budget, INT4 beside full precision: the demo's second workload.

The requests, their order, the budgets and the forced outputs are the demo's own (`engine_adapter.demo.parts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.rows import Options, Row, compared, rotated

if TYPE_CHECKING:
    from engine_adapter.demo.measure import SettingRun

ROUNDS_MAX = 3
"""A side serves the whole workload in a round, which takes most of a minute."""
CASE = "tight_int4_vs_tight_tokens_per_second"


@dataclass(frozen=True, slots=True)
class _Serving:
    """The demo's second part, one setting at a time."""

    loaded: Any
    runner: Any
    workload: Any
    sizes: Any

    def run(self, name: str, device_bytes: int, host_bytes: int, codec: str, forced: Any = None) -> SettingRun:
        from engine_adapter.demo.measure import run_setting
        from engine_adapter.demo.settings import Setting

        setting = Setting(name, self.runner.geometry.dtype, device_bytes, host_bytes, codec)
        return run_setting(
            setting, self.loaded, self.runner, self.workload, step_tokens=self.sizes.step_tokens, forced=forced
        )


def rows(options: Options) -> Iterator[Row]:
    """Output tokens over wall time of the whole workload, both settings in turn."""
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
        Sizes,
    )
    from engine_adapter.model_source import SMOLLM2, load_model
    from engine_adapter.runner import HFRunner

    loaded = load_model(SMOLLM2, torch.bfloat16)
    sizes = QUICK if options.quick else Sizes()
    runner = HFRunner(loaded.model, block_tokens=BLOCK_TOKENS)
    try:
        serving = _Serving(loaded, runner, memory_workload(loaded, sizes), sizes)
        ample = serving.run(AMPLE, ample_bytes(runner.geometry, serving.workload), 0, "raw")
        peak = ample.report.peak_device_bytes
        device = max(int(TIGHT_SHARE * peak), least_bytes(runner.geometry, serving.workload))
        reports: dict[str, list[Any]] = {TIGHT: [], TIGHT_INT4: []}

        def served(name: str, codec: str, number: int) -> float:
            report = serving.run(name, device, int(HOST_SHARE * peak), codec, ample.outputs).report
            if number >= 0:
                reports[name].append(report)
            return report.output_tokens_per_second

        rounds = 1 if options.quick else min(ROUNDS_MAX, options.rounds)
        found = rotated(
            {
                TIGHT_INT4: lambda number: served(TIGHT_INT4, "int4", number),
                TIGHT: lambda number: served(TIGHT, "raw", number),
            },
            rounds,
            warm_up=False,
        )
        yield compared(
            "loop",
            CASE,
            "tokens/s",
            found[TIGHT_INT4],
            better="larger",
            baseline="full precision in the same bytes",
            theirs=found[TIGHT],
            note=_note(reports, runner.backend.name, len(ample.outputs)),
        )
    finally:
        runner.release()


def _note(reports: dict[str, list[Any]], backend: str, requests: int) -> str:
    def told(name: str) -> str:
        report = reports[name][-1]
        return (
            f"{name}: {report.prefill_tokens_computed:,} prompt tokens computed in {report.steps} steps, "
            f"{report.preemptions} preemptions"
        )

    return (
        f"{CASE}: the demo's second workload, {requests} requests in a quarter of the memory that they would like; "
        f"output tokens over wall time, prefill included; attention backend {backend}. "
        + "; ".join(told(name) for name in reports)
        + "."
    )
