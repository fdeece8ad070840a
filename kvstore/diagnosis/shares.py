"""Where the time of a request goes when several are under way: waiting in a queue, prompts, decode steps. Pure.

What one prompt alone needs is known. With several at once the first token of the k-th may have to wait for k prompts,
or for as many as are computed side by side; what is longer than that was spent behind other requests' answers: a queue.
Between tokens, what is longer than a step in which nobody's prompt is computed is prompts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from kvstore.diagnosis.endpoint import Sample

_STEADY_GAPS = 4


@dataclass(frozen=True, slots=True)
class Shares:
    """Seconds of the mean request. requests_at_once: how many were asked together."""

    requests_at_once: int
    queue_seconds: float
    prompt_seconds: float
    decode_seconds: float
    step_seconds: float

    @property
    def total_seconds(self) -> float:
        return self.queue_seconds + self.prompt_seconds + self.decode_seconds

    def of(self, phase: str) -> float:
        """The share of "queue", "prompt" or "decode"."""
        return float(getattr(self, f"{phase}_seconds")) / self.total_seconds if self.total_seconds else 0.0


def shares(burst: Sequence[Sample], alone_ttft_seconds: float, alone_itl_seconds: float) -> Shares:
    """Of requests that were asked together (one alone is a burst too)."""
    side_by_side = most_at_once(burst)
    step = steady_step_seconds(burst) or alone_itl_seconds
    queues, prompts, decodes = [], [], []
    for place, one in enumerate(sorted(burst, key=lambda sample: sample.chunk_seconds[0]), start=1):
        decoding = one.total_seconds - one.ttft_seconds
        queue = max(0.0, one.ttft_seconds - max(place, side_by_side) * alone_ttft_seconds) if len(burst) > 1 else 0.0
        decode = min(decoding, step * max(0, one.tokens - 1))
        queues.append(queue)
        decodes.append(decode)
        prompts.append(one.ttft_seconds - queue + decoding - decode)
    return Shares(len(burst), mean(queues), mean(prompts), mean(decodes), step)


def steady_step_seconds(burst: Sequence[Sample]) -> float | None:
    """Time between tokens while nobody's prompt was computed: after the last first token. None where too few came."""
    last_first = max(one.chunk_seconds[0] for one in burst)
    gaps = [
        gap
        for one in burst
        for earlier, gap in zip(one.chunk_seconds, one.gaps_seconds, strict=False)
        if earlier >= last_first
    ]
    return median(gaps) if len(gaps) >= _STEADY_GAPS else None


def most_at_once(burst: Sequence[Sample]) -> int:
    """How many answers were being written at the same moment, at most."""
    events = sorted(
        [(one.chunk_seconds[0], 1) for one in burst] + [(one.chunk_seconds[-1], -1) for one in burst]
    )  # an end before a begin at the same moment
    running = best = 0
    for _, change in events:
        running += change
        best = max(best, running)
    return best
