"""`demo-report.json`: everything that was measured, and on what.

The five settings are in `settings`; further blocks say what was asked, on which machine, and which promises held.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engine_adapter.demo.parts import MemoryReport, PartReport, all_held
from engine_adapter.demo.promises import HELPED, QUICK, second_start_promise, unchecked

if TYPE_CHECKING:
    from engine_adapter.demo.promises import Promise
    from engine_adapter.demo.settings import Options, Sizes
    from engine_adapter.model_source import LoadedModel

REPORT_VERSION = 1


def report_document(
    *,
    options: Options,
    sizes: Sizes,
    loaded: LoadedModel,
    exact: PartReport,
    memory: MemoryReport,
    wall_seconds: float,
    cpu_seconds: float,
) -> dict[str, Any]:
    """The report as plain JSON values."""
    promises = kept_promises(options, exact, memory)
    return {
        "report_version": REPORT_VERSION,
        "passed": all_held(promises),
        "quick": options.quick,
        "settings": [report.to_json() for report in (*exact.settings, *memory.settings)],
        "multi_turn": memory.multi_turn.to_json(),
        "cold_block": {**asdict(memory.cold_block), "share": memory.cold_block.share},
        "promises": [promise.to_json() for promise in promises],
        "unchecked_because": unchecked_because(options),
        "workload": {
            **asdict(sizes),
            "document_tokens_shared": memory.document_tokens,
            "output_tokens_compared": memory.output_tokens_compared,
            "kv_token_bytes": memory.kv_token_bytes,
        },
        "model": {"name": loaded.name, "weights_sha256": loaded.weights},
        "machine": machine(options.threads),
        "wall_seconds": wall_seconds,
        "cpu_seconds": cpu_seconds,
    }


def kept_promises(options: Options, exact: PartReport, memory: MemoryReport) -> list[Promise]:
    """All promises; those that this run cannot judge are not checked."""
    found = [*exact.promises, *memory.promises]
    if options.below.given:
        tight = [one for one in (*exact.settings, *memory.settings) if "tight" in one.name]
        found.append(second_start_promise(tight))
    because = unchecked_because(options)
    return unchecked(found, because) if because else found


def unchecked_because(options: Options) -> str:
    """Why some promises are not checked in this run; '' when all are."""
    if options.quick:
        return QUICK
    return HELPED if options.below.given else ""


def machine(threads: int) -> dict[str, Any]:
    """Where it ran."""
    import torch
    import transformers

    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"
