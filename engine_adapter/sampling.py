"""Choosing tokens from logits: greedy, or drawn with a random number that depends only on where the token stands.

The number behind a draw is a hash of (loop seed, request seed, branch, output position), not the next of a stream, so a
request draws the same tokens whether or not it was preempted, batched with others or drafted for. That also makes
draft-and-verify exact for sampled requests: a draft is a point guess, the draw at its place is the truth, and the draft
survives when both agree, which is rejection sampling for a proposal that puts all its weight on one token.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine_adapter.request import Request

_SEED_MASK = (1 << 64) - 1
_FLOAT32_HOLDS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Choice:
    """The token put out at one place and the model's own first choice there."""

    token_id: int
    argmax_token_id: int


def uniform_at(loop_seed: int, request_seed: int, branch: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing but these four integers; the same on every machine."""
    fields = struct.pack("<QQQQ", loop_seed & _SEED_MASK, request_seed & _SEED_MASK, branch, position)
    (word,) = struct.unpack("<Q", hashlib.blake2b(fields, digest_size=8).digest())
    return float(word >> 11) * 2.0**-53


def distribution(logits: Tensor, request: Request) -> tuple[Tensor, Tensor]:
    """Probabilities left after temperature, top-k and top-p, likeliest first.

    logits: Tensor[vocab], any float dtype. Returns (probabilities float64[kept], token ids int64[kept]); probabilities
    sum to 1. Equal logits are ordered by token id. The likeliest token always stays.
    """
    scaled = logits.to(torch.float64) / request.temperature
    if request.top_k and request.top_k < scaled.numel():
        floor = torch.topk(scaled, request.top_k).values[-1]
        scaled = torch.where(scaled >= floor, scaled, -torch.inf)
    values, token_ids = torch.sort(scaled, descending=True, stable=True)
    if request.top_k:
        values, token_ids = values[: request.top_k], token_ids[: request.top_k]
    probabilities = torch.softmax(values, dim=0)
    if request.top_p < 1.0:
        before = torch.cumsum(probabilities, dim=0) - probabilities
        kept = max(1, int((before < request.top_p).sum()))
        probabilities, token_ids = probabilities[:kept] / probabilities[:kept].sum(), token_ids[:kept]
    return probabilities, token_ids


def draw(logits: Tensor, request: Request, uniform: float) -> int:
    """The token at quantile `uniform` of `distribution(logits, request)`."""
    probabilities, token_ids = distribution(logits, request)
    place = int(torch.searchsorted(torch.cumsum(probabilities, dim=0), uniform, right=True))
    alive = int((probabilities > 0).sum())
    return int(token_ids[min(place, alive - 1)])


class Sampler:
    """Chooses tokens for the loop; stateless but for its seed."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def choose(self, logits: Tensor, argmax: int, request: Request, branch: int, position: int) -> Choice:
        """The token at output `position` (0 is the first new token) of a branch. logits: Tensor[vocab]."""
        if request.forced_token_ids is not None:
            return Choice(request.forced_token_ids[position], argmax)
        if request.greedy:
            return Choice(argmax, argmax)
        return Choice(draw(logits, request, uniform_at(self._seed, request.seed, branch, position)), argmax)


def first_choices(logits: Tensor) -> list[int | None]:
    """Argmax of each row of logits Tensor[rows, vocab], the first of equals; None where a row's maximum is not finite.

    A NaN anywhere counts as the row's maximum. On the host NumPy finds it ten times as fast as torch does in 16 bits.
    """
    if logits.device.type == "cpu" and logits.dtype in _FLOAT32_HOLDS:
        rows = logits.detach().to(torch.float32).numpy()
        places = rows.argmax(axis=-1)
        finite = np.isfinite(np.take_along_axis(rows, places[:, None], axis=-1)[:, 0])
        return [token if sound else None for token, sound in zip(places.tolist(), finite.tolist(), strict=True)]
    best = torch.max(logits, dim=-1)
    sounds = torch.isfinite(best.values).tolist()
    return [token if sound else None for token, sound in zip(best.indices.tolist(), sounds, strict=True)]
