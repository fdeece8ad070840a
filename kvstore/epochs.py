"""The epoch that a store and its tiers agree on, so that a reset in one process reaches all that share a tier.

A store begins with the highest epoch of its identity and its tiers, and tells it to the tiers that lag. A reset raises
it in every tier. Afterwards the store looks at what tiers have seen, and follows when another process has raised it.

Takes the store's lock for what is in this process, and holds it for no call that may wait for a server or a disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator.errors import TierError
from kvstore.tier import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from threading import RLock

    from kvstore.assembly import Parts
    from kvstore.prompts import Prompts
    from kvstore.sequence import Sequence

_ROUNDS = 3  # a tier that others share may answer with a larger epoch than it was asked for


class Epochs:
    """lock: the store's. Begins at construction, which may wait for tiers."""

    def __init__(self, parts: Parts, prompts: Prompts, sequences: Mapping[str, Sequence], lock: RLock) -> None:
        self._tiers = parts.tiers
        self._watched = tuple(tier for tier in parts.tiers if type(tier).seen_epoch is not Tier.seen_epoch)
        self._prompts = prompts
        self._pool = parts.pool
        self._events = parts.announcer.events
        self._upkeep = parts.upkeep
        self._sequences = sequences
        self._lock = lock
        self._begin(self._agreed())
        prompts.describe_to(parts.tiers)

    def _agreed(self) -> int:
        """The epoch to begin with. What cannot be read now is followed later, and holds nothing under this one."""
        epoch = self._prompts.identity.epoch
        for _ in range(_ROUNDS):
            before = epoch
            for tier in self._watched:
                try:
                    kept = tier.read_epoch()
                except TierError:
                    continue
                epoch = max(epoch, kept if kept >= epoch else tier.raise_epoch(epoch))
            if epoch == before:
                break
        return epoch

    def _begin(self, epoch: int) -> bool:
        """Nothing stored before is a hit from now on; live sequences go on, but name nothing any more."""
        with self._lock:
            if epoch <= self._prompts.identity.epoch:
                return False
            self._prompts.begin_epoch(epoch)
            for sequence in self._sequences.values():
                sequence.shared = False
            self._pool.forget_names()
            self._events.begin_epoch(epoch)
            self._upkeep.forget_all()
            return True

    def keep_up(self) -> bool:
        """Follow when another process has reset. False while a shared tier cannot say: it has not looked lately."""
        is_fresh = True
        for tier in self._watched:
            seen = tier.seen_epoch()
            if seen is None:
                is_fresh = False
            elif seen > self._prompts.identity.epoch and self._begin(seen):
                for one in self._tiers:
                    one.follow_epoch(seen)
        return is_fresh

    def reset(self) -> None:
        """Raise the epoch here and in every tier, and empty the tiers. TierError when one cannot be reached."""
        with self._lock:
            epoch = self._prompts.identity.epoch + 1
            self._begin(epoch)
        failures: list[str] = []
        for raising in (True, False):  # first all epochs: what cannot be emptied must not be read either
            for tier in self._tiers:
                try:
                    if raising:
                        epoch = max(epoch, tier.raise_epoch(epoch))
                    else:
                        tier.clear()
                except TierError as error:
                    failures.append(f"{tier.name}: {error}")
            self._begin(epoch)
        if failures:
            raise TierError("reset did not reach every tier: " + "; ".join(failures))
