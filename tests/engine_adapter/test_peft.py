"""LoRA adapters of PEFT through `generate`: each has its own KV, under the name that the cache is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allocator import ConfigError
from engine_adapter import DecodeLoop, HFRunner, Request
from engine_adapter.model_source import weights_digest
from kvstore import Identity, KVStore, KVStoreConfig
from tests.engine_adapter.generate_kit import PROMPT, generate, opened
from tests.engine_adapter.paged_kit import reference_tokens, tiny_model

peft: Any = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("default")  # PEFT's own


@pytest.fixture(scope="module")
def lora() -> Any:
    """A tiny Llama with two adapters that change its keys and values."""

    def config() -> Any:
        return peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)

    model = peft.get_peft_model(tiny_model("llama"), config(), adapter_name="a")
    model.add_adapter("b", config())
    return model.eval()


@pytest.mark.parametrize("paged", [False, True], ids=["own", "paged"])
def test_adapters_of_a_model_never_share(lora: Any, paged: bool, tmp_path: Path) -> None:
    lora.save_pretrained(tmp_path)
    names = {one: (one, None, weights_digest(tmp_path / one)) for one in ("a", "b")}
    assert names["a"][2] != names["b"][2]
    expected, reused = {}, []
    for one in names:
        lora.set_adapter(one)
        expected[one] = generate(lora, PROMPT)
    assert expected["a"] != expected["b"]
    with opened(lora, adapter=names["a"], paged=paged) as kv:
        for one in ("a", "b", "a", "b"):
            lora.set_adapter(one)
            cache = kv.cache(adapter=names[one])
            assert generate(lora, PROMPT, cache) == expected[one], one
            reused.append(cache.reused_tokens)
            cache.finish()
    assert reused == [0, 0, 32, 32]


def test_one_name_for_two_adapters_would_show(lora: Any) -> None:
    lora.set_adapter("b")
    expected = generate(lora, PROMPT)
    with opened(lora, adapter="one") as kv:
        for one in ("a", "b"):
            lora.set_adapter(one)
            cache = kv.cache()
            found = generate(lora, PROMPT, cache)
            cache.finish()
    assert found != expected


def test_an_adapter_without_a_name_is_refused(lora: Any) -> None:
    with pytest.raises(ConfigError, match=r"carries adapters \['a', 'b'\]: name the active one"), opened(lora):
        pass


def test_the_loop_refuses_it_too_and_serves_each_adapter_by_its_name(lora: Any) -> None:
    with pytest.raises(ConfigError, match=r"carries adapters \['a', 'b'\]: name the active one with HFRunner"):
        HFRunner(lora)
    prompt = PROMPT[0].tolist()
    expected = {}
    for name in ("a", "b"):
        lora.set_adapter(name)
        expected[name] = reference_tokens(lora, prompt, 8)
    assert expected["a"] != expected["b"]
    runner = HFRunner(lora, use_adapter=lambda adapter: lora.set_adapter(str(adapter.name)))  # type: ignore[union-attr]
    identity = Identity(model="m", weights="w", geometry=runner.geometry)
    with KVStore(runner.geometry, identity, KVStoreConfig(device_bytes="4 MiB", codec="raw")) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        loop = DecodeLoop(runner, store)
        for turn in range(2):
            for name in expected:
                loop.submit(Request(name, prompt, 8, adapter=(name, None, "digest " + name)))
            for name, result in loop.run().items():
                assert list(result.token_ids) == expected[name]
                assert sum(result.reused_tokens.values()) == 32 * turn
    runner.release()


def test_adapters_that_come_later_are_noticed() -> None:
    model = tiny_model("llama")
    runner = HFRunner(model)
    identity = Identity(model="m", weights="w", geometry=runner.geometry)
    with KVStore(runner.geometry, identity, KVStoreConfig(device_bytes="4 MiB", codec="raw")) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        loop = DecodeLoop(runner, store)
        peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["k_proj"], init_lora_weights=False)).eval()
        loop.submit(Request("a", PROMPT[0].tolist(), 8))
        with pytest.raises(ConfigError, match=r"carries adapters \['default'\]"):
            loop.run()
    runner.release()


def test_learned_prompts_are_refused_by_both() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    learned = peft.get_peft_model(tiny_model("llama"), config).eval()
    with pytest.raises(ConfigError, match="learned prompts instead of layers"):
        HFRunner(learned)
    with pytest.raises(ConfigError, match="learned prompts instead of layers"), opened(learned, adapter="p"):
        pass
