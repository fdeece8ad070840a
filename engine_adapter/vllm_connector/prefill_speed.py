"""How fast vLLM computes prompts, as its scheduler's side can see it: for what the daemon says of time saved.

The scheduler knows when it plans a step, not when the step ends; where it plans ahead, it plans the one after next when
this one is over. So a step and the next are measured together, from the plan of the first to that of the third, where
requests go on from each to the next: nothing was idle between. One thread. No vLLM here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

_LEAST_TOKENS = 64
_LEAST_PER_REQUEST = 16  # of a step that is mostly prefill
_FADE = 0.8


class PrefillSpeed:
    """See the module. tokens_per_second: 0 until something was measured."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: list[tuple[float, Mapping[str, int]]] = []  # the last two: when planned, tokens by request
        self._tokens = self._seconds = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0

    def step(self, tokens_by_request: Mapping[str, int]) -> None:
        """A step is planned now."""
        now = self._clock()
        if len(self._steps) == 2:
            (began, first), (_, second) = self._steps
            tokens = sum(first.values()) + sum(second.values())
            is_prefill = sum(first.values()) >= max(_LEAST_TOKENS, _LEAST_PER_REQUEST * len(first))
            is_busy = not first.keys().isdisjoint(second) and not second.keys().isdisjoint(tokens_by_request)
            if is_prefill and is_busy and now > began:
                self._tokens = _FADE * self._tokens + tokens
                self._seconds = _FADE * self._seconds + now - began
            del self._steps[0]
        self._steps.append((now, dict(tokens_by_request)))
