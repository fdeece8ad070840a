"""LoRA adapters in a real vLLM engine: what one computed is loaded for it alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.engine_adapter.vllm import kit
from tests.engine_adapter.vllm.kit import BLOCK, SIZES, prompt

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]
RANK = 8


def adapter(folder: Path, seed: int) -> Path:
    """As PEFT writes one: rank 8 on the keys and values of three layers."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    wide, narrow = SIZES["hidden_size"], SIZES["num_key_value_heads"] * SIZES["head_dim"]
    weights = {}
    for layer in range(3):
        for part in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(RANK, wide, generator=draw) * 0.3
            weights[f"{name}.lora_B.weight"] = torch.randn(narrow, RANK, generator=draw) * 0.3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_adapters_share_nothing_and_load_what_is_theirs(models: dict[str, Path], tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    loras: list[Any] = [None]
    loras += [LoRARequest(name, 1 + at, str(adapter(tmp_path / name, at))) for at, name in enumerate(("a", "b"))]
    asked = prompt(110, 400)
    settings = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": 2}
    with kit.engine(models["full"], {"host_bytes": "64 MiB"}, **settings) as engine:
        cold = [engine.answer(asked, lora=one) for one in loras]
        assert [cached for _, cached in cold] == [0, 0, 0]
        assert len({tokens for tokens, _ in cold}) == 3
        engine.forget()
        whole = 399 // BLOCK * BLOCK
        assert [engine.answer(asked, lora=one) for one in loras] == [(tokens, whole) for tokens, _ in cold]
