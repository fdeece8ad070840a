"""Teacher-forced decoding with a paged cache, emulated in one forward pass a window.

Queries run in pieces of one block. For a query at position p every block that ends at or before p minus the hot window
is read in its cold form, all else in bf16, as a decode loop would leave it. Errors spread: deeper layers' K and V come
from hidden states that already read the cold cache. One model and one thread at a time: the state is the object's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.quality.cold_forms import BLOCK_TOKENS, ColdForm, Tally

_REGISTERED_NAME = "kvstore_paged_reading"


@dataclass(slots=True)
class Fidelity:
    """Figures over all windows so far, against the bf16 cache of the same model and text."""

    kl: list[float] = field(default_factory=list)
    kl_p99: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    reference_loss: list[float] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    @property
    def mean_kl(self) -> float:
        """Mean Kullback-Leibler divergence from the reference, nats a token."""
        return sum(self.kl) / len(self.kl)

    @property
    def top1(self) -> float:
        """Share of positions whose most likely token is the reference's."""
        return sum(self.agreement) / len(self.agreement)

    @property
    def perplexity_change(self) -> float:
        """Relative change of the perplexity."""
        return math.exp((sum(self.loss) - sum(self.reference_loss)) / len(self.loss)) - 1


class PagedReading:
    """Attention of a Hugging Face causal language model with hot and cold blocks.

    `stress` is added to two key channels of every head (the lowest-frequency rotary pair): softmax does not see a
    constant, a codec does. It is the pattern of models with large key biases.
    """

    def __init__(self, model: Any, *, hot_tokens: int = 128, stress: float = 0.0) -> None:
        from transformers import AttentionInterface

        self.model = model
        self.hot_tokens = hot_tokens
        self.stress = stress
        self._form: ColdForm | None = None
        self._tally = Tally()
        self._calls = 0
        AttentionInterface.register(_REGISTERED_NAME, self._attend)
        model.set_attn_implementation(_REGISTERED_NAME)

    @torch.inference_mode()
    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, form: ColdForm | None, tally: Tally
    ) -> torch.Tensor:
        """Last hidden states, Tensor[positions, width], reading blocks in `form` (None: bf16)."""
        self._form, self._tally, self._calls = form, tally, 0
        states: torch.Tensor = self.model.model(input_ids=token_ids, use_cache=False).last_hidden_state[0, positions]
        layers = self.model.config.num_hidden_layers
        if self._calls != layers:
            raise RuntimeError(f"attention of {self._calls} layers was measured, the model has {layers}")
        return states

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """query Tensor[1, query_heads, tokens, dim], key and value Tensor[1, kv_heads, tokens, dim], after rope."""
        if options.get("softcap") or options.get("s_aux") is not None:
            raise RuntimeError("soft caps and sinks are not emulated here")
        self._calls += 1
        keys = key[0].float()
        if self.stress:
            half = keys.shape[-1] // 2
            keys = keys.clone()
            keys[..., [half - 1, 2 * half - 1]] += self.stress
        keys, values = keys.bfloat16().float(), value[0].bfloat16().float()
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        window = options.get("sliding_window")
        attended = self._attended(module.layer_idx, query[0].float() * scale, keys, values, window)
        return attended.transpose(0, 1)[None].to(query.dtype).contiguous(), None

    def _attended(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Tensor[query_heads, tokens, value_dim]; `query` scaled."""
        tokens, kv_heads = keys.shape[1], keys.shape[0]
        whole = tokens // BLOCK_TOKENS * BLOCK_TOKENS
        cold_from = 0
        cold_keys = cold_values = None
        if self._form is not None:
            cold_from = BLOCK_TOKENS if self._form.protects_first_block else 0
            cold_keys, cold_values = self._form.cooled(
                layer, keys[:, cold_from:whole], values[:, cold_from:whole], self._tally
            )
        read_keys, read_values = keys.clone(), values.clone()
        done = cold_from
        grouped = query.unflatten(0, (kv_heads, -1))  # [kv_heads, group, tokens, dim]
        pieces = []
        for start in range(0, tokens, BLOCK_TOKENS):
            end = min(tokens, start + BLOCK_TOKENS)
            cold_to = (start - self.hot_tokens) // BLOCK_TOKENS * BLOCK_TOKENS
            if cold_keys is not None and cold_values is not None and cold_to > done:
                part = slice(done - cold_from, cold_to - cold_from)
                read_keys[:, done:cold_to], read_values[:, done:cold_to] = cold_keys[:, part], cold_values[:, part]
                done = cold_to
            first = max(0, start - window + 1) if window else 0
            pieces.append(
                _piece(
                    grouped[:, :, start:end], read_keys[:, first:end], read_values[:, first:end], start - first, window
                )
            )
        return torch.cat(pieces, dim=2).flatten(0, 1)


def _piece(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, offset: int, window: int | None
) -> torch.Tensor:
    """query Tensor[kv_heads, group, rows, dim] at positions offset.. of keys Tensor[kv_heads, tokens, dim]."""
    rows = query.shape[2]
    scores = torch.matmul(query.flatten(1, 2), keys.transpose(1, 2)).unflatten(1, (-1, rows))
    at = torch.arange(offset, offset + rows)[:, None]
    seen = torch.arange(keys.shape[1])[None]
    hidden = seen > at
    if window:
        hidden |= seen <= at - window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
    attended: torch.Tensor = torch.matmul(weights.flatten(1, 2), values).unflatten(1, (-1, rows))
    return attended


@torch.inference_mode()
def compare(
    reading: PagedReading,
    token_ids: torch.Tensor,
    forms: list[ColdForm],
    results: dict[str, Fidelity],
    *,
    stride: int = 2,
) -> None:
    """Read one window, Tensor[1, tokens], in bf16 and in every form; add the figures to `results` by the form's name.

    Every `stride`-th position after the first 256 is scored.
    """
    positions = torch.arange(min(256, token_ids.shape[1] // 2), token_ids.shape[1] - 1, stride)
    targets = token_ids[0, positions + 1]
    reference = reading.hidden(token_ids, positions, None, Tally())
    for form in forms:
        result = results.setdefault(form.name, Fidelity())
        states = reading.hidden(token_ids, positions, form, result.tally)
        _score(reading.model, reference, states, targets, result)


def _score(
    model: Any, reference: torch.Tensor, states: torch.Tensor, targets: torch.Tensor, result: Fidelity, piece: int = 128
) -> None:
    head = model.get_output_embeddings()
    kl, agreed, loss, reference_loss = [], [], [], []
    for start in range(0, len(states), piece):  # a vocabulary of 262,144 over all positions would not fit
        part = slice(start, start + piece)
        expected = torch.log_softmax(head(reference[part]).float(), -1)
        found = torch.log_softmax(head(states[part]).float(), -1)
        kl.append((expected.exp() * (expected - found)).sum(-1))
        agreed.append((expected.argmax(-1) == found.argmax(-1)).float())
        loss.append(-found.gather(1, targets[part, None])[:, 0])
        reference_loss.append(-expected.gather(1, targets[part, None])[:, 0])
    divergence = torch.cat(kl)
    result.kl.append(divergence.mean().item())
    result.kl_p99.append(divergence.quantile(0.99).item())
    result.agreement.append(torch.cat(agreed).mean().item())
    result.loss.append(torch.cat(loss).mean().item())
    result.reference_loss.append(torch.cat(reference_loss).mean().item())
