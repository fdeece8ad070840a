"""Transfers of the tiers: their end is told to who began them, or waited for; and all counts.

`lock` is held for calls to tiers and for counts, never while bytes are copied, encoded or waited for. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from kvstore.tier import Completion, ResultCode, Tier, Transfer

OnEnd: TypeAlias = "Callable[[Sequence[ResultCode]], None]"


class Traffic:
    """tiers: fast to slow."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)
        self.lock = threading.RLock()
        self._ended = threading.Condition(self.lock)
        self._told: dict[Transfer, OnEnd] = {}
        self._completions: dict[Transfer, Completion] = {}
        self._counts: Counter[str] = Counter()
        for tier in self.tiers:
            tier.set_waker(self.drain)

    def count(self, name: str, times: int = 1) -> None:
        with self.lock:
            self._counts[name] += times

    def counters(self) -> dict[str, int]:
        """Counts since start; those of a tier begin with its name."""
        with self.lock:
            found = dict(self._counts)
        for tier in self.tiers:
            found |= {f"{tier.name}_{name}": count for name, count in tier.counters().items()}
        return found

    def put(self, tier: Tier, items: Sequence[Any], on_end: OnEnd) -> None:
        """on_end: called once, under the lock, with the results, when the tier needs the buffers no more."""
        with self.lock:
            self._tell(tier.submit_put(items), on_end)

    def get(self, tier: Tier, items: Sequence[Any], on_end: OnEnd | None = None) -> Transfer:
        """on_end: as of `put`; without it the transfer must be waited for."""
        with self.lock:
            transfer = tier.submit_get(items)
            if on_end is not None:
                self._tell(transfer, on_end)
            return transfer

    def wait(self, transfer: Transfer, until: float) -> tuple[ResultCode, ...]:
        """Results of a get, which is given up at `until` by the monotonic clock."""
        self.drain()
        with self._ended:
            while transfer not in self._completions:
                left = until - time.monotonic()
                if left <= 0:
                    transfer.cancel()
                self._ended.wait(max(0.05, min(left, 0.25)))
                self.drain()
            return self._completions.pop(transfer).results

    def drain(self) -> None:
        """Take the tiers' completions."""
        with self._ended:
            for tier in self.tiers:
                for completion in tier.poll():
                    self._completions[completion.transfer] = completion
                    if completion.transfer in self._told:
                        self._end(self._completions.pop(completion.transfer))
            self._ended.notify_all()

    def _tell(self, transfer: Transfer, on_end: OnEnd) -> None:
        self._told[transfer] = on_end
        if transfer in self._completions:  # it ran inside the call
            self._end(self._completions.pop(transfer))

    def _end(self, completion: Completion) -> None:
        transfer = completion.transfer
        for result in completion.results:
            self._counts[f"{transfer.kind}_{transfer.tier_name}_{result.value}"] += 1
        self._told.pop(transfer)(completion.results)
