"""The two phases as lines over the length of the prompt: a part that is always there, and one that grows. Pure.

seconds = fixed_seconds + tokens * token_seconds, least squares over the best of each length, no part negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one length: tokens as the server counted them, seconds of each round.

    `best` is the quickest round: what it takes when nobody disturbs. spread: how far the median is from it.
    """

    tokens: float
    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def spread(self) -> float:
        return median(self.seconds) / self.best - 1 if self.best > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """quality: share of the points' variance that the line explains (1: all)."""

    fixed_seconds: float
    token_seconds: float
    quality: float

    def at(self, tokens: float) -> float:
        return self.fixed_seconds + tokens * self.token_seconds

    def growing_share(self, tokens: float) -> float:
        """How much of the time at that length is the part that grows."""
        whole = self.at(tokens)
        return tokens * self.token_seconds / whole if whole > 0 else 0.0


def fit(measured: Sequence[Point]) -> Line:
    """The line through the best of each length; at least two lengths."""
    xs, ys = [one.tokens for one in measured], [one.best for one in measured]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    fixed = mean_y - slope * mean_x
    if slope < 0:
        slope, fixed = 0.0, mean_y
    elif fixed < 0:  # grows faster than a line: all of it grows
        fixed, slope = 0.0, sum(x * y for x, y in zip(xs, ys, strict=True)) / sum(x * x for x in xs)
    left = sum((y - fixed - slope * x) ** 2 for x, y in zip(xs, ys, strict=True))
    whole = sum((y - mean_y) ** 2 for y in ys)
    return Line(fixed, slope, 1 - left / whole if whole > 0 else 1.0)
