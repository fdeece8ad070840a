"""The epoch of each trust domain: in a page of shared memory that its clients map, kept by the tiers below.

A client looks at the page before it looks anything up, so what it does after a reset has returned is of the new epoch:
nobody waits for anybody to have noticed. The epoch of the daemon's own domain is that of its disk and remote tiers:
raised there by a reset, followed when another host has raised it. Other domains' epochs live as long as the daemon, so
above tiers that outlive it their reset does not hold and says so.

Page: int64 epoch, int64 1 while the daemon cannot say whether it is the newest. Any thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from allocator.errors import TierError
from kvstore.daemon.segments import PAGE_BYTES, SegmentMemory
from kvstore.tier import Tier

MOST_EPOCH = 1 << 62
_LOOK_SECONDS = 0.05
_AGAIN_SECONDS = 5.0  # until tiers that could not be told are tried again
_ROUNDS = 3  # a tier that others share may answer with a larger epoch than it was asked for


class DomainEpoch:
    """See the module. tiers: that keep it; refusal: why a reset does not hold, "" where it does; on_rise: is told;
    first: the one to begin with; write_down: is told before any client can see it."""

    def __init__(
        self,
        tiers: Sequence[Tier] = (),
        refusal: str = "",
        on_rise: Callable[[int], None] | None = None,
        *,
        first: int = 0,
        write_down: Callable[[int], None] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._tiers = [tier for tier in tiers if type(tier).seen_epoch is not Tier.seen_epoch]
        self._refusal = refusal
        self._on_rise = on_rise
        self._lock = threading.Lock()
        self._page = SegmentMemory(PAGE_BYTES)
        self._words = self._page.memory.data.cast("q")
        self._write_down = write_down
        if first:
            self._set(first)
        self._owed = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if self._tiers:
            self._agree()
            self._thread = threading.Thread(target=self._keep, name="kvstore-epoch", daemon=True)
            self._thread.start()

    @property
    def value(self) -> int:
        return self._words[0]

    @property
    def descriptor(self) -> int:
        """Of the page, for reading."""
        return self._page.read_fd

    def at_least(self, least: int) -> int:
        """An epoch that a client has heard of elsewhere; which one holds. Tiers are told in the background."""
        if self._publish(least):
            self._owed = True
        return self.value

    def rise(self, least: int) -> int:
        """A reset: an epoch larger than any before, here and in the tiers. Waits for them. TierError when one cannot be
        reached, or this domain has no say there; the epoch is raised all the same."""
        with self._lock:
            if max(self.value + 1, least) > MOST_EPOCH:  # whoever knew a larger one could not tell the next daemon
                raise TierError(f"the epoch is {self.value}, as large as one may be")
            self._set(max(self.value + 1, least))
        if self._refusal:
            raise TierError(self._refusal)
        failures: list[str] = []
        for tier in self._tiers:
            try:
                self._publish(tier.raise_epoch(self.value))
            except TierError as error:
                failures.append(f"{tier.name}: {error}")
        self._owed = len(self._tiers) > 1 or bool(failures)  # one may lag behind what a later one has answered
        if failures:
            raise TierError("reset did not reach every tier: " + "; ".join(failures))
        return self.value

    def close(self) -> None:
        """The page stays as it is with those who have it mapped."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._page.let_go()

    def _publish(self, epoch: int) -> bool:
        """Whether it is news."""
        with self._lock:
            if epoch <= self.value:
                return False
            self._set(epoch)
            return True

    def _set(self, epoch: int) -> None:
        if self._write_down is not None:
            self._write_down(epoch)
        self._words[0] = epoch
        if self._on_rise is not None:
            self._on_rise(epoch)

    def _agree(self) -> None:
        """Tiers that lag are told; a larger answer is followed."""
        self._owed = False
        self._words[1] = 1
        for _ in range(_ROUNDS):
            before = self.value
            for tier in self._tiers:
                try:
                    kept = tier.read_epoch()
                    self._publish(kept if kept >= self.value else tier.raise_epoch(self.value))
                except TierError:
                    self.counts[f"epoch_not_told_{tier.name}"] += 1
                    self._owed = True
            if self.value == before:
                break
        self._words[1] = 0

    def _keep(self) -> None:
        again = 0.0
        while not self._stop.wait(_LOOK_SECONDS):
            seen = [tier.seen_epoch() for tier in self._tiers]
            self._words[1] = int(None in seen)
            if self._publish(max((one for one in seen if one is not None), default=0)):
                self._owed = True
            if self._owed and time.monotonic() >= again:
                self._agree()
                again = time.monotonic() + _AGAIN_SECONDS if self._owed else 0.0


class KeptEpochs(Protocol):
    """Where epochs outlive the daemon without a tier."""

    def read_epoch(self, domain: str) -> int: ...

    def write_epoch(self, domain: str, epoch: int) -> None: ...


class DomainEpochs:
    """The epochs of one daemon, by trust domain. tiers: of the domain "", the daemon's own user's."""

    def __init__(
        self, tiers: Sequence[Tier], on_rise: Callable[[int], None] | None = None, kept: KeptEpochs | None = None
    ) -> None:
        self._kept = kept
        names = ", ".join(tier.name for tier in tiers)
        self._refusal = f"only the daemon's own user may reset its tiers ({names})" if tiers else ""
        self._lock = threading.Lock()
        self._by_domain = {"": self._made("", tiers, on_rise=on_rise)}

    def of(self, domain: str) -> DomainEpoch:
        with self._lock:
            found = self._by_domain.get(domain)
            if found is None:
                found = self._by_domain[domain] = self._made(domain, refusal=self._refusal)
            return found

    def _made(self, domain: str, tiers: Sequence[Tier] = (), **details: Any) -> DomainEpoch:
        kept = self._kept
        if kept is not None:
            details |= {"first": kept.read_epoch(domain), "write_down": partial(kept.write_epoch, domain)}
        return DomainEpoch(tiers, **details)

    def close(self) -> None:
        for one in self._by_domain.values():
            one.close()


def follower(page: memoryview) -> Callable[[], tuple[int, bool]]:
    """What a client reads of its page: the epoch, and whether the daemon is sure that it is the newest."""
    words = page.cast("q")
    return lambda: (words[0], not words[1])
