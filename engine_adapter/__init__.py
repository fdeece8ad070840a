"""Engines on top of the store: adapter interface, decode loop, model runner, latency.

The public names, each loaded when it is first asked for (PEP 562): importing the package imports neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_adapter.adapter import EngineAdapter, LoadEvent, LoadOutcome, Reservation, StoreAdapter
    from engine_adapter.batch import SequenceSlice, StepBatch
    from engine_adapter.decode_loop import DecodeLoop, Runner, StepOutcome
    from engine_adapter.drafter import Drafter, PromptLookupDrafter
    from engine_adapter.latency import LatencyRecorder
    from engine_adapter.request import Completion, FinishReason, Request, RequestResult

_HOMES = {
    "engine_adapter.adapter": ("EngineAdapter", "LoadEvent", "LoadOutcome", "Reservation", "StoreAdapter"),
    "engine_adapter.batch": ("SequenceSlice", "StepBatch"),
    "engine_adapter.decode_loop": ("DecodeLoop", "Runner", "StepOutcome"),
    "engine_adapter.drafter": ("Drafter", "PromptLookupDrafter"),
    "engine_adapter.latency": ("LatencyRecorder",),
    "engine_adapter.request": ("Completion", "FinishReason", "Request", "RequestResult"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Completion",
    "DecodeLoop",
    "Drafter",
    "EngineAdapter",
    "FinishReason",
    "LatencyRecorder",
    "LoadEvent",
    "LoadOutcome",
    "PromptLookupDrafter",
    "Request",
    "RequestResult",
    "Reservation",
    "Runner",
    "SequenceSlice",
    "StepBatch",
    "StepOutcome",
    "StoreAdapter",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
