"""What the connector tells a trace recorder of a request that has ended. No vLLM here; its scheduler's thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvstore.trace_recorder import EndedRequest

if TYPE_CHECKING:
    from kvstore import HashChain

_FINISHES = ("stop", "length", "abort", "error")


def ended_request(request: Any, chain: HashChain, block_tokens: int, tenant: str | None) -> EndedRequest:
    """chain: of the request's tokens, prompt first. tenant: of all requests; one with a salt of its own has that."""
    prompt_tokens = int(request.num_prompt_tokens)
    finish = str(request.get_finished_reason())
    return EndedRequest(
        token_ids=request.all_token_ids[:prompt_tokens],
        output_tokens=max(0, len(request.all_token_ids) - prompt_tokens),
        age_seconds=max(0.0, time.time() - request.arrival_time),
        names=chain.hashes[: prompt_tokens // block_tokens],
        finish=finish if finish in _FINISHES else "stop",
        tenant=getattr(request, "cache_salt", None) or tenant,
    )
