"""A request that the decode loop has not finished: its streams, its completions so far, and what becomes of them.

Made and used by the decode loop's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine_adapter.request import Completion, FinishReason, RequestResult
from engine_adapter.scheduler import Phase, RequestState, Stream

if TYPE_CHECKING:
    from engine_adapter.latency import RequestLatency


@dataclass(slots=True)
class LiveRequest:
    """streams, completions: by branch; a branch that is not born yet has neither."""

    state: RequestState
    streams: dict[int, Stream]
    completions: dict[int, Completion] = field(default_factory=dict)

    def unfinished(self) -> list[Stream]:
        """A stream for each branch without a completion; those that are not born yet are born ended."""
        for index in range(self.state.request.n):
            if index not in self.streams:
                unborn = Stream(self.state, index, list(self.state.request.token_ids), phase=Phase.ENDED)
                self.streams[index] = unborn
        return [self.streams[index] for index in sorted(self.streams) if index not in self.completions]

    def result(self, latency: RequestLatency) -> RequestResult:
        """What is known of it, once every branch has a completion."""
        state = self.state
        return RequestResult(
            request_id=state.request.request_id,
            prompt_tokens=len(state.request.token_ids),
            completions=tuple(self.completions[index] for index in sorted(self.completions)),
            reused_tokens=state.reused_tokens or {},
            resumed_tokens=dict(state.resumed_tokens),
            computed_prefill_tokens=state.computed_prefill_tokens,
            recomputed_tokens=state.recomputed_tokens,
            preemptions=state.preemptions,
            drafted_tokens=state.drafted_tokens,
            accepted_tokens=state.accepted_tokens,
            queue_seconds=latency.queue_seconds,
            ttft_seconds=latency.ttft_seconds,
            itl_seconds=tuple(latency.itl_seconds),
        )


def failed_branch(result: RequestResult, index: int, error: str) -> RequestResult:
    """The result with an error at one branch, which had ended well."""
    marked = [
        replace(one, finish_reason=FinishReason.ERROR, error=error) if one.index == index else one
        for one in result.completions
    ]
    return replace(result, completions=tuple(marked))
