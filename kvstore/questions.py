"""What an engine asks before it admits a prompt, and since when it has been asking while tiers are still looking.

Whoever asks meanwhile is told to ask again, for at most a deadline from the first question about a prompt. A prompt is
named by its last block's hash, which stands for all before it. Under the store's lock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from kvstore.admission import Admitter
    from kvstore.residency import HitPlan
    from kvstore.sequence import Hit

_LIMIT = 4096  # prompts at once; the oldest is then answered with what is known
_FORGET_AFTER = 10  # deadlines


class Questions:
    def __init__(self, admitter: Admitter, deadline_seconds: float) -> None:
        self._admitter = admitter
        self._deadline_seconds = deadline_seconds
        self._since: OrderedDict[tuple[bytes, bool], float] = OrderedDict()  # oldest first

    def hit(self, root: bytes, hashes: Items[bytes], exact: bool, is_fresh: bool, now: float) -> Hit:
        """The longest reusable prefix. is_fresh: False while it is not known whether another process has reset."""
        plan = self._admitter.find(root, hashes, exact)
        pending = self.is_open(plan, hashes, exact, is_fresh, now)
        if pending and not is_fresh:  # what may have been stored before a reset must not be told of
            plan = self._admitter.find(root, (), exact)
        return self._admitter.hit(plan, pending)

    def is_open(self, plan: HitPlan, hashes: Items[bytes], exact: bool, is_fresh: bool, now: float) -> bool:
        """Whether to ask again: a tier is still looking, and the deadline has not passed since the first question."""
        pending = plan.pending or not is_fresh
        return bool(hashes) and self._is_open(hashes[-1], exact, pending, now)

    def _is_open(self, prompt: bytes, exact: bool, pending: bool, now: float) -> bool:
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
