"""What an engine must do to use the store, and what it is promised: the adapter interface and its plain implementation.

`EngineAdapter` is the contract. Every method must be implemented (nothing passes silently), and every adapter, of an
engine that owns its memory or of one that uses ours, keeps these promises:

1. **A reservation holds what it reports.** The `ready_tokens` of `reserve` stay where they are, and the sources of its
   `pending_tokens` stay pinned, until the sequence ends, whatever is evicted meanwhile.
2. **Exactly one end per load.** A reservation with `pending_tokens > 0` is followed by exactly one `LoadEvent` from
   `load`, done or failed, no later than the load deadline; also when the load turns out to be needless, too small or
   impossible. A sequence that was aborted, preempted or finished first gets none.
3. **min(computed, allocated, hashed).** What may be stored ends at the smallest of the tokens whose KV is computed and
   committed, the tokens that have room, and the tokens that have a hash: `storable_tokens`.
4. **Recomputed, not remembered.** `reserve` looks again each time, also when a preempted sequence comes back.
5. **Asking ends.** A reservation that says `ask_again` holds nothing; past the fetch deadline from the first one for a
   prompt, `reserve` goes by what is known.

`StoreAdapter` is the implementation over `KVStore`, whose blocks are the engine's own memory. All methods are called
from the engine's one scheduling thread.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from allocator.errors import ConfigError, DuplicateSequence, KVError

if TYPE_CHECKING:
    from allocator import KVGeometry
    from kvstore import Identity, KVStore
    from kvstore.identity import Media


class LoadOutcome(StrEnum):
    """How a load ended."""

    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class LoadEvent:
    """The one end of one load. Computing starts at position `ready_tokens`, whatever the outcome."""

    sequence_id: str
    outcome: LoadOutcome
    ready_tokens: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the cache gives a sequence: `ready_tokens` now, `pending_tokens` more after its `LoadEvent`.

    ask_again: nothing yet, and nothing is held: a slow tier is still being asked. Reserve again after the next step.
    """

    sequence_id: str
    ready_tokens: int
    pending_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    ask_again: bool = False


def storable_tokens(computed_tokens: int, allocated_tokens: int, hashed_tokens: int) -> int:
    """How many leading tokens of a sequence may be stored: nothing beyond the smallest of the three."""
    for name, count in (("computed", computed_tokens), ("allocated", allocated_tokens), ("hashed", hashed_tokens)):
        if count < 0:
            raise ConfigError(f"{name}_tokens must be >= 0, got {count}")
    return min(computed_tokens, allocated_tokens, hashed_tokens)


class EngineAdapter(ABC):
    """The hooks between an engine's scheduler and the cache, in the order of a sequence's life."""

    @property
    @abstractmethod
    def geometry(self) -> KVGeometry | None:
        """Shape of the cache: groups, layers, heads, block size; None only for an adapter without a cache."""

    @abstractmethod
    def reserve(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        *,
        exact: bool = False,
        prompt_tokens: int | None = None,
        spare_blocks: Sequence[int] = (),
        media: Sequence[Media] = (),
        identity: Identity | None = None,
    ) -> Reservation:
        """Take the longest usable prefix of `token_ids` for a new sequence; at least one token is left to compute.

        prompt_tokens: how many of `token_ids` are the prompt (the rest was generated before a preemption); default all.
        spare_blocks: blocks by cache group that must be left for others once the whole prompt has its own.
        media: images, sound, video among the tokens. identity: another adapter or tenant than the store's own.
        Raises CapacityError (nothing is held then), DuplicateSequence, UsageError.
        """

    @abstractmethod
    def load(self) -> list[LoadEvent]:
        """Ends of loads since the last call; never waits."""

    @abstractmethod
    def wait_layer(self, sequence_id: str, layer: int, timeout_seconds: float) -> bool:
        """Before a layer's attention reads what the sequence still loads: blocks until that layer is there.

        False: it is not, in this time or for good, and what was computed for the sequence meanwhile is void. Its load
        has its end all the same, and only an end with every token that it was to bring makes the computed ones good.
        """

    @abstractmethod
    def allocate(self, sequence_id: str, token_count: int) -> None:
        """Room for `token_count` more tokens in all groups, all or nothing. Raises CapacityError, UnknownSequence."""

    @abstractmethod
    def commit(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        """The KV of the next allocated tokens is computed, from these ids, and final: full blocks may be stored."""

    @abstractmethod
    def rollback(self, sequence_id: str, token_count: int) -> None:
        """The last `token_count` allocated tokens are void (rejected drafts, a failed step)."""

    @abstractmethod
    def preempt(self, sequence_id: str) -> None:
        """The sequence gives up its memory and will be reserved again; what is committed should stay findable."""

    @abstractmethod
    def finish(self, sequence_id: str) -> None:
        """The sequence ended well; its committed blocks may serve others."""

    @abstractmethod
    def abort(self, sequence_id: str) -> None:
        """The sequence ends now, whatever is in flight for it; what is not committed is never stored."""


class StoreAdapter(EngineAdapter):
    """The interface over a `KVStore`, or over nothing when the store could not be opened (degraded).

    Degraded without a store, every hook is a miss or does nothing, so an engine with memory of its own goes on without
    a cache. Degraded with a fallback store (see `open`), the cache works with what is left.
    `load_deadline_seconds` bounds a load on `clock`; the store has a deadline of its own, this one is the backstop.
    """

    def __init__(
        self,
        store: KVStore | None,
        *,
        load_deadline_seconds: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        failure: BaseException | None = None,
    ) -> None:
        if load_deadline_seconds <= 0:
            raise ConfigError(f"load_deadline_seconds must be > 0, got {load_deadline_seconds}")
        self._store = store
        self._load_deadline_seconds = load_deadline_seconds
        self._clock = clock
        self._loading: dict[str, float] = {}
        self.failure = failure
        self.missed_deadlines = 0

    @classmethod
    def open(
        cls,
        build: Callable[[], KVStore],
        *,
        fallback: Callable[[], KVStore] | None = None,
        load_deadline_seconds: float = 30.0,
    ) -> StoreAdapter:
        """Build the store; if that fails for a reason outside the program, return a degraded adapter that says why.

        `fallback` builds a smaller store (say, the device alone) for engines whose KV lives in the store's own memory,
        such as `DecodeLoop`; if it fails too, its error is raised.
        """
        try:
            return cls(build(), load_deadline_seconds=load_deadline_seconds)
        except (KVError, OSError, MemoryError, RuntimeError) as error:
            failure = error
        store = None if fallback is None else fallback()
        return cls(store, load_deadline_seconds=load_deadline_seconds, failure=failure)

    @property
    def degraded(self) -> bool:
        return self._store is None or self.failure is not None

    @property
    def health(self) -> str:
        """Either "ok" or "degraded: " and the reason."""
        if not self.degraded:
            return "ok"
        reason = "no store was given" if self.failure is None else f"{type(self.failure).__name__}: {self.failure}"
        return f"degraded: {reason}"

    @property
    def store(self) -> KVStore:
        """The store. Raises ConfigError when degraded."""
        if self._store is None:
            raise ConfigError(f"this adapter has no store ({self.health})")
        return self._store

    @property
    def geometry(self) -> KVGeometry | None:
        return None if self._store is None else self._store.geometry

    def reserve(
        self,
        sequence_id: str,
        token_ids: Sequence[int],
        *,
        exact: bool = False,
        prompt_tokens: int | None = None,
        spare_blocks: Sequence[int] = (),
        media: Sequence[Media] = (),
        identity: Identity | None = None,
    ) -> Reservation:
        if self._store is None:
            return Reservation(sequence_id, 0, 0)
        if sequence_id in self._loading:
            raise DuplicateSequence(f"sequence {sequence_id!r} is still loading")
        given = self._store.admit(
            sequence_id,
            token_ids,
            exact=exact,
            prompt_tokens=prompt_tokens,
            spare_blocks=spare_blocks,
            media=media,
            identity=identity,
        )
        if given.pending_tokens > 0:
            self._loading[sequence_id] = self._clock() + self._load_deadline_seconds
        return Reservation(sequence_id, given.reused_tokens, given.pending_tokens, given.by_tier, given.ask_again)

    def load(self) -> list[LoadEvent]:
        """Ends of loads since the last call. One that missed its deadline failed, and its sequence is gone."""
        if self._store is None:
            return []
        events = []
        now = self._clock()
        for sequence_id, deadline in list(self._loading.items()):
            state = self._store.fetch(sequence_id)
            if state.done:
                del self._loading[sequence_id]
                events.append(LoadEvent(sequence_id, LoadOutcome.DONE, state.ready_tokens))
            elif now >= deadline:
                del self._loading[sequence_id]
                self.missed_deadlines += 1
                self._store.abort(sequence_id)
                events.append(LoadEvent(sequence_id, LoadOutcome.FAILED, 0))
        return events

    def wait_layer(self, sequence_id: str, layer: int, timeout_seconds: float) -> bool:
        return self._store is None or self._store.wait_layer(sequence_id, layer, timeout_seconds)

    def allocate(self, sequence_id: str, token_count: int) -> None:
        if self._store is not None:
            self._store.grow(sequence_id, token_count)

    def commit(self, sequence_id: str, token_ids: Sequence[int]) -> None:
        if self._store is not None:
            self._store.commit(sequence_id, token_ids)

    def rollback(self, sequence_id: str, token_count: int) -> None:
        if self._store is not None:
            self._store.rollback(sequence_id, token_count)

    def preempt(self, sequence_id: str) -> None:
        self._end(sequence_id, "preempt")

    def finish(self, sequence_id: str) -> None:
        self._end(sequence_id, "finish")

    def abort(self, sequence_id: str) -> None:
        self._end(sequence_id, "abort")

    def _end(self, sequence_id: str, how: str) -> None:
        """A load that was still running ends unreported: its sequence is gone before the event."""
        self._loading.pop(sequence_id, None)
        if self._store is None:
            return
        if how == "preempt":
            self._store.preempt(sequence_id)
        elif how == "finish":
            self._store.finish(sequence_id)
        else:
            self._store.abort(sequence_id)
