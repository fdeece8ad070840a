"""One growing token stream and the small results that the facade hands out about it.

Owned by `KVStore`: every mutable field here is read and written under the store's lock only.
The frozen classes are snapshots; they stay true after the lock is gone because nothing updates them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from allocator import BlockTable
    from kvstore.identity import HashChain
    from kvstore.retention import Retention
    from kvstore.tier import CopyKey


class SequenceState(StrEnum):
    LOADING = "loading"  # copies are on their way into its blocks; it must not compute yet
    RUNNING = "running"


RUNNING = SequenceState.RUNNING  # for the check in each call of a decode step: looking up a member costs more than it


class HitReason(StrEnum):
    """Why a lookup found nothing, in the words of `docs/vocabulary.md`."""

    BELOW_UNIT = "below_unit"  # the prompt is shorter than one block plus the token that must be computed
    ABSENT = "absent"  # no copy of the first block anywhere
    INEXACT = "inexact"  # only lossy copies, and the caller demands exactness
    WINDOW = "window"  # a prefix is there, but not the window that covers its end


@dataclass(frozen=True, slots=True)
class Hit:
    """What a lookup found. Holds nothing: blocks may go before they are used, unless pinned.

    tokens: length of the prefix that need not be computed, always at least one less than the prompt.
    device_tokens: how much of it is ready without any movement.
    by_tier: tokens by the tier they would come from ("device", or a tier's name).
    reason: None when tokens > 0, else why not.
    needed_tokens: the shortest prompt that could hit at all.
    pending: a slow tier is still looking for more: ask again, after the next step.
    """

    tokens: int
    device_tokens: int
    by_tier: Mapping[str, int]
    reason: HitReason | None
    needed_tokens: int
    pending: bool = False

    def explain(self) -> str:
        if self.pending:
            return f"{self.tokens} tokens reusable so far; a tier is still being asked for more"
        if self.reason is None:
            parts = ", ".join(f"{count} from {tier}" for tier, count in self.by_tier.items())
            return f"{self.tokens} tokens reusable ({parts})"
        if self.reason is HitReason.BELOW_UNIT:
            return f"nothing reusable: a prompt needs at least {self.needed_tokens} tokens to share a whole block"
        return f"nothing reusable: {self.reason.value}"


@dataclass(frozen=True, slots=True)
class Admission:
    """reused_tokens are ready on the device now; pending_tokens become ready once `fetch` says so.

    ask_again: nothing was admitted, since a slow tier is still looking the prompt up; admit again after the next step.
    Said for at most `fetch_deadline_seconds` from the first question about a prompt.
    """

    sequence_id: str
    reused_tokens: int
    pending_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    ask_again: bool = False


@dataclass(frozen=True, slots=True)
class FetchState:
    """done: nothing is in flight any more. ready_tokens: where computing starts once done.

    expected_tokens: where it will start if all arrives. layers_ready: so many layers of the model, from the first on,
    are there for all of them; 0 while none is, when a copy has failed, and unless copies come by layers.
    """

    done: bool
    ready_tokens: int
    layers_ready: int = 0
    expected_tokens: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """A pin with an end: its blocks stay on the device until `unpin`, or until `expires_at`."""

    lease_id: int
    tokens: int
    expires_at: float
    blocks: tuple[tuple[int, ...], ...]  # block ids by group
    active: bool = True


@dataclass(slots=True, eq=False)
class PendingCopy:
    """One block that is being fetched from a lower tier into a device block, for all sequences that wait for it.

    Same hash, same chain before it: its position is the same in each of them.
    """

    group: int
    position: int  # index of the block in its table
    block_id: int
    block_hash: bytes
    key: CopyKey
    form: int
    tier: str
    outcome: bool | None = None  # None while in flight
    waiters: list[Sequence] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    sequence_id: str
    chain: HashChain  # over the committed tokens, then the rest of the prompt
    root: bytes
    tables: list[BlockTable]
    exact: bool
    prompt_tokens: int
    written: int = 0
    committed: int = 0
    sealed_blocks: int = 0
    lossy_from: int | None = None  # first position that is read lossy, or was computed while one before it was
    cold_generation: int = -1  # the store's cooling count when this sequence last looked at its own blocks
    prefill_done: bool = False
    cool_cursor: int = 1  # first block that was not yet considered for cooling; block 0 never cools
    shared: bool = True  # False after a reset: goes on computing, names nothing any more
    state: SequenceState = SequenceState.RUNNING
    reused_tokens: int = 0
    pending: list[PendingCopy] = field(default_factory=list)
    loading_tokens: int = 0  # what is there if all that is pending arrives; written ones beyond are computed meanwhile
    by_layer: bool = False  # while loading: its copies come by layers, so it may compute behind them
    private_from: int | None = None  # first token position whose blocks must not be named
    tenant: str = ""  # of the identity it was admitted under
    retention: tuple[Retention, ...] = ()
    known_blocks: int = 0  # leading blocks that others had before
    noted_blocks: int = 0  # leading blocks whose use the policy of slower tiers has been told of
    held_tails: dict[int, int] = field(default_factory=dict)  # group -> partly filled sealed block kept from cooling

    def fork(self, sequence_id: str) -> Sequence:
        """Another sequence with the same past, whose tables share every block. Holds are not copied."""
        return replace(
            self,
            sequence_id=sequence_id,
            chain=self.chain.fork(),
            tables=[table.fork() for table in self.tables],
            cool_cursor=1,
            pending=[],
            held_tails={},
        )

    def is_exact_up_to(self, token_count: int) -> bool:
        """True when the first `token_count` tokens were computed, or taken over, in full precision only."""
        return self.lossy_from is None or token_count <= self.lossy_from
