"""Whether pages on a card are laid out as we read them is asked of the engine's own writer, at start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch

from allocator import ConfigError
from engine_adapter.vllm_connector.cuda_copier import CardLayer, CardPages
from tests.engine_adapter.vllm import kit

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
HEADS, TOKENS, DIM = 2, 32, 16


def check(layer: Any, tensor: torch.Tensor, dim: int = DIM, dtype: torch.dtype = torch.float32) -> None:
    from engine_adapter.vllm_connector.pages import check_writer  # vLLM warns when it is imported

    shape = (tensor.shape[1], dim, 16, tensor.shape[2] // 16, tensor.element_size())
    check_writer(CardPages((CardLayer(tensor, 0),), *shape), layer, torch.float32, dtype)


def attention(keys_first: bool = True, scales: tuple[float, float] = (1.0, 1.0), turned: int = 0) -> Any:
    """Writes as vLLM's FLASH_ATTN does, by torch; or V before K; or each token in another's place."""

    def write(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        by_token = cache.transpose(1, 2)
        both = (key / scales[0], value / scales[1])[:: 1 if keys_first else -1]
        for row, slot in enumerate(slots.roll(turned).tolist()):
            values = torch.cat([one[row] for one in both], dim=-1)
            is_fp8 = cache.dtype is torch.uint8
            by_token[slot // TOKENS, slot % TOKENS] = (
                values.to(torch.float8_e5m2).view(torch.uint8) if is_fp8 else values
            )

    impl = SimpleNamespace(do_kv_cache_update=write)
    return SimpleNamespace(impl=impl, _k_scale_float=scales[0], _v_scale_float=scales[1])


@pytest.mark.parametrize("tokens_outside", [False, True])
def test_a_writer_that_keeps_k_before_v_of_each_token_is_taken(tokens_outside: bool) -> None:
    tensor = torch.zeros(3, HEADS, TOKENS, 2 * DIM)
    if tokens_outside:
        tensor = torch.zeros(3, TOKENS, HEADS, 2 * DIM).transpose(1, 2)
    check(attention(), tensor)


@pytest.mark.parametrize("layer", [attention(False), attention(turned=8), SimpleNamespace(impl=object()), None])
def test_another_order_and_a_writer_that_is_not_known_are_refused(layer: Any) -> None:
    with pytest.raises(ConfigError, match="expected FLASH_ATTN or TRITON_ATTN"):
        check(layer, torch.zeros(3, HEADS, TOKENS, 2 * DIM))


def test_an_fp8_cache_is_asked_with_its_scales() -> None:
    tensor = torch.zeros(3, HEADS, TOKENS, 2 * DIM, dtype=torch.uint8)
    check(attention(scales=(0.037, 1.9)), tensor, dtype=torch.float8_e5m2)
    with pytest.raises(ConfigError, match="expected FLASH_ATTN or TRITON_ATTN"):
        check(attention(False, scales=(0.037, 1.9)), tensor, dtype=torch.float8_e5m2)


def test_vllms_writer_for_cpus_which_keeps_k_by_channel_is_refused(models: dict[str, Path]) -> None:
    with kit.engine(models["full"], {"host_bytes": "1 MiB"}) as engine:
        context = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        layer = next(one for one in context.values() if hasattr(one, "kv_cache"))
        _, heads, tokens, both = layer.kv_cache.shape
        with pytest.raises(ConfigError, match="CPUAttentionBackendImpl"):
            check(layer, torch.zeros(3, heads, tokens, both), both // 2)
