"""`generate` with and without our cache, on tiny models: prompts, ways of generating, and what must be equal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from engine_adapter.transformers_cache import ModelStore, StoreCache
from kvstore import KVStoreConfig
from tests.engine_adapter.paged_kit import tiny_model

FAMILIES = ("llama", "mha", "mqa", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "gemma3n")
SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss")
NEW_TOKENS = 8
BLOCK = 16
WINDOW = 20

_draw = random.Random(11)


def random_ids(count: int, below: int = 97) -> list[int]:
    return [_draw.randrange(1, below) for _ in range(count)]


PROMPT = torch.tensor([random_ids(42)])
BATCH = torch.tensor([[0] * pad + random_ids(40 - pad) for pad in (0, 7, 23)])
"""Three prompts, padded on the left with 0, which no prompt holds."""


@cache
def assistant(family: str) -> Any:
    """A model that often agrees with the tiny one of its family, and often not."""
    model = tiny_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * parameter.std() * torch.randn_like(parameter))
    return model


def ways(family: str) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """Ways to generate, by name: (prompt, arguments of generate). One family goes them all."""
    most = {
        "greedy": (PROMPT, {}),
        "beams": (PROMPT, {"num_beams": 4}),
        "assisted": (PROMPT, {"assistant_model": assistant(family)}),
        "padded": (BATCH, {}),
    }
    if family != "gemma3":
        return most
    return most | {
        "lookup": (PROMPT, {"prompt_lookup_num_tokens": 3}),
        "padded beams": (BATCH, {"num_beams": 3}),
        "chunks": (PROMPT, {"prefill_chunk_size": 13}),
        "padded chunks": (BATCH, {"prefill_chunk_size": 13}),
    }


IN_FULL = {False: (*SLIDING, "llama", "deepseek_v3", "gemma3n"), True: ("gemma3", "deepseek_v3")}
"""By paged or not, the families that go all ways in the usual run; the others differ from llama in numbers of heads, or
were shown in the other mode."""


def usual_ways(family: str, paged: bool) -> dict[str, tuple[torch.Tensor, dict[str, Any]]]:
    """How rows come about is the same code for all families; what attention reads is shown by greedy and padded."""
    kept = {"greedy", "padded", *(("beams", "assisted", "padded chunks") if family in IN_FULL[paged] else ())}
    return {name: way for name, way in ways(family).items() if name in kept or (not paged and family == "gemma3")}


def generate(model: Any, ids: torch.Tensor, cache: Any = None, **arguments: Any) -> list[list[int]]:
    """New tokens of every row; deterministic, never stops early."""
    if cache is not None:
        arguments["cache"] = cache
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            **{
                "max_new_tokens": NEW_TOKENS,
                "min_new_tokens": NEW_TOKENS,
                "do_sample": False,
                "pad_token_id": 0,
                **arguments,
            },
        )
    new: list[list[int]] = found[:, ids.shape[1] :].tolist()
    return new


@contextmanager
def opened(model: Any, **settings: Any) -> Iterator[ModelStore]:
    """A ModelStore over little memory, raw unless told otherwise; its invariants are checked at the end."""
    arguments = {name: settings.pop(name) for name in ("paged", "weights", "tenant", "adapter") if name in settings}
    config = {"device_bytes": "8 MiB", "codec": "raw", "io_threads": "inline", **settings}
    kv = ModelStore(model, KVStoreConfig(**config), **arguments)
    try:
        yield kv
        kv._end_dropped()
        kv.store.check_invariants()
    finally:
        kv.close()


def logits_of(model: Any, ids: list[int], cache: StoreCache, **arguments: Any) -> torch.Tensor:
    """float32[tokens, vocab] of one pass that goes on where the cache is."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids]), cache=cache, **arguments).logits
    return logits[0].float()


def again(model: Any, disk_path: str, **arguments: Any) -> tuple[int, dict[str, int], list[list[int]]]:
    """One prompt over a store on disk: (tokens reused, by tier, new tokens)."""
    settings = {"spill_policy": "everything", "share": True, "load_always": True, "fetch_deadline_seconds": 30}
    ids = torch.tensor([[(7 * at * at + at) % 96 + 1 for at in range(80)]])
    with opened(model, disk_path=disk_path, **settings, **arguments) as kv:
        cache = kv.cache()
        tokens = generate(model, ids, cache)
        return cache.reused_tokens, cache.reused_by_tier, tokens
