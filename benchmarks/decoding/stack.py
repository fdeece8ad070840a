"""A few random layers of Llama-8B's shape, and a tiny stack that only shows that a bench runs."""

from __future__ import annotations

from typing import Any

import torch

LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
VOCABULARY = 1_024
"""Small on purpose: the stack stands for layers, not for a language model's head."""


def random_stack(shape: dict[str, int], layers: int, position_limit: int, seed: int = 0) -> Any:
    """A transformers Llama in bf16 with random weights: attention and feed-forward at full size, no training."""
    from transformers import LlamaConfig, LlamaForCausalLM

    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    config = LlamaConfig(
        **shape,
        head_dim=head_dim,
        num_hidden_layers=layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=position_limit,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config)
    model.to_empty(device="cpu")
    model.model.rotary_emb = rotary
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.uniform_(-0.03, 0.03, generator=generator)
    model.eval()
    return model
