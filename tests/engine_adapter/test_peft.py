"""LoRA adapters of PEFT through `generate`: each has its own KV, under the name that the cache is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from allocator import ConfigError
from engine_adapter.model_source import weights_digest
from tests.engine_adapter.generate_kit import PROMPT, generate, opened
from tests.engine_adapter.paged_kit import tiny_model

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
