"""What the caches of one ModelStore tell a trace recorder: a line for each prompt that `generate` was given.

A cache is one request, however many calls continue it: what they feed later counts as output, and so do the answers of
all rows that began with the same prompt. Used by the thread that runs the model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvstore import HashChain
from kvstore.trace_recorder import EndedRequest

if TYPE_CHECKING:
    from kvstore import Identity
    from kvstore.identity import Media
    from kvstore.trace_recorder import TraceRecorder


class CacheRecording:
    """Of one cache. identity: that its rows are admitted under."""

    def __init__(self, recorder: TraceRecorder, identity: Identity, block_tokens: int) -> None:
        self._recorder = recorder
        self._identity = identity
        self._block_tokens = block_tokens
        self._prompts: dict[tuple[int, ...], Sequence[Media]] = {}
        self._began_seconds = 0.0

    def begin(self, prompts: Sequence[list[int]], media: Sequence[Sequence[Media]]) -> None:
        """All rows begin: the tokens of each, and its media."""
        self._began_seconds = time.perf_counter()
        self._prompts = {tuple(prompt): own for prompt, own in zip(prompts, media, strict=True) if prompt}

    def end(self, rows: Sequence[Sequence[int]], *, failed: bool) -> None:
        """The cache is over; what tokens its rows have, prompts included. Nothing when it never began."""
        if not rows:
            return
        age_seconds = time.perf_counter() - self._began_seconds
        tenant = self._identity.tenant
        answers: Counter[tuple[int, ...]] = Counter()
        for ids in rows:  # a prompt may be the beginning of another
            own = max((one for one in self._prompts if tuple(ids[: len(one)]) == one), key=len, default=())
            answers[own] += len(ids) - len(own)
        for prompt, media in self._prompts.items():
            chain = HashChain(self._identity.root(), self._block_tokens)
            chain.extend(list(prompt), [one for one in media if one.start < len(prompt)])
            self._recorder.record(
                EndedRequest(
                    token_ids=prompt,
                    output_tokens=answers[prompt],
                    age_seconds=age_seconds,
                    names=chain.hashes,
                    finish="error" if failed else "stop",
                    tenant=tenant.hex() if isinstance(tenant, bytes) else tenant,
                )
            )
        self._prompts = {}
