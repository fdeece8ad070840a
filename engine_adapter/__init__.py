"""Engines on top of the store: adapter interface, decode loop, model runner, paged attention, latency.

The public names, each loaded when it is first asked for (PEP 562): importing the package imports neither torch nor
transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_adapter.adapter import EngineAdapter, LoadEvent, LoadOutcome, Reservation, StoreAdapter
    from engine_adapter.batch import SequenceSlice, SliceError, StepBatch
    from engine_adapter.decode_loop import DecodeLoop, StepOutcome
    from engine_adapter.drafter import Drafter, PromptLookupDrafter
    from engine_adapter.latency import LatencyRecorder
    from engine_adapter.media import EmbeddedMedia, digest_of
    from engine_adapter.model_geometry import geometry_from_config
    from engine_adapter.model_source import LoadedModel, load_model
    from engine_adapter.paged_cache import PagedCache
    from engine_adapter.request import Completion, FinishReason, Request, RequestResult
    from engine_adapter.runner import HFRunner
    from engine_adapter.runner_contract import Runner

_HOMES = {
    "engine_adapter.adapter": ("EngineAdapter", "LoadEvent", "LoadOutcome", "Reservation", "StoreAdapter"),
    "engine_adapter.batch": ("SequenceSlice", "SliceError", "StepBatch"),
    "engine_adapter.decode_loop": ("DecodeLoop", "StepOutcome"),
    "engine_adapter.drafter": ("Drafter", "PromptLookupDrafter"),
    "engine_adapter.latency": ("LatencyRecorder",),
    "engine_adapter.media": ("EmbeddedMedia", "digest_of"),
    "engine_adapter.model_geometry": ("geometry_from_config",),
    "engine_adapter.model_source": ("LoadedModel", "load_model"),
    "engine_adapter.paged_cache": ("PagedCache",),
    "engine_adapter.request": ("Completion", "FinishReason", "Request", "RequestResult"),
    "engine_adapter.runner": ("HFRunner",),
    "engine_adapter.runner_contract": ("Runner",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Completion",
    "DecodeLoop",
    "Drafter",
    "EmbeddedMedia",
    "EngineAdapter",
    "FinishReason",
    "HFRunner",
    "LatencyRecorder",
    "LoadEvent",
    "LoadOutcome",
    "LoadedModel",
    "PagedCache",
    "PromptLookupDrafter",
    "Request",
    "RequestResult",
    "Reservation",
    "Runner",
    "SequenceSlice",
    "SliceError",
    "StepBatch",
    "StepOutcome",
    "StoreAdapter",
    "digest_of",
    "geometry_from_config",
    "load_model",
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
