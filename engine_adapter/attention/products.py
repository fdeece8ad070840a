"""Scores and softmax in 32 bits, from tensors in 16. Pure functions."""

from __future__ import annotations

import torch


def scores_of(query: torch.Tensor, keys: torch.Tensor, scaling: float) -> torch.Tensor:
    """query [n, queries, dim] times keys [n, tokens, dim], scaled: float32 [n, queries, tokens].

    In 16-bit dtypes a product comes back rounded to 8 or 11 bits, which on a score of 16 is an error of several
    percent in the weight. The second product returns what the first one lost: the sum is nearly float32.
    """
    turned = keys.transpose(-1, -2)
    first = torch.bmm(query, turned)
    if first.dtype == torch.float32:
        return first.mul_(scaling)
    rest = torch.baddbmm(first, query, turned, beta=-1)
    return first.float().add_(rest).mul_(scaling)


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last dim of float32 scores; sinks, broadcastable with last dim 1, take a share for nothing."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
