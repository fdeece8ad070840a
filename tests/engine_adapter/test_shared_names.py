"""Loop, generate and vLLM name the same KV alike, and other KV otherwise: names, weights, positions, layouts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_adapter import DecodeLoop, HFRunner, Request
from engine_adapter.model_geometry import geometry_from_config, position_scheme
from engine_adapter.model_source import weights_digest
from engine_adapter.transformers_cache import ModelStore
from engine_adapter.transformers_cache.model_store import source_name
from engine_adapter.vllm_connector.geometry import engine_geometry
from engine_adapter.vllm_connector.settings import model_and_weights, read_settings
from kvstore import Identity, KVStore, KVStoreConfig
from tests.engine_adapter.generate_kit import generate
from tests.engine_adapter.paged_kit import tiny_config, tiny_model

PROMPT = [(7 * at * at + at) % 96 + 1 for at in range(80)]


def saved(family: str, folder: Path) -> Any:
    """A tiny model that was written to a folder and read back from it, as people have them."""
    import transformers as hf

    tiny_model(family).save_pretrained(folder)
    return hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def on_disk(path: Path) -> KVStoreConfig:
    return KVStoreConfig(
        device_bytes="8 MiB", codec="raw", disk_path=str(path), share=True, spill_policy="everything",
        load_always=True, fetch_deadline_seconds=30,
    )  # fmt: skip


def by_loop(model: Any, weights: str, config: KVStoreConfig) -> tuple[dict[str, int], list[int]]:
    """(tokens reused by tier, new tokens)."""
    runner = HFRunner(model)
    identity = Identity(model=source_name(model), weights=weights, geometry=runner.geometry)
    with KVStore(runner.geometry, identity, config) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        loop = DecodeLoop(runner, store)
        loop.submit(Request("one", PROMPT, 6))
        result = loop.run()["one"]
    runner.release()
    return dict(result.reused_tokens), list(result.token_ids)


def by_generate(model: Any, weights: str | None, config: KVStoreConfig) -> tuple[dict[str, int], list[int]]:
    with ModelStore(model, config, weights=weights) as kv:
        cache = kv.cache()
        tokens = generate(model, torch.tensor([PROMPT]), cache, max_new_tokens=6, min_new_tokens=6)
        return cache.reused_by_tier, tokens[0]


@pytest.mark.parametrize("family", ["gemma3", "deepseek_v3", "gemma3n"])
def test_generate_takes_what_the_loop_stored_and_the_other_way_round(family: str, tmp_path: Path) -> None:
    model = saved(family, tmp_path / "model")
    weights = weights_digest(tmp_path / "model")
    for first, second, path in ((by_loop, by_generate, "a"), (by_generate, by_loop, "b")):
        config = on_disk(tmp_path / path)
        cold, tokens = first(model, weights, config)
        warm, again = second(model, weights, config)
        assert sum(cold.values()) == 0
        assert warm["disk"] == 64
        assert again == tokens


def test_weights_changed_in_memory_do_not_go_by_the_name_of_their_folder(tmp_path: Path) -> None:
    """The default names what is in memory: a merged adapter under the folder's digest would be silently wrong."""
    model = saved("llama", tmp_path / "model")
    config = on_disk(tmp_path / "kv")
    by_generate(model, None, config)
    assert by_generate(model, None, config)[0] == {"disk": 64}
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight += 0.5
    assert by_generate(model, None, config)[0] == {}


def vllm_root(folder: Path, family: str, layers: int) -> bytes:
    """What vLLM's connector would name the model's KV; its own config objects stand in."""
    config = tiny_config(family)
    wanted = SimpleNamespace(
        model_config=SimpleNamespace(hf_text_config=config, dtype=torch.float32),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    found = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=range(layers))])
    geometry = engine_geometry(wanted, found, 16)
    name, weights = model_and_weights(read_settings({"host_bytes": "1 MiB"}, {}), str(folder), None)
    return Identity(model=name, weights=weights, geometry=geometry).root()


def test_vllm_names_a_models_kv_as_generate_does(tmp_path: Path) -> None:
    for family in ("llama", "gemma3"):
        folder = tmp_path / family
        model = saved(family, folder)
        config = KVStoreConfig(device_bytes="1 MiB", codec="raw")
        with ModelStore(model, config, weights=weights_digest(folder)) as kv:
            assert kv.identity.root() == vllm_root(folder, family, 4)
        with ModelStore(model, config, weights=weights_digest(folder), name="another") as kv:
            assert kv.identity.root() != vllm_root(folder, family, 4)


def test_latents_of_vllm_and_transformers_never_meet() -> None:
    """Same weights, other bytes: vLLM keeps the rope part of a latent interleaved."""
    ours, theirs = (position_scheme(tiny_config("deepseek_v3"), layout) for layout in ("halves", "interleaved"))
    assert ours != theirs
    assert position_scheme(tiny_config("deepseek_v3")) == ours


PINNED = {
    "llama": 'rope:{"rope_parameters":{"rope_theta":10000.0,"rope_type":"default"}}',
    "gemma3": (
        'rope:{"rope_parameters":{"full_attention":{"rope_theta":1000000.0,"rope_type":"default"},'
        '"sliding_attention":{"rope_theta":10000.0,"rope_type":"default"}}}'
    ),
    "deepseek_v3": 'rope:{"latent_rope":"halves","rope_parameters":{"rope_theta":10000.0,"rope_type":"default"}}',
}


@pytest.mark.parametrize("family", PINNED)
def test_the_position_text_is_pinned(family: str) -> None:
    """It is part of every name: whoever changes it makes all stored copies misses."""
    assert position_scheme(tiny_config(family)) == PINNED[family]


def test_what_says_nothing_about_positions_changes_no_name() -> None:
    """As releases of transformers fill in or leave out."""
    prints = set()
    for rope in (
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_theta": 10000, "rope_type": "default", "partial_rotary_factor": 1.0},
        {"rope_type": "default", "rope_theta": 10000.0, "factor": None},
    ):
        config = tiny_config("llama")
        config.rope_parameters = rope
        prints.add(geometry_from_config(config, "float32").fingerprint())
    assert len(prints) == 1
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert geometry_from_config(config, "float32").fingerprint() not in prints
