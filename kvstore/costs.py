"""Load or recompute: what a copy costs to fetch against what its tokens cost to compute.

Each tier has a running estimate of latency and bandwidth, the engine one of prefill speed. Estimates follow what was
measured, with old measurements fading, so a tier that slows down is left alone after a few transfers and tried again
when the estimate has grown stale. Numbers only; called under the store's lock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from allocator.errors import UsageError

_FADE = 0.9  # weight that a measurement keeps when the next one comes
_FADE_WHEN_QUICKER = 0.25
_LEAST_PREFILL_TOKENS = 64  # of fewer, what every step takes would be taken for what they take
_MIN_SECONDS = 1e-9
_LONGEST_LOAD_SECONDS = 60.0  # an engine that paused or a clock that jumped must not be remembered for ever
# Refusals of a tier in a row after which one fetch is tried, to learn whether it has recovered. One that nobody has
# measured is tried at once: a first guess must not cost a new store its first hits.
_RETRY_AFTER = 64


class LinearCost:
    """seconds = latency_seconds + bytes / bytes_per_second, fitted to fading measurements.

    The starting guess counts as one measurement, so the first real one already moves the estimate.
    """

    def __init__(self, latency_seconds: float, bytes_per_second: float) -> None:
        if not (latency_seconds >= 0 and math.isfinite(latency_seconds)):
            raise UsageError(f"latency_seconds: got {latency_seconds}; expected a number >= 0")
        if not (bytes_per_second > 0 and math.isfinite(bytes_per_second)):
            raise UsageError(f"bytes_per_second: got {bytes_per_second}; expected a number > 0")
        self.latency_seconds = latency_seconds
        self.bytes_per_second = bytes_per_second
        self.measured_count = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def seconds(self, byte_count: int) -> float:
        return self.latency_seconds + byte_count / self.bytes_per_second

    def observe(self, byte_count: int, seconds: float) -> None:
        """One transfer that took `seconds`. Nonsense (negative, NaN, zero bytes) is ignored."""
        if byte_count <= 0 or not seconds >= 0 or not math.isfinite(seconds):
            return
        self.measured_count += 1
        x, y = float(byte_count), max(seconds, _MIN_SECONDS)
        # Much quicker than thought: believe it soon, since a tier thought slow is seldom measured.
        fade = _FADE if y * 4 > self.seconds(byte_count) else _FADE_WHEN_QUICKER
        self._weight = self._weight * fade + 1
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        self._fit()

    def _fit(self) -> None:
        spread = self._weight * self._xx - self._x * self._x
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        if spread > 1e-3 * self._x * self._x:  # sizes differ enough to tell latency from bandwidth
            slope = (self._weight * self._xy - self._x * self._y) / spread
            latency = mean_y - slope * mean_x
            if slope > 0 and latency >= 0:
                self.latency_seconds, self.bytes_per_second = latency, 1 / slope
                return
        # One size only, or noise: scale the present line so that it passes through the mean.
        scale = mean_y / max(self.seconds(int(mean_x)), _MIN_SECONDS)
        self.latency_seconds *= scale
        self.bytes_per_second /= scale


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring blocks of a prompt that lie in one tier: `tokens` would be saved by moving `byte_count` bytes."""

    tier: str
    tokens: int
    byte_count: int


class CostModel:
    """See the module.

    prefill_tokens_per_second  first estimate of prefill speed
    latency_seconds, bytes_per_second  first estimate of a tier that has not been measured
    """

    def __init__(
        self,
        *,
        prefill_tokens_per_second: float,
        latency_seconds: float = 100e-6,
        bytes_per_second: float = 4e9,
        always_load: bool = False,
    ) -> None:
        if not (prefill_tokens_per_second > 0 and math.isfinite(prefill_tokens_per_second)):
            raise UsageError(f"prefill_tokens_per_second: got {prefill_tokens_per_second}; expected a number > 0")
        self.prefill_tokens_per_second = prefill_tokens_per_second
        self.always_load = always_load
        self._start = (latency_seconds, bytes_per_second)
        self._tiers: dict[str, LinearCost] = {}
        self._refused: dict[str, int] = {}
        self._prefill = (0.0, 0.0)  # fading sums: tokens, seconds

    def tier(self, name: str) -> LinearCost:
        """The estimate of one tier, made on first use."""
        cost = self._tiers.get(name)
        if cost is None:
            cost = self._tiers[name] = LinearCost(*self._start)
        return cost

    def observe_load(self, tier: str, byte_count: int, seconds: float) -> None:
        """A fetch of `byte_count` bytes took `seconds`, from submit to completion."""
        self.tier(tier).observe(byte_count, min(seconds, _LONGEST_LOAD_SECONDS))

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds`."""
        if not self.is_telling(tokens, seconds):
            return
        summed_tokens = self._prefill[0] * _FADE + tokens
        summed_seconds = self._prefill[1] * _FADE + seconds
        self._prefill = (summed_tokens, summed_seconds)
        self.prefill_tokens_per_second = summed_tokens / summed_seconds

    @staticmethod
    def is_telling(tokens: int, seconds: float) -> bool:
        """Whether a prefill says something of the speed of longer ones."""
        return tokens >= _LEAST_PREFILL_TOKENS and seconds > 0 and math.isfinite(seconds)

    def leading_stretches(self, stretches: Sequence[Stretch], queued_bytes: Mapping[str, int] | None = None) -> int:
        """How many leading stretches to load so that loading them and computing the rest is quickest. Changes nothing.

        A stretch helps only with all before it. Tiers load one after the other, so times add up; a tier's latency, and
        what it still has to move before our turn (queued_bytes, by tier), are paid once. A tier that has never been
        tried, or has long been refused, costs nothing once: its estimate may be wrong, and only a load can tell.
        """
        best_count, best_gain, gain = 0, 0.0, 0.0
        seen: set[str] = set()
        for count, stretch in enumerate(stretches, start=1):
            gain += stretch.tokens / self.prefill_tokens_per_second
            cost = self.tier(stretch.tier)
            if self._refusals(stretch.tier) < _RETRY_AFTER:
                gain -= stretch.byte_count / cost.bytes_per_second
                if stretch.tier not in seen:
                    seen.add(stretch.tier)
                    queued = 0 if queued_bytes is None else queued_bytes.get(stretch.tier, 0)
                    gain -= cost.latency_seconds + queued / cost.bytes_per_second
            if gain > best_gain or (self.always_load and stretch.tokens > 0):
                best_count, best_gain = count, max(gain, best_gain)
        return best_count

    def note_choice(self, stretches: Sequence[Stretch], count: int) -> None:
        """A request went by this answer of `leading_stretches`: tiers that were left out are counted."""
        loaded = {stretch.tier for stretch in stretches[:count]}
        for tier in {stretch.tier for stretch in stretches}:
            self._refused[tier] = 0 if tier in loaded else self._refusals(tier) + 1

    def _refusals(self, tier: str) -> int:
        """In a row, of a tier; enough of them to try it where it was neither measured nor tried."""
        return self._refused.get(tier, 0 if self.tier(tier).measured_count else _RETRY_AFTER)

    def estimates(self) -> dict[str, LinearCost]:
        """What has been measured, by tier."""
        return {name: cost for name, cost in self._tiers.items() if cost.measured_count}
