"""A small stream of what happened to blocks, for routers, dashboards and tests.

One EventStream per store. publish() is called under the store's lock and only appends; each subscriber has a bounded
queue of its own and drains it on its own thread. A subscriber that falls behind loses the oldest events and is told how
many: sequence numbers have a gap then, and it must ask for the content anew. An epoch that differs from the last one
makes everything known before it void.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from allocator.errors import UsageError


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks of one sequence now have a copy in `tier`; in order, the first one follows `parent` (None: the root).

    block_tokens: of each; token_ids: of all of them, empty where the publisher knows hashes only.
    """

    tier: str
    group: int
    hashes: tuple[bytes, ...]
    parent: bytes | None
    codec: str
    exact: bool
    block_tokens: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Copies of blocks are gone from `tier`."""

    tier: str
    group: int
    hashes: tuple[bytes, ...]
    codec: str
    exact: bool


@dataclass(frozen=True, slots=True)
class AllCleared:
    """A reset: every copy in every tier is void."""


Event: TypeAlias = BlockStored | BlockRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class Published:
    """An event with its place in the stream: sequence counts from 0 within an epoch, without gaps."""

    epoch: int
    sequence: int
    event: Event


class Subscription:
    """One reader of a stream. Made by EventStream.subscribe."""

    def __init__(self, stream: EventStream, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise UsageError(f"queue_limit: got {limit!r}; expected an int >= 1")
        self._stream = stream
        self._events: deque[Published] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self._lost_count = 0

    @property
    def lost_count(self) -> int:
        """Events that were dropped, oldest first, because the queue was full."""
        return self._lost_count

    def drain(self) -> list[Published]:
        """All events waiting, oldest first."""
        with self._lock:
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        self._stream._forget(self)

    def _push(self, published: Published) -> None:
        with self._lock:
            if len(self._events) == self._events.maxlen:
                self._lost_count += 1
            self._events.append(published)


class EventStream:
    """Fan-out of events. Costs next to nothing while nobody listens."""

    def __init__(self, *, epoch: int = 0, queue_limit: int = 4096) -> None:
        if isinstance(queue_limit, bool) or not isinstance(queue_limit, int) or queue_limit < 1:
            raise UsageError(f"queue_limit: got {queue_limit!r}; expected an int >= 1")
        self._epoch = epoch
        self._sequence = 0
        self._queue_limit = queue_limit
        self._lock = threading.Lock()
        self._subscriptions: tuple[Subscription, ...] = ()

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscriptions)

    def subscribe(self, queue_limit: int | None = None) -> Subscription:
        """Events from now on."""
        subscription = Subscription(self, self._queue_limit if queue_limit is None else queue_limit)
        with self._lock:
            self._subscriptions = (*self._subscriptions, subscription)
        return subscription

    def publish(self, event: Event) -> None:
        with self._lock:
            published = Published(self._epoch, self._sequence, event)
            self._sequence += 1
            for subscription in self._subscriptions:
                subscription._push(published)

    def begin_epoch(self, epoch: int) -> None:
        """After a reset: AllCleared is the first event of the new epoch. UsageError unless the epoch rises."""
        with self._lock:
            if epoch <= self._epoch:
                raise UsageError(f"epoch: got {epoch}; expected more than {self._epoch}")
            self._epoch, self._sequence = epoch, 0
        self.publish(AllCleared())

    def _forget(self, subscription: Subscription) -> None:
        with self._lock:
            self._subscriptions = tuple(one for one in self._subscriptions if one is not subscription)
