"""Tiers below an engine that owns its memory (vLLM, SGLang): transfers, the shared epoch, and all counts.

The end of a transfer is told to who began it, or waited for until a deadline. One that outlives its deadline is left
to its tier, which counts as stuck until then. Any thread. `lock` is held for calls to tiers, never while bytes are
copied, encoded or waited for, nor in a reset.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from allocator import TierError

if TYPE_CHECKING:
    from kvstore.tier import Completion, ResultCode, Tier, Transfer

OnEnd: TypeAlias = "Callable[[Sequence[ResultCode]], None]"
_LOOK_SECONDS = 0.002  # between two looks at what a tier asks a server
_WAIT_SECONDS = 0.25


def _leave_it(results: Sequence[ResultCode]) -> None:
    """The end of a transfer whose buffers nobody wants back."""


class TiersBelow:
    """tiers: fast to slow, closed with this."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.lock = threading.RLock()
        self._resetting = threading.Lock()
        self.epoch = self._agreed_epoch()
        self._ended = threading.Condition(self.lock)
        self._completions: dict[Transfer, Completion] = {}
        self._told: dict[Transfer, OnEnd] = {}
        self._counting = threading.Lock()  # apart: whoever reads counts must not wait for a tier
        self._counts: Counter[str] = Counter()
        for tier in self.tiers:
            tier.set_waker(self.drain)

    def count(self, name: str, times: int = 1) -> None:
        with self._counting:
            self._counts[name] += times

    def counters(self) -> dict[str, int]:
        """Counts since start; those of a tier begin with its name. Never waits."""
        with self._counting:
            found = dict(self._counts)
        for tier in self.tiers:
            found |= {f"{tier.name}_{name}": count for name, count in tier.counters().items()}
        return found

    # transfers -------------------------------------------------------------------------------------------------------

    def begin(self, submit: Callable[[], Transfer], on_end: OnEnd | None = None) -> Transfer:
        """on_end: called once, under the lock, with the results, when the buffers are free again; else wait for it."""
        with self.lock:
            transfer = submit()
            if on_end is not None:
                self._tell(transfer, on_end)
            return transfer

    def wait(self, transfer: Transfer, until: float) -> tuple[ResultCode, ...]:
        """Results. At `until` (monotonic) it is cancelled, and still waited for: its buffers are the caller's again."""
        found = self._wait(transfer, until, None)
        assert found is not None
        return found

    def wait_or_leave(
        self, transfer: Transfer, until: float, on_end: OnEnd = _leave_it
    ) -> tuple[ResultCode, ...] | None:
        """Results, or None at `until`: then on_end is called as by `begin`, for whoever still wants to know."""
        return self._wait(transfer, until, on_end)

    def _wait(self, transfer: Transfer, until: float, on_end: OnEnd | None) -> tuple[ResultCode, ...] | None:
        self.drain()
        with self._ended:
            while transfer not in self._completions:
                left = until - time.monotonic()
                if left <= 0 and not transfer.cancelled:
                    transfer.cancel()
                    self.drain()
                    continue
                if left <= 0 and on_end is not None:
                    self._told[transfer] = on_end
                    return None
                self._ended.wait(min(left, _WAIT_SECONDS) if left > 0 else _WAIT_SECONDS)
                self.drain()
            return self._completions.pop(transfer).results

    def drain(self) -> None:
        """Take the tiers' completions."""
        with self._ended:
            for tier in self.tiers:
                for completion in tier.poll():
                    transfer = completion.transfer
                    for result in completion.results:
                        self.count(f"{transfer.kind}_{tier.name}_{result.value}")
                    self._completions[transfer] = completion
                    if (on_end := self._told.pop(transfer, None)) is not None:
                        self._tell(transfer, on_end)
            self._ended.notify_all()

    def _tell(self, transfer: Transfer, on_end: OnEnd) -> None:
        """Now, if it has ended (a tier may run it inside the call), or when it does."""
        completion = self._completions.pop(transfer, None)
        if completion is None:
            self._told[transfer] = on_end
        else:
            on_end(completion.results)

    def is_stuck(self, tier: Tier) -> bool:
        """A transfer of it was given up and still has not ended: what it is asked now would wait behind that."""
        with self.lock:
            return any(one.cancelled and one.tier_name == tier.name for one in self._told)

    # epochs ----------------------------------------------------------------------------------------------------------

    def _agreed_epoch(self) -> int:
        epoch = 0
        for tier in self.tiers:
            try:
                epoch = max(epoch, tier.read_epoch())
            except TierError:
                continue
        return epoch

    def fresh_epoch(self, until: float) -> int | None:
        """The epoch now, followed where another process has reset; None while a shared tier cannot say by `until`."""
        while True:
            with self.lock:
                seen = [tier.seen_epoch() for tier in self.tiers]
                newest = max((one for one in seen if one is not None), default=0)
                if newest > self.epoch:
                    self.epoch = newest
                    for tier in self.tiers:
                        tier.follow_epoch(newest)
                if None not in seen:
                    return self.epoch
            if time.monotonic() >= until:
                return None
            time.sleep(_LOOK_SECONDS)

    def reset(self) -> int:
        """A new epoch in every tier, and nothing of the old one in it; which. TierError where one was not reached."""
        problems = []
        with self._resetting:
            epoch = self.epoch + 1
            for tier in self.tiers:
                try:
                    epoch = max(epoch, tier.raise_epoch(epoch))
                except TierError as error:
                    problems.append(f"{tier.name}: {error}")
            with self.lock:
                self.epoch = max(self.epoch, epoch)
            for tier in self.tiers:
                try:
                    tier.clear()
                except TierError as error:
                    problems.append(f"{tier.name}: {error}")
        if problems:
            raise TierError("reset did not reach every tier: " + "; ".join(problems))
        return epoch

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()
