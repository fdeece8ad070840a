"""What the decode loop tells a trace recorder of a request that has ended. Called by the loop's thread."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstore.trace_recorder import EndedRequest

if TYPE_CHECKING:
    from engine_adapter.latency import RequestLatency
    from engine_adapter.request import Completion
    from engine_adapter.scheduler import RequestState


def ended_request(
    state: RequestState, completions: Iterable[Completion], latency: RequestLatency, now_seconds: float
) -> EndedRequest:
    """One line of the trace. `now_seconds` and the readings of `latency` are of the same clock."""
    request, ended = state.request, list(completions)
    gaps = latency.itl_seconds
    return EndedRequest(
        token_ids=request.token_ids,
        output_tokens=sum(len(one.token_ids) for one in ended),
        age_seconds=now_seconds - latency.submitted_seconds,
        finish=ended[0].finish_reason.value,
        session=request.session,
        turn=request.turn,
        reused_tokens=None if state.reused_tokens is None else sum(state.reused_tokens.values()),
        ttft_seconds=latency.ttft_seconds,
        itl_seconds=sum(gaps) / len(gaps) if gaps else None,
    )
