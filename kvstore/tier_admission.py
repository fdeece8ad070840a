"""Which copies are worth writing to a slower tier: policies behind one small interface.

A store asks before it queues a copy for a tier that is not its own memory; what it is about to lose from the device to
host memory costs a memcpy and is never asked about. Called under the store's lock.

    AdmitReused   what was seen before, what is about to be read again, and prefixes long enough to pay at first sight
    AdmitAll      everything: for hand-over between processes, for tests, for stores that are filled once and read often
"""

from __future__ import annotations

from collections import OrderedDict
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.costs import CostModel

GHOST_BLOCKS = 1 << 16
"""Block hashes remembered, about 150 bytes each: a block counts as seen again while fewer others came between."""
LONG_PREFIX_SECONDS = 0.25
"""A prefix is written at first sight when reading it back would save this much: a write costs a thousandth of it."""


class Cause(StrEnum):
    """Why a copy is offered."""

    COMPUTED = "computed"  # its prompt or turn has been computed
    PRESSURE = "pressure"  # the device is about to evict it
    PREEMPTED = "preempted"  # its sequence was taken off the device and comes back
    FADING = "fading"  # the tier above is about to evict it
    ASKED = "asked"  # somebody named it
    CLOSE = "close"  # the store closes


class Candidate(NamedTuple):
    """A copy that could be written. prefix_tokens: of the prefix that it was computed in, 0 where nobody knows.

    is_used: somebody has read it in the tier above.
    """

    hash: bytes
    cause: Cause
    tokens: int
    byte_count: int
    prefix_tokens: int = 0
    is_used: bool = False


class TierAdmission(Protocol):
    """Decides what enters a slower tier."""

    def note_use(self, hashes: Sequence[bytes]) -> None:
        """A sequence computed or reused these blocks; told once for each sequence and block."""

    def admits(self, tier: str, candidates: Sequence[Candidate]) -> list[bool]:
        """Whether each is worth writing to the tier of that name."""


class AdmitAll:
    """Every copy."""

    def note_use(self, hashes: Sequence[bytes]) -> None:
        return

    def admits(self, tier: str, candidates: Sequence[Candidate]) -> list[bool]:
        return [True] * len(candidates)


class AdmitReused:
    """What will probably be read again, where reading it is quicker than computing it.

    A block is likely to be read when two sequences had it (a ghost table of hashes remembers the first), when it was
    read in the tier above, when its sequence was preempted, or when somebody asked for it. A prefix long enough that
    reading it back once would save LONG_PREFIX_SECONDS is written at first sight, all of its blocks.
    """

    def __init__(self, costs: CostModel, ghost_blocks: int = GHOST_BLOCKS) -> None:
        self._costs = costs
        self._ghost_blocks = ghost_blocks
        self._seen: OrderedDict[bytes, bool] = OrderedDict()  # hash -> seen again

    @property
    def remembered_count(self) -> int:
        return len(self._seen)

    def note_use(self, hashes: Sequence[bytes]) -> None:
        seen = self._seen
        for block_hash in hashes:
            seen[block_hash] = block_hash in seen
            seen.move_to_end(block_hash)
        while len(seen) > self._ghost_blocks:
            seen.popitem(last=False)

    def admits(self, tier: str, candidates: Sequence[Candidate]) -> list[bool]:
        return [self._pays(tier, one) and (self._will_be_read(one) or self._is_long(tier, one)) for one in candidates]

    def _pays(self, tier: str, one: Candidate) -> bool:
        """Reading it as one of many is quicker than computing it; the tier's latency is paid once for all of them."""
        if self._costs.always_load:
            return True
        load = one.byte_count / self._costs.tier(tier).bytes_per_second
        return load < one.tokens / self._costs.prefill_tokens_per_second

    def _will_be_read(self, one: Candidate) -> bool:
        return one.is_used or one.cause in (Cause.PREEMPTED, Cause.ASKED) or self._seen.get(one.hash, False)

    def _is_long(self, tier: str, one: Candidate) -> bool:
        prefix_bytes = one.prefix_tokens // one.tokens * one.byte_count
        saved = one.prefix_tokens / self._costs.prefill_tokens_per_second - self._costs.tier(tier).seconds(prefix_bytes)
        return saved >= LONG_PREFIX_SECONDS


def make_admission(name: str, costs: CostModel) -> TierAdmission:
    """The policy that the setting spill_policy names."""
    return AdmitAll() if name == "everything" else AdmitReused(costs)
