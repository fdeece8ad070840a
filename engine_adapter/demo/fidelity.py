"""How far a setting's predictions are from those of `ample`, on the same tokens.

`ample` runs freely and keeps the log-probabilities of its whole vocabulary at each output token. Another setting is
then fed exactly those output tokens (teacher forcing), through its own cache, and compared at each of them: does its
first choice agree, and what is the Kullback-Leibler divergence of its distribution from ample's.
Used by the demo's one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class Reference:
    """Log-probabilities of the reference run: float16[tokens, vocab] by request id, filled as it runs.

    float16 holds a log-probability to about 1 part in 2,000; the divergences compared with it are far coarser.
    """

    rows: dict[str, list[Tensor]] = field(default_factory=dict)

    def keep(self, request_id: str, position: int, logits: Tensor) -> None:
        """logits: Tensor[vocab] at output `position`; positions come in order."""
        rows = self.rows.setdefault(request_id, [])
        if position != len(rows):
            raise ValueError(f"request {request_id!r}: output position {position} came after {len(rows)} rows")
        rows.append(torch.log_softmax(logits.float(), dim=-1).to(torch.float16))


@dataclass(slots=True)
class Divergence:
    """Mean and largest divergence over all output tokens compared so far."""

    reference: Reference
    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0

    def compare(self, request_id: str, position: int, logits: Tensor) -> None:
        """logits: Tensor[vocab] of the forced run at output `position`."""
        expected = torch.log_softmax(self.reference.rows[request_id][position].float(), dim=-1)
        found = torch.log_softmax(logits.float(), dim=-1)
        divergence = float((expected.exp() * (expected - found)).sum())
        self.tokens += 1
        self.total += divergence
        self.largest = max(self.largest, divergence)

    @property
    def mean(self) -> float | None:
        return self.total / self.tokens if self.tokens else None


def agreement(chosen: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[int]]) -> float:
    """Share of the output tokens of `expected` at whose place `chosen` has the same one."""
    total = equal = 0
    for request_id, tokens in expected.items():
        found = chosen.get(request_id, ())
        total += max(len(tokens), len(found))
        equal += sum(a == b for a, b in zip(found, tokens, strict=False))
    return equal / total if total else 1.0
