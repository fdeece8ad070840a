"""Model, store, loop, engine and routes put together, and taken apart again in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from engine_adapter.decode_loop import DecodeLoop
from engine_adapter.model_source import LoadedModel, load_model
from engine_adapter.runner import HFRunner
from engine_adapter.server.engine_thread import EngineThread
from engine_adapter.server.http_app import Served, make_app
from engine_adapter.server.messages import Limits
from kvstore import Identity, KVStore, KVStoreConfig

if TYPE_CHECKING:
    import argparse

    from starlette.applications import Starlette


@contextmanager
def build(given: argparse.Namespace) -> Iterator[Starlette]:
    """The application of a checked command line; everything is closed at the end."""
    torch.set_num_threads(given.threads)
    config = KVStoreConfig.load(given.config)
    loaded = load_model(given.model, given.dtype)
    runner = HFRunner(loaded.model)
    identity = Identity(model=loaded.name, weights=loaded.weights, geometry=runner.geometry)
    with KVStore(runner.geometry, identity, config) as store:
        assert store.slab is not None
        runner.attach(store.slab, store.cold_codec)
        loop = DecodeLoop(runner, store, max_batch_sequences=given.max_batch, step_tokens=given.step_tokens)
        engine = EngineThread(
            loop, store, open_requests_limit=given.open_requests, request_seconds=given.request_seconds
        )
        try:
            yield make_app(
                Served(
                    engine=engine,
                    tokenizer=loaded.tokenizer,
                    model=loaded.name,
                    eos_token_ids=eos_token_ids(loaded),
                    limits=Limits(runner.position_limit, runner.vocab_size),
                    token=given.token,
                )
            )
        finally:
            engine.close()
            runner.release()


def eos_token_ids(loaded: LoadedModel) -> frozenset[int]:
    """What ends an answer: of the generation config, or else of the tokenizer."""
    found: Any = getattr(getattr(loaded.model, "generation_config", None), "eos_token_id", None)
    found = loaded.tokenizer.eos_token_id if found is None else found
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
