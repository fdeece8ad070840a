"""transformers' `generate` over a `KVStore`: prefixes reused across calls and processes, cold blocks, every tier.

`ModelStore` opens a store for one transformers model; `ModelStore.cache()` gives a `Cache` for one call of `generate`,
or for one conversation. The names load when they are first asked for (PEP 562), where transformers is a release that
this is tested with. One thread at a time per model.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from engine_adapter.releases import TRANSFORMERS

if TYPE_CHECKING:
    from engine_adapter.transformers_cache.model_store import ModelStore
    from engine_adapter.transformers_cache.store_cache import StoreCache

_HOME_OF = {
    "ModelStore": "engine_adapter.transformers_cache.model_store",
    "StoreCache": "engine_adapter.transformers_cache.store_cache",
}

__all__ = ["ModelStore", "StoreCache"]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    TRANSFORMERS.check(version("transformers"))
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
