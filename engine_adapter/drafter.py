"""Drafters: cheap guesses at the next tokens, which the model then verifies in one forward pass.

A drafter never changes what is put out, only how many forward passes it takes: the loop keeps a drafted token only
where it equals the token that the model itself chooses (greedy) or draws (sampled) at that place. Called on the loop's
thread, one sequence at a time; drafters keep no state between calls.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from allocator.errors import ConfigError


class Drafter(Protocol):
    """Proposes continuations of a token stream."""

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` token ids that may follow `token_ids`; an empty list when there is no guess."""
        ...


class PromptLookupDrafter:
    """Copies what followed the most recent earlier occurrence of the stream's last n-gram.

    Good where the output repeats the prompt (summaries, code edits, chats); costs one byte search per n-gram length,
    longest first. `window_tokens` bounds how far back it looks.
    """

    def __init__(
        self, *, draft_tokens: int = 4, longest_ngram: int = 3, shortest_ngram: int = 1, window_tokens: int = 8192
    ) -> None:
        if draft_tokens < 1 or not 1 <= shortest_ngram <= longest_ngram or window_tokens <= longest_ngram:
            raise ConfigError(
                f"expected draft_tokens >= 1, 1 <= shortest_ngram <= longest_ngram < window_tokens, got "
                f"{draft_tokens}, {shortest_ngram}, {longest_ngram}, {window_tokens}"
            )
        self._draft_tokens = draft_tokens
        self._ngrams = range(longest_ngram, shortest_ngram - 1, -1)
        self._window_tokens = window_tokens

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        wanted = min(count, self._draft_tokens)
        if wanted < 1:
            return []
        recent = array("Q", token_ids[-self._window_tokens :])
        stream = recent.tobytes()
        for length in self._ngrams:
            if length >= len(recent):
                continue
            after = _last_earlier_occurrence(stream, len(recent), length)
            if after is not None:
                return list(recent[after : after + wanted])
        return []


def _last_earlier_occurrence(stream: bytes, count: int, length: int) -> int | None:
    """Index of the token behind the last occurrence of the final `length` tokens, itself excluded; 8 bytes a token."""
    needle = stream[(count - length) * 8 :]
    end = (count - 1) * 8
    while True:
        found = stream.rfind(needle, 0, end)
        if found < 0:
            return None
        if found % 8 == 0:
            return found // 8 + length
        end = found + len(needle) - 1
