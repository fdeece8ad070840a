"""The contract of every tier below the device, and the queue that tiers are built on.

A tier stores immutable copies of blocks under a CopyKey. Rules that every tier keeps (kvstore.testing.TierContract
checks them):

- submit_put and submit_get only enqueue. Each Transfer ends in exactly one Completion, which poll() hands out; poll
  never waits. A result comes per key: part of a batch may fail.
- The caller owns the buffers. They must stay unchanged (put) or unread (get) from submit until the Completion has been
  polled; after it the tier keeps no reference to them.
- A copy is visible (contains, get) only when all its bytes are there. A get gives the bytes of that key, or a code that
  is not OK and then the buffer's contents mean nothing. Bad bytes are a code, never an exception.
- used_bytes never exceeds capacity_bytes, at any moment.
- cancel() ends a transfer early: keys not yet done are CANCELLED; the one Completion still comes.
- A get by layers delivers the first layers of all its copies, then the next, where copies are stored so that they can
  be checked in parts; Transfer.progress says how far it is, and reaches no byte that was not checked. What it has
  reached may be read before the Completion, and counts for nothing unless that says OK.

Calls come from the thread that holds the store's lock, or from one thread, save clear and the calls about epochs, which
may come beside them; results are made on the executor. A tier's own lock guards its index only and is never held while
bytes are copied.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from allocator.block_marks import PLAIN, Steps
from allocator.errors import UsageError
from kvstore.copy_key import CopyKey as CopyKey
from kvstore.layer_progress import LayerProgress

Buffer: TypeAlias = Any
"""Anything contiguous with the buffer protocol: bytes, memoryview, numpy array, mmap."""

ByteRow: TypeAlias = npt.NDArray[np.uint8]

_UINT8 = np.dtype(np.uint8)
_LOG = logging.getLogger(__name__)


class ResultCode(StrEnum):
    """How one key of a transfer ended."""

    OK = "ok"
    MISS = "miss"  # get: not there (any more)
    FULL = "full"  # put: no room and nothing may be evicted, or the queue is at its limit
    CORRUPT = "corrupt"  # get: there, but not what was asked for; the tier has dropped it
    FAILED = "failed"  # the tier could not do it; counted by cause
    CANCELLED = "cancelled"
    TOO_LARGE = "too_large"  # put: can never fit


class PutItem(NamedTuple):
    """One copy to store: its bytes as pieces in order, and the hash of the block before (None: first of its chain).

    steps: priorities, as `allocator.block_marks` has them, for a tier that heeds them.
    """

    key: CopyKey
    pieces: Sequence[Buffer]
    parent: bytes | None = None
    steps: Steps = PLAIN


class GetItem(NamedTuple):
    """One copy to read into a writable buffer (or several in order) of exactly the stored length."""

    key: CopyKey
    buffer: Buffer | Sequence[Buffer]


class Job(NamedTuple):
    """One key of a transfer as the hooks see it."""

    key: CopyKey
    rows: list[ByteRow]
    parent: bytes | None
    size_bytes: int
    steps: Steps = PLAIN


class TransferKind(StrEnum):
    PUT = "put"
    GET = "get"


class Stage(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


class Transfer:
    """A batch under way. Made by a tier; the caller may look at it and cancel it."""

    __slots__ = (
        "_claims",
        "_jobs",
        "_tier",
        "by_layer",
        "cancelled",
        "id",
        "keys",
        "kind",
        "progress",
        "stage",
        "tier_name",
        "total_bytes",
    )

    def __init__(self, tier: Tier, number: int, kind: TransferKind, jobs: list[Job], *, by_layer: bool = False) -> None:
        self._tier = tier
        self.by_layer = by_layer
        self.progress = LayerProgress()
        self._jobs = jobs
        self._claims: Sequence[Any] | None = None
        self.id = number
        self.tier_name = tier.name
        self.kind = kind
        self.keys = tuple(job.key for job in jobs)
        self.total_bytes = sum(job.size_bytes for job in jobs)
        self.cancelled = False
        self.stage: Stage = Stage.QUEUED

    @property
    def done(self) -> bool:
        """True once the Completion lies in the queue (it may not have been polled)."""
        return self.stage is Stage.DONE

    def cancel(self) -> bool:
        """Ask for an early end. False when it is too late. The Completion comes in either case."""
        return self._tier.cancel(self)

    def __repr__(self) -> str:
        return f"Transfer({self.tier_name} {self.kind} {self.id}, {len(self.keys)} keys, {self.stage})"


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a transfer: one result per key, in the order of the items."""

    transfer: Transfer
    results: tuple[ResultCode, ...]


class Fading(NamedTuple):
    """A copy that would be evicted soon. is_used: somebody has read or wanted it since it was stored."""

    key: CopyKey
    parent: bytes | None
    size_bytes: int
    is_used: bool


class Lookup(NamedTuple):
    """What became of the lookup of a prompt, as the tier is told that had `copies` of it.

    key: the first block's, in the form that is asked for first. hashes: of the prompt's whole blocks, in order, from
    position `start` on.
    copies: position -> copy that was found in this tier; what is in none of these was not asked of it.
    missed: positions that nobody had, and that would have been of use. covered: positions that nothing reads, since
    copies behind them do (a window's). tokens: of the whole prompt.
    """

    key: CopyKey
    hashes: Sequence[bytes]
    copies: Mapping[int, CopyKey]
    missed: range
    tokens: int
    covered: range = range(0)
    start: int = 0


@dataclass(frozen=True, slots=True)
class Loan:
    """A stored copy's own bytes, to be read in place: it is not evicted and its slot not reused before `end`."""

    row: ByteRow
    end: Callable[[], None]


class Tier(ABC):
    """One place for copies: see the rules at the top of this module."""

    name: str

    private_memory = False
    """Copies lie in this process's memory: they cost a memcpy, and go with the process."""

    holds_bytes = True
    """False: copies are counted and nothing is kept of them, for simulation under a device that has no bytes."""

    delivers_layers = False
    """A get by layers brings one group of layers after the other, and not all with the last byte."""

    put_batch_copies = 16
    """A put of fewer copies costs more a copy: with another under way it is better to wait for that many."""

    @abstractmethod
    def contains(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Which copies are stored and whole. A promise of nothing: a get may still miss."""

    def leading_run(self, key: CopyKey, hashes: Sequence[bytes]) -> int:
        """How many of `hashes`, from the first on, are stored in the form of `key` (its own hash is ignored)."""
        present = self.contains(key.with_hashes(hashes))
        return present.index(False) if False in present else len(present)

    @abstractmethod
    def submit_put(self, items: Sequence[PutItem | tuple[Any, ...]]) -> Transfer:
        """Store copies: (key, pieces) or (key, pieces, parent). UsageError for a bad argument; then nothing was queued.

        A key that is there already is OK and only touched: copies are immutable.
        """

    @abstractmethod
    def submit_get(self, items: Sequence[GetItem | tuple[Any, ...]], *, by_layer: bool = False) -> Transfer:
        """Read copies: (key, writable buffer). UsageError for a bad argument; then nothing was queued.

        by_layer: deliver in the order of layers, see above.
        """

    @abstractmethod
    def poll(self) -> list[Completion]:
        """The transfers that have ended since the last call. Never waits."""

    @abstractmethod
    def cancel(self, transfer: Transfer) -> bool:
        """Ask for an early end of a transfer of this tier; see Transfer.cancel."""

    @abstractmethod
    def delete(self, keys: Sequence[CopyKey]) -> int:
        """Drop copies; how many went. Pinned ones stay; readers under way finish on the old bytes.

        They are no hits from now on. Where the dropping itself waits for a server, `used_bytes` counts them until then.
        """

    @abstractmethod
    def clear(self) -> None:
        """Drop everything, pins included, and cancel what is queued. TierError when that cannot be promised."""

    def pending_count(self, keys: Sequence[CopyKey]) -> int:
        """How many of them this tier is still looking up, so that `contains` may say more soon; 0: it knows at once."""
        return 0

    def read_epoch(self) -> int:
        """The epoch kept here, 0 where none is. May wait; TierError when it cannot be had."""
        return 0

    def raise_epoch(self, least: int) -> int:
        """Keep an epoch larger than any before here and at least `least`; which one. May wait; TierError as above.

        A tier that others share returns once they can have noticed.
        """
        return least

    def seen_epoch(self) -> int | None:
        """The epoch as last read here; None while that is too long ago to count. Never waits, but has it read anew."""
        return 0

    def follow_epoch(self, epoch: int) -> None:  # noqa: B027 - a tier that is shared knows already
        """An epoch began elsewhere: remember it, and let old copies go. Never waits; what fails is counted."""

    def describe_root(self, root: bytes, description: Mapping[str, str]) -> None:  # noqa: B027 - most have no place for it
        """Words for operators (model, tenant, ...) to be kept beside the copies of this root. No secrets."""

    @property
    def is_down(self) -> bool:
        """Whether nothing could be had from it when it was last tried."""
        return False

    @property
    def is_resting(self) -> bool:
        """Down, and not even tried now: what it is believed to hold cannot be had."""
        return False

    @property
    def orphan_count(self) -> int:
        """Copies whose parent block has none here; 0 for a tier that does not know."""
        return 0

    @property
    @abstractmethod
    def used_bytes(self) -> int: ...

    @property
    @abstractmethod
    def capacity_bytes(self) -> int: ...

    @abstractmethod
    def close(self) -> None:
        """Cancel what is queued, finish what runs, give memory and threads back. Idempotent; poll still works."""

    def touch(self, keys: Sequence[CopyKey]) -> None:  # noqa: B027 - a tier without recency has nothing to do
        """Note a use elsewhere (a device hit), so that a prefix does not grow old below its suffix."""

    def keep(self, keys: Sequence[CopyKey], steps: Steps) -> None:  # noqa: B027 - most let the least recently used go
        """A use that wants these copies evicted later, or earlier, than others; the most demanding one counts."""

    @property
    def marked_count(self) -> int:
        """Copies of which something other than usual is wanted."""
        return 0

    def expire(self, now: float) -> None:  # noqa: B027 - as above
        """The time is `now`: priorities end. To be called often."""

    def set_quota(self, tenant: str, quota_bytes: int) -> None:  # noqa: B027 - most have none
        """Most bytes of a tenant's copies, of those that come from now on; 0: no limit. `describe_root` says whose."""

    def pin(self, keys: Sequence[CopyKey]) -> list[bool]:
        """Keep copies until unpin, one count each. False where absent, or where this tier pins nothing."""
        return [False] * len(keys)

    def unpin(self, keys: Sequence[CopyKey]) -> None:
        """Give back pins that pin() granted. UsageError when one was not, and then nothing changes."""
        if keys:
            raise UsageError(f"tier {self.name}: unpin of {len(keys)} keys; this tier pins nothing")

    def lend(self, keys: Sequence[CopyKey]) -> list[Loan | None]:
        """The bytes of copies where they lie, to feed a tier below. Not a use of the copy: it ages on.

        None where absent, or where this tier has no bytes to lend. Every loan must be ended.
        """
        return [None] * len(keys)

    def fading(self, count: int | None) -> list[Fading]:
        """Copies that would be evicted next, each named once since its last use; None: all there are, warmest first.

        None at all where this tier does not know.
        """
        return []

    @abstractmethod
    def set_waker(self, waker: Callable[[], None] | None) -> None:
        """A call made, on any thread, whenever a Completion has been queued."""

    def note_prefill_speed(self, tokens_per_second: float) -> None:  # noqa: B027 - most have no use for it
        """How fast the engine computes what it does not find here. Never waits."""

    def note_lookup(self, lookup: Lookup) -> None:  # noqa: B027 - most have no use for it
        """A request goes by what this lookup found: told once an admission, however often was asked. Never waits."""

    def note_reuse(self, key: CopyKey, blocks: int) -> None:  # noqa: B027 - as above
        """So many blocks of a prompt (form: of `key`) need not be computed for what was read here. Never waits."""

    def counters(self) -> dict[str, int]:
        """Counts since start, by cause."""
        return {}


def as_byte_row(buffer: Buffer, *, writable: bool = False) -> ByteRow:
    """A flat uint8 view of a contiguous buffer, no copy. UsageError when there is none."""
    if type(buffer) is np.ndarray and buffer.dtype is _UINT8 and buffer.ndim == 1:
        flags = buffer.flags
        if flags.c_contiguous and (flags.writeable or not writable):
            return buffer
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(f"buffer: got {type(buffer).__name__} ({error}); expected a buffer of bytes") from None
    if not view.c_contiguous:
        raise UsageError(f"buffer: got a view of shape {view.shape} with gaps; expected contiguous bytes")
    if writable and view.readonly:
        raise UsageError(f"buffer: got a read-only {type(buffer).__name__}; expected a writable one")
    return np.frombuffer(view, _UINT8) if view.nbytes else np.empty(0, _UINT8)
