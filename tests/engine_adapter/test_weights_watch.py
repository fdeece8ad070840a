"""A model that is converted after its weights were named: refused, before its KV is taken for the other's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from allocator import UsageError
from engine_adapter import DecodeLoop, HFRunner, Request
from engine_adapter.weights_watch import WeightsWatch
from tests.engine_adapter.generate_kit import PROMPT, generate, opened
from tests.engine_adapter.loop_kit import make_store
from tests.engine_adapter.paged_kit import tiny_model


def _rounded(model: Any) -> None:
    """The dtype is what it was, the values are not."""
    model.half()
    model.float()


def _other_parameters(model: Any) -> None:
    model.load_state_dict({name: 2 * one for name, one in model.state_dict().items()}, assign=True)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "half": lambda model: model.half(),
    "to a dtype": lambda model: model.to(torch.bfloat16),
    "there and back": _rounded,
    "one layer": lambda model: model.model.layers[1].double(),
    "other parameters": _other_parameters,
}


@pytest.mark.parametrize("how", CONVERSIONS)
def test_the_loop_serves_no_model_that_was_converted(how: str) -> None:
    model = tiny_model("llama")
    runner = HFRunner(model)
    store = make_store(runner.geometry, blocks=32)
    runner.attach(store.slab, store.cold_codec)
    loop = DecodeLoop(runner, store)
    prompt = PROMPT[0].tolist()
    loop.submit(Request("before", prompt, 4))
    loop.run()
    CONVERSIONS[how](model)
    loop.submit(Request("after", prompt, 4))
    with pytest.raises(UsageError, match=r"was converted after its weights were named: .*Expected a new HFRunner"):
        loop.run()
    loop.abort("after")
    store.check_invariants()
    assert store.sequence_ids() == []
    runner.release()
    store.close()


@pytest.mark.parametrize("how", CONVERSIONS)
def test_generate_reuses_nothing_of_a_model_that_was_converted(how: str) -> None:
    model = tiny_model("llama")
    with opened(model) as kv:
        generate(model, PROMPT, kv.cache())
        running = kv.cache()
        CONVERSIONS[how](model)
        with pytest.raises(UsageError, match=r"was converted .*Expected a new ModelStore, or KVStore.reset"):
            kv.cache()
        with pytest.raises(UsageError, match="was converted"), torch.inference_mode():
            model(input_ids=PROMPT, cache=running)


def test_after_a_reset_other_parameters_are_what_is_named() -> None:
    model = tiny_model("llama")
    with opened(model) as kv:
        generate(model, PROMPT, kv.cache())
        _other_parameters(model)
        kv.store.reset()
        expected = generate(model, PROMPT)
        cache = kv.cache()
        assert generate(model, PROMPT, cache) == expected
        assert cache.reused_tokens == 0
        cache.finish()
        model.half()
        kv.store.reset()
        with pytest.raises(UsageError, match="was converted"):  # a dtype that the store's geometry does not name
            kv.cache()


def test_what_is_held_for_it_is_small() -> None:
    model = tiny_model("llama")
    held = sum(one.storage.nbytes() for one in WeightsWatch(model)._witnesses)
    assert held < sum(one.untyped_storage().nbytes() for one in model.parameters()) / 20
