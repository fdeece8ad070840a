"""Since when tiers have been looking up a prompt, so that whoever asks about it is told to ask again, but not for ever.

Under the store's lock. A prompt is named by its last block's hash, which stands for all before it.
"""

from __future__ import annotations

from collections import OrderedDict

_LIMIT = 4096  # prompts at once; the oldest is then answered with what is known
_FORGET_AFTER = 10  # deadlines


class Questions:
    def __init__(self, deadline_seconds: float) -> None:
        self._deadline_seconds = deadline_seconds
        self._since: OrderedDict[tuple[bytes, bool], float] = OrderedDict()  # oldest first

    def is_open(self, prompt: bytes, exact: bool, pending: bool, now: float) -> bool:
        """Whether to ask again: a tier is still looking, and the deadline has not passed since the first question."""
        if not pending and not self._since:
            return False
        while self._since and now - next(iter(self._since.values())) > _FORGET_AFTER * self._deadline_seconds:
            self._since.popitem(last=False)
        since = self._since.get((prompt, exact))
        is_late = since is not None and now - since > self._deadline_seconds
        if not pending:
            if since is not None and not is_late:  # answered; one that was late stays, so that it is not asked anew
                del self._since[prompt, exact]
            return False
        if since is None:
            self._since[prompt, exact] = now
            if len(self._since) > _LIMIT:
                self._since.popitem(last=False)
        return not is_late

    def any_open(self, now: float) -> bool:
        return bool(self._since) and now - next(reversed(self._since.values())) <= self._deadline_seconds
