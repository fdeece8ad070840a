"""Replaying request traces through the real block pool and policies, to plan capacity before buying it.

    from kvstore.simulation import Setting, generate, read, replay

    trace = read(Path("trace.jsonl"))
    replay(trace, Setting(policy="default", capacity_percent=5)).block_hit_ratio

Pure computation on one thread; imports neither torch nor a tier. `kvstore simulate` is its command line.
"""

from __future__ import annotations

from kvstore.simulation.policies import BOUND, POLICIES
from kvstore.simulation.reading import FORMATS, read
from kvstore.simulation.replay import replay
from kvstore.simulation.setting import CODECS, ROUTINGS, Costs, Row, Setting, TierRow
from kvstore.simulation.trace import Request, Trace, TraceError, build, first_requests
from kvstore.simulation.workloads import WORKLOADS, generate

__all__ = [
    "BOUND",
    "CODECS",
    "FORMATS",
    "POLICIES",
    "ROUTINGS",
    "WORKLOADS",
    "Costs",
    "Request",
    "Row",
    "Setting",
    "TierRow",
    "Trace",
    "TraceError",
    "build",
    "first_requests",
    "generate",
    "read",
    "replay",
]
