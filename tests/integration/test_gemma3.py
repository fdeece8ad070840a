"""Gemma 3 270M from PyPI (`make bench-models`), with real sliding windows: generate and the loop equal DynamicCache."""

from __future__ import annotations

import pytest
import torch

from engine_adapter import DecodeLoop, HFRunner, Request, load_model
from engine_adapter.model_source import GEMMA3, packaged_model_parts
from engine_adapter.transformers_cache import ModelStore
from kvstore import Identity, KVStore, KVStoreConfig

TEXT = "The Danube rises in the Black Forest and reaches the Black Sea after 2,850 km, through ten countries. " * 24
NEW_TOKENS = 12


@pytest.mark.nightly
@pytest.mark.model
def test_gemma3_past_its_window_through_generate_and_the_loop() -> None:
    if not all(packaged_model_parts(GEMMA3)):
        pytest.skip(f"{GEMMA3.name} is not installed: {GEMMA3.install}")
    loaded = load_model(GEMMA3, "float32")
    model, ids = loaded.model, loaded.tokenizer(TEXT + "It passes", return_tensors="pt").input_ids
    assert ids.shape[1] > 512 + 16, "past the window"
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    expected = model.generate(ids, **given)[0, ids.shape[1] :].tolist()
    config = KVStoreConfig(device_bytes="256 MiB", codec="raw")
    reused = (ids.shape[1] - 1) // 16 * 16
    for paged in (False, True):
        with ModelStore(model, config, paged=paged, name=loaded.name, weights=loaded.weights) as kv:
            assert {group.window_tokens for group in kv.geometry.groups} == {None, 512}
            for warm in (False, True):
                cache = kv.cache()
                assert model.generate(ids, cache=cache, **given)[0, ids.shape[1] :].tolist() == expected
                assert cache.reused_tokens == (reused if warm else 0)
                cache.finish()
    runner = HFRunner(model)
    identity = Identity(model=loaded.name, weights=loaded.weights, geometry=runner.geometry)
    with KVStore(runner.geometry, identity, config) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        loop = DecodeLoop(runner, store)
        for warm in (False, True):
            loop.submit(Request("one", ids[0].tolist(), len(expected)))
            result = loop.run()["one"]
            assert list(result.token_ids) == expected
            assert sum(result.reused_tokens.values()) == (reused if warm else 0)
    runner.release()
