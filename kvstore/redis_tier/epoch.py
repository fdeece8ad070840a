"""The epoch of a namespace as one process sees it: read again in the background, and for how long it counts.

A value counts for `limit_seconds` from when its reading began, and whoever raises the epoch waits for as long: so once
a reset has returned, no process that is in touch with the server goes by an older one. A process that is cut off goes
on with what it knows: it cannot read the server's copies either.

`read` and `rise` wait for the server; `seen` never does. Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from allocator.errors import TierError
from kvstore.redis_tier.space import Namespace


class SharedEpoch:
    """on_read: called when a background reading has ended, on its thread."""

    def __init__(
        self, space: Namespace, limit_seconds: float, clock: Callable[[], float], on_read: Callable[[], None]
    ) -> None:
        self._space = space
        self._limit_seconds = limit_seconds
        self._clock = clock
        self._on_read = on_read
        self._epoch = 0
        self._counts_from = -1e9
        self._is_reading = False

    def read(self) -> int:
        """The epoch, made when there is none. TierError when the server cannot be reached."""
        started = self._clock()
        try:
            epoch = self._space.read_epoch()
            if epoch < self._epoch:  # the key was lost and made anew: it must not fall behind what is in use
                epoch = self._space.raise_epoch(self._epoch + 1)
        except TierError:
            self._counts_from = self._clock()
            raise
        self._epoch, self._counts_from = epoch, started
        return epoch

    def rise(self, least: int) -> int:
        """A new epoch for every process that shares the namespace, at least `least`. TierError as above."""
        self._epoch = self._space.raise_epoch(least)
        time.sleep(self._limit_seconds)
        return self._epoch

    def seen(self, in_background: Callable[[Callable[[], None]], None]) -> int | None:
        """The epoch as last read, None when that is too long ago; on the way it is read again before it is."""
        if not self._is_reading and self._clock() - self._counts_from > self._limit_seconds / 2:
            self._is_reading = True
            in_background(self._read_again)
        return self._epoch if self._clock() - self._counts_from <= self._limit_seconds else None

    def _read_again(self) -> None:
        try:
            self.read()
        except TierError:
            pass  # the links count it
        finally:
            self._is_reading = False
        self._on_read()
